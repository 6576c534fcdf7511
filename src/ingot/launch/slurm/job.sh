# shellcheck shell=bash source-path=SCRIPTDIR
# A training run: attempts inside the allocation, then a requeue. Restarts are bounded, whoever causes them: this script,
# the next job of a chain, or Slurm after the death of a node.
source common.sh # the launcher puts the file here

MAX_SILENT=6 # attempts in a row that record no result
MAX_IDLE=6   # attempts in a row without a new checkpoint, and one more for each spare node

newest_checkpoint() {
  local path step newest=0
  for path in "$CHECKPOINTS"/*/"$MANIFEST"; do
    step=${path%/"$MANIFEST"} step=${step##*/}
    if [[ $step =~ ^[0-9]+$ ]] && ((10#$step > newest)); then newest=$((10#$step)); fi
  done
  echo "$newest"
}

halt_without_progress() { # each start is a line of STARTS_FILE, with the newest checkpoint that it found
  local count host last why
  count=$(grep -c " $(newest_checkpoint)\$" "$STARTS_FILE" 2>/dev/null) || true
  if ((${count:-0} >= MAX_STARTS)); then
    read -r last host _ < <(tail -n 1 "$STARTS_FILE")
    why=$(grep "^$last " "$ENDS_FILE" 2>/dev/null | tail -n 1) || true
    why=${why:-$last on $host: it exited without reporting a result; the node may have died}
    halt "$count starts of the job have led to no new checkpoint: giving up; the last was $why"
  fi
}

usable_nodes() { # those of the allocation that are not excluded
  local host
  while read -r host; do
    grep -qxF -- "$host" "$excluded_file" 2>/dev/null || echo "$host"
  done < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
}

# USR2 comes before the time limit, TERM from scancel: tell the step to save, and go on waiting for it.
# shellcheck disable=SC2317,SC2329  # called by the traps
forward() {
  requested=$1
  echo "$1" >"$STOP_REQUEST_FILES.$start_id" || true # first: by it the nodes tell a request from srun's own TERM
  [[ -z $step_pid ]] || scancel --signal=USR2 "$SLURM_JOB_ID.$step" 2>/dev/null || true
}

halt_without_progress
echo "$start_id ${SLURMD_NODENAME:-?} $(newest_checkpoint)" >>"$STARTS_FILE"
stage_on_all_nodes

requested='' number=0 silent=0 idle=0
step=$((${#STAGE} > 0)) # Slurm counts the job's steps; staging was one
trap 'forward USR2' USR2
trap 'forward TERM' TERM
while :; do
  if [[ -n $requested ]]; then # between two attempts
    code=$EXIT_CONTINUE
    break
  fi
  number=$((number + 1))
  attempt=$start_id.$number
  mapfile -t usable < <(usable_nodes)
  if ((${#usable[@]} < NODES)); then
    reason="$NODES nodes are needed and ${#usable[@]} are usable: ${usable[*]:-none}${reason:+; $reason}"
    echo "attempt $attempt: $reason"
    code=$EXIT_FAULT
    break
  fi
  chosen=("${usable[@]:0:NODES}")
  list=$(IFS=, && echo "${chosen[*]}")
  export MASTER_ADDR=${chosen[0]} MASTER_PORT=$((61000 + (SLURM_JOB_ID * 7 + number) % 4500)) INGOT_JOB_NODES=$list
  echo "attempt $attempt on $list"
  before=$(newest_checkpoint)
  run_attempt "$attempt" --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 --nodelist="$list" \
    --kill-on-bad-exit=1 --wait=60 --overlap
  step=$((step + 1))
  reason="attempt $attempt ended with code $code (srun: $srun_code)"
  if has_ended || [[ -n $requested || $code == "$EXIT_FINISHED" || $code == "$EXIT_CONTINUE" ]]; then break; fi
  if is_final; then break; fi
  silent=$((recorded ? 0 : silent + 1))
  if ((silent == MAX_SILENT)); then # the node agent never got far enough to decide for itself
    halt "$silent attempts exited without reporting a result; what srun printed is in $OUTPUT_FOLDER"
  fi
  if [[ $(newest_checkpoint) == "$before" ]]; then idle=$((idle + 1)); else idle=0; fi
  if ((idle == MAX_IDLE + SLURM_JOB_NUM_NODES - NODES)); then # the node agents count what they record; this, all
    halt "$idle attempts in a row have led to no new checkpoint: giving up; $reason"
  fi
  # nodes that the cluster has lost
  sinfo --noheader --Node --states=down,drain,fail,no_respond --nodes="$list" --format=%N 2>/dev/null |
    sort -u | tee -a "$excluded_file" | sed "s/^/$SLURM_JOB_ID /" >>"$LOST_NODES_FILE" || true
  sleep "$((number < 5 ? number : 30))" &
  wait $! || true
done

if [[ -e $FINISHED_FILE ]]; then exit "$EXIT_FINISHED"; fi
signaled=0
if [[ $code == "$EXIT_CONTINUE" && -e $STOP_REQUEST_FILES.$start_id ]]; then
  signaled=1
  reason="it was asked to save and stop (${requested:-a signal}); see --time and --signal-seconds if that came too early"
fi
echo "$start_id on ${SLURMD_NODENAME:-?}: $reason" >>"$ENDS_FILE"
if has_ended || ((${SLURM_ARRAY_TASK_ID:-1} != ${SLURM_ARRAY_TASK_MAX:-1})); then
  : # nothing is left to do, or the next job of the chain does it
elif [[ $code == "$EXIT_CONTINUE" ]] && ((!signaled)); then
  echo "the run stopped by itself (max_wall_time), so the job is not requeued"
elif [[ $requested != TERM && $code != "$EXIT_FINISHED" ]] && ! is_final; then
  halt_without_progress
  scontrol requeue "$SLURM_JOB_ID" || true # the last resort: the next job of a chain would start sooner
fi
if [[ $code == "$EXIT_CONTINUE" ]]; then exit "$EXIT_FINISHED"; fi
exit "$code"
