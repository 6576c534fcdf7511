#!/usr/bin/env bash
# jsonl to Megatron's .bin/.idx with GPT-2's vocabulary, then GPT-3 with tensor and pipeline parallelism: see README.md.
set -euo pipefail
SIZE=${SIZE:-small} # the one line to change: full
IMAGE=${IMAGE:-/fsx/ingot-0.1.0.sqsh}
# shellcheck source=../common.sh source-path=SCRIPTDIR
source "$(dirname "$0")/../common.sh"

cp "$EXAMPLES/megatron-gpt3/gpt3.sbatch" . # where a container sees it too
OSCAR=https://huggingface.co/bigscience/misc-test-data/resolve/main/stas/oscar-1GB.jsonl.xz
GPT2=https://s3.amazonaws.com/models.huggingface.co/bert
FULL=(gpt3.sbatch -N 2 --profile aws-p5 -i "$IMAGE" -m /fsx:/fsx --time 24:00:00 --chain 3)
SMALL=(gpt3.sbatch num_layers=4 hidden_size=64 num_attention_heads=4 seq_length=64 max_position_embeddings=64
  tensor_model_parallel_size=2 pipeline_model_parallel_size=2 micro_batch_size=4 global_batch_size=16
  train_samples=240 lr_decay_samples=240 lr_warmup_samples=48 lr=0.01 min_lr=0.001 bf16=false eval_iters=2
  save=gpt3-small load=gpt3-small save_interval=15)
PROCESSES=2 # on each of two nodes, since 2 x 2 processes hold one copy of the model

PREPARE=(--output-prefix gpt2/my-gpt2 --tokenizer-type GPT2BPETokenizer --vocab-file gpt2-vocab.json
  --merge-file gpt2-merges.txt --append-eod)

if [[ $SIZE == full ]]; then
  show curl -fsSLO "$GPT2/gpt2-vocab.json" -O "$GPT2/gpt2-merges.txt"
  show ingot prepare --input "$OSCAR" "${PREPARE[@]}"
  train gpt3-7.5b
else
  make_text
  cp text/gpt2-vocab.json text/gpt2-merges.txt .
  show ingot prepare --input text/train.jsonl "${PREPARE[@]}" --workers 2
  show ingot inspect gpt2/my-gpt2_text_document
  train gpt3-small
fi
