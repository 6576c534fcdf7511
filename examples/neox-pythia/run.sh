#!/usr/bin/env bash
# The Pile to .bin/.idx with the 20B tokenizer, Pythia from NeoX's JSON files, and a model for transformers: README.md.
set -euo pipefail
SIZE=${SIZE:-small} # the one line to change: full
MODEL=${MODEL:-14M} # 31M 70M 160M 410M 1B 1-4B 2-8B 6-9B 12B
IMAGE=${IMAGE:-/fsx/ingot-0.1.0.sqsh}
# shellcheck source=../common.sh source-path=SCRIPTDIR
source "$(dirname "$0")/../common.sh"

cp -r "$EXAMPLES/neox-pythia/configs" . # where a container sees them too
FULL=(--dialect neox "configs/$MODEL.json" configs/common.json --name "pythia-$MODEL"
  -N 2 --profile aws-p5 -i "$IMAGE" -m /fsx:/fsx --time 24:00:00 --chain 5)
SMALL=(--dialect neox "configs/$MODEL.json" configs/common.json --name "pythia-$MODEL" seq_length=64
  max_position_embeddings=64
  train_batch_size=16 train_micro_batch_size_per_gpu=8 train_iters=20 lr_decay_iters=20 warmup=0.2 eval_iters=2
  log_interval=1 precision=fp32)

PREPARE=(--output-prefix pile/pile --tokenizer-type HFTokenizer --vocab-file text/20B_tokenizer.json --append-eod)

if [[ $SIZE == full ]]; then
  mkdir -p text
  show curl -fsSL -o text/20B_tokenizer.json \
    https://huggingface.co/EleutherAI/gpt-neox-20b/resolve/main/tokenizer.json
  show ingot prepare --dataset monology/pile-uncopyrighted "${PREPARE[@]}"
else
  make_text
  show ingot prepare --input text/train.jsonl "${PREPARE[@]}"
  show ingot inspect pile/pile_text_document
fi
train "pythia-$MODEL"
if [[ ! -d pythia-$MODEL-hf ]]; then
  show ingot export "pythia-$MODEL" --to hf "pythia-$MODEL-hf"
fi
