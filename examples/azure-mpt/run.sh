#!/usr/bin/env bash
# MPT on Azure ND H100 v5: data streamed from Blob or Lustre to the nodes' disks, sharded checkpoints: see README.md.
set -euo pipefail
SIZE=${SIZE:-small} # the one line to change: full
IMAGE=${IMAGE:-/data/images/ingot-0.1.0.sqsh}
# shellcheck source=../common.sh source-path=SCRIPTDIR
source "$(dirname "$0")/../common.sh"

DATA_REMOTE=${DATA_REMOTE:-my-copy-c4} # or az://CONTAINER/my-copy-c4
# streamed DATA_LOCAL: overrides, as the guide writes them, that keep the data of DATA_REMOTE in a folder of the node
streamed() {
  echo "variables.data_local=$1 variables.data_remote=$DATA_REMOTE"
}
SAVING="fsdp_config.state_dict_type=sharded save_num_checkpoints_to_keep=10"
# shellcheck disable=SC2054  # a comma within an option
FULL=(-c mpt-30b -y "$(streamed /mnt/nvme/c4) $SAVING save_interval=1000ba save_folder=mpt-30b"
  -i "$IMAGE" -m /data:/data,/mnt/nvme:/mnt/nvme -N 16 --profile azure-ndv5 --time 24:00:00 --chain 5)
CUT="model.d_model=32 model.n_heads=4 model.n_layers=2 max_seq_len=64 precision=fp32 optimizer.lr=0.01"
CUT+=" global_train_batch_size=8 max_duration=24ba scheduler.t_warmup=4ba eval_subset_num_batches=4"
SMALL=(-c mpt-125m -y "$(streamed nvme) $SAVING save_interval=2ba save_folder=mpt-small $CUT")

PREPARE=(--out_root my-copy-c4 --concat_tokens 2048 --eos_text '<|endoftext|>')
show ingot checkpoint size mpt-30b mpt-70b
if [[ $SIZE == full ]]; then
  show ingot prepare --dataset allenai/c4 --data_subset en --splits train val "${PREPARE[@]}" \
    --tokenizer EleutherAI/gpt-neox-20b --num_workers 16
  train mpt-30b
else
  make_text
  show ingot prepare --path text/train.jsonl --split train "${PREPARE[@]}" --tokenizer text/20B_tokenizer.json
  show ingot prepare --path text/val.jsonl --split val "${PREPARE[@]}" --tokenizer text/20B_tokenizer.json
  train mpt-small
  show ingot checkpoint list mpt-small
fi
