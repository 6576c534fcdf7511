#!/usr/bin/env bash
# C4 to shards, a test of the loader, 125m on one node, then on two by arguments and by variables: see README.md.
set -euo pipefail
SIZE=${SIZE:-small} # the one line to change: full
# shellcheck source=../common.sh source-path=SCRIPTDIR
source "$(dirname "$0")/../common.sh"

RUN=(mosaic_gpt-125m data.train.path=my-copy-c4 data.train.split=train_small
  data.eval.path=my-copy-c4 data.eval.split=val_small)
PREPARE=(--out_root my-copy-c4 --concat_tokens 2048)
PROCESSES=8 # on each node
if [[ $SIZE != full ]]; then
  RUN+=(model.d_model=32 model.n_heads=4 model.n_layers=2 max_seq_len=64 precision=fp32 optimizer.lr=0.02
    global_train_batch_size=8 max_duration=12ba scheduler.t_warmup=2ba eval_subset_num_batches=4)
  PROCESSES=1
fi

# On two machines: the same command on each, with its number and the address of the first. By arguments ...
by_arguments() {
  show ingot train "${RUN[@]}" save_folder=by-arguments --nproc "$PROCESSES" --world_size "$((2 * PROCESSES))" \
    --node_rank "$1" --master_addr "$2" --master_port "$3"
}
# ... or by the variables that Composer's launcher reads.
by_variables() {
  show env WORLD_SIZE="$((2 * PROCESSES))" LOCAL_WORLD_SIZE="$PROCESSES" NODE_RANK="$1" MASTER_ADDR="$2" \
    MASTER_PORT="$3" ingot train "${RUN[@]}" save_folder=by-variables
}

if [[ -n ${NODE_RANK:-} ]]; then # this is one of two machines
  by_arguments "$NODE_RANK" "$MASTER_ADDR" "${MASTER_PORT:-29500}"
  exit
fi
if [[ $SIZE == full ]]; then
  show ingot prepare --dataset allenai/c4 --data_subset en --splits train_small val_small "${PREPARE[@]}" \
    --tokenizer gpt2
else
  make_text
  show ingot prepare --path text/train.jsonl --splits train_small "${PREPARE[@]}" --tokenizer text/gpt2-vocab.json
  show ingot prepare --path text/val.jsonl --splits val_small "${PREPARE[@]}" --tokenizer text/gpt2-vocab.json
fi
show ingot inspect my-copy-c4 --text --samples 1 --max_seq_len 32 --loader --batches 10
show ingot inspect "file://$PWD/my-copy-c4" --split val_small --local cache --loader --batches 10 --max_seq_len 64
show ingot train "${RUN[@]}" save_folder=one-node
if [[ $SIZE != full ]]; then # two "machines" that are both this one
  port=$((20000 + RANDOM % 10000))
  by_arguments 1 127.0.0.1 "$port" &
  by_arguments 0 127.0.0.1 "$port"
  wait $!
  by_variables 1 127.0.0.1 "$((port + 1))" &
  by_variables 0 127.0.0.1 "$((port + 1))"
  wait $!
fi
