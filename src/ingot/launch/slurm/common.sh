# shellcheck shell=bash disable=SC2034,SC2153 source-path=SCRIPTDIR
# The beginning of every job script. The launcher writes the #SBATCH options and the variables in capitals above it;
# files and exit codes are those of launch/protocol.py.
source stage_image.sh
set -euo pipefail
umask 027

start_id=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0} # one start of this job
excluded_file=$EXCLUDED_FILES.$SLURM_JOB_ID
step_pid='' # of srun, while an attempt runs
reason=''   # why this start ended

has_ended() { [[ -e $FINISHED_FILE || -e $STOP_FILE || -e $HALT_FILE ]]; }
is_final() { [[ $code == "$EXIT_USER_ERROR" || $code == "$EXIT_GIVEN_UP" ]]; }

halt() { # REASON: no job of this launch tries again
  echo "$1" | tee "$HALT_FILE"
  exit "$EXIT_GIVEN_UP"
}

# Stage the image on each node and let the run use the copy. Nodes where that fails are excluded.
stage_on_all_nodes() {
  local digest
  [[ -n $STAGE ]] || return 0
  read -r digest _ <"$IMAGE.sha256"
  # shellcheck disable=SC2016  # expanded on the nodes
  srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --overlap --label --open-mode=append \
    --output="$OUTPUT_FOLDER/$SLURM_JOB_ID.stage.%n.out" bash -c "$(declare -f stage_image)"'
      stage_image "$1" "$2" "$3" || { echo "cannot copy $1 to $2 and verify its SHA-256"; echo "$SLURMD_NODENAME" >>"$4"; }
    ' stage "$IMAGE" "$STAGE" "$digest" "$excluded_file" || true
  if [[ -s $excluded_file ]]; then
    reason="cannot copy $IMAGE to $STAGE on $(sort -u "$excluded_file" | paste -sd ,)"
    echo "$reason"
  fi
  SRUN+=("--container-image=$STAGE/$digest.sqsh")
}

# Run the node agent on the nodes that the options choose. Sets srun_code, and code: what the nodes recorded, or srun's
# exit code if they recorded nothing.
run_attempt() { # ATTEMPT SRUN_OPTION... [-- AGENT_OPTION...]
  local options=()
  export INGOT_JOB_ATTEMPT=$1
  shift
  while (($#)) && [[ $1 != -- ]]; do
    options+=("$1")
    shift
  done
  srun "${options[@]}" --label --open-mode=append --output="$OUTPUT_FOLDER/$INGOT_JOB_ATTEMPT.%n.out" "${SRUN[@]}" \
    "$PYTHON" -m "$NODE_AGENT" --spec "$SPEC_FILE" "${@:2}" &
  step_pid=$!
  while :; do # a trap interrupts the wait, not the step
    srun_code=0
    wait "$step_pid" || srun_code=$?
    kill -0 "$step_pid" 2>/dev/null || break
  done
  step_pid='' code=$srun_code recorded=0
  if [[ -s $RESULT_FILES.$INGOT_JOB_ATTEMPT ]]; then code=$(<"$RESULT_FILES.$INGOT_JOB_ATTEMPT") recorded=1; fi
  echo "attempt $INGOT_JOB_ATTEMPT ended: srun $srun_code, run $code"
}

if has_ended; then
  echo "nothing to do: $RUN has FINISHED, STOP or launch/HALT in it"
  exit "$EXIT_FINISHED"
fi
mkdir -p "$OUTPUT_FOLDER"
if ((${SLURM_RESTART_COUNT:-0} > MAX_REQUEUES)); then
  halt "job $SLURM_JOB_ID has been requeued $SLURM_RESTART_COUNT times: giving up; 'ingot launch resume $RUN' continues"
fi
rm -f "$excluded_file" # after a requeue all nodes get another chance, or there might be too few forever
