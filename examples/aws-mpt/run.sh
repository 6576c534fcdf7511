#!/usr/bin/env bash
# C4 to MDS shards, and MPT on two nodes with EFA: see README.md.
set -euo pipefail
SIZE=${SIZE:-small} # the one line to change: full
IMAGE=${IMAGE:-/apps/ingot-0.1.0.sqsh}
# shellcheck source=../common.sh source-path=SCRIPTDIR
source "$(dirname "$0")/../common.sh"

DATA=(data.train.path=c4-dataset data.train.split=train_small data.eval.path=c4-dataset data.eval.split=val_small)
FULL=(mpt-7b "${DATA[@]}" max_duration=1ep save_folder=mpt-7b
  -N 2 --profile aws-p5 -i "$IMAGE" -m /fsx:/fsx --time 24:00:00 --chain 3)
SMALL=(mpt-125m "${DATA[@]}" save_folder=mpt-small model.d_model=64 model.n_heads=4 model.n_layers=2 max_seq_len=64
  global_train_batch_size=8 max_duration=20ba scheduler.t_warmup=4ba optimizer.lr=0.01 precision=fp32
  eval_subset_num_batches=4)

# prepare SPLIT OPTIONS...: as a job of Slurm, which asks for no GPU; or here, where no Slurm answers
prepare() {
  local options=(--splits "$1" --out_root c4-dataset --concat_tokens 2048 --eos_text '<|endoftext|>' "${@:2}")
  if [[ $SIZE == full ]]; then
    show ingot launch slurm prepare "${options[@]}" -i "$IMAGE" -m /fsx:/fsx --time 4:00:00
    await "c4-dataset/.prepare-$1"
  elif has_slurm; then
    show ingot launch slurm prepare "${options[@]}" --profile cpu --time 30
    await "c4-dataset/.prepare-$1"
  else
    show ingot prepare "${options[@]}"
  fi
}

if [[ $SIZE == full ]]; then
  for split in train_small val_small; do
    prepare "$split" --dataset allenai/c4 --data_subset en --tokenizer EleutherAI/gpt-neox-20b
  done
  show ingot inspect c4-dataset
  train mpt-7b
else
  make_text
  prepare train_small --path text/train.jsonl --tokenizer text/20B_tokenizer.json
  prepare val_small --path text/val.jsonl --tokenizer text/20B_tokenizer.json
  show ingot inspect c4-dataset
  show ingot launch profiles show aws-p5
  train mpt-small
fi
