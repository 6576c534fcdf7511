# shellcheck shell=bash source-path=SCRIPTDIR
# A share of a preparation (an element of a job array), or the last job, which combines the shares.
source common.sh # the launcher puts the file here

stage_on_all_nodes
if [[ -s $excluded_file ]]; then exit "$EXIT_FAULT"; fi
share=() # the last job has none
if [[ -n ${SLURM_ARRAY_TASK_ID-} ]]; then share=(--share "$SLURM_ARRAY_TASK_ID/$NODES"); fi

# Before the time limit, back into the queue: the next start continues with what is left to do.
trap 'scontrol requeue "$SLURM_JOB_ID" || true' USR2
for number in 1 2 3 4 5; do
  echo "attempt $start_id.$number on $SLURM_JOB_NODELIST"
  run_attempt "$start_id.$number" --nodes=1 --ntasks=1 -- "${share[@]}"
  if [[ $code == "$EXIT_FINISHED" ]] || is_final; then break; fi
  sleep "$number"
done
exit "$code"
