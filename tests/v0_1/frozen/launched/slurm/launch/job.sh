#!/bin/bash
# Made by ingot for tiny; its run is described in spec.json beside it.
#SBATCH --job-name=tiny
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --wait-all-nodes=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=@ROOT@/launched/slurm/launch/slurm-%j.out
#SBATCH --time=2:00:00
#SBATCH --signal=B:USR2@180
#SBATCH --array=1-3%1
#SBATCH --no-kill
#SBATCH --partition=gpu
#SBATCH --account=team
#SBATCH --qos=high
#SBATCH --reservation=night
#SBATCH --constraint="a|b"
#SBATCH --exclude=n9
RUN=@ROOT@/launched/slurm
LAUNCH=@ROOT@/launched/slurm/launch
PYTHON=python3
NODES=2
IMAGE=registry.example/ingot:0.1.0
STAGE=''
# shellcheck disable=SC2054,SC2191  # commas and = within an option
SRUN=(--cpus-per-task=4 --container-image=registry.example/ingot:0.1.0 --container-mounts=@ROOT@/launched/slurm:@ROOT@/launched/slurm,@ROOT@:@ROOT@,/fsx:/fsx --container-env=A,INGOT_JOB_ATTEMPT,INGOT_JOB_NODES,MASTER_ADDR,MASTER_PORT,OMP_NUM_THREADS --no-container-mount-home --container-writable)
set -euo pipefail
umask 027

ended() { [[ -e $RUN/FINISHED || -e $RUN/STOP || -e $LAUNCH/HALT ]]; }
if ended; then
  echo "nothing to do: $RUN has FINISHED, STOP or launch/HALT in it"
  exit 0
fi
mkdir -p "$LAUNCH/output"
rm -f "$LAUNCH/bad.$SLURM_JOB_ID" # after a requeue all get another chance, or there might be too few for ever

# The image onto each node's own disk: once, checked, the last two kept. A node where that fails is left out.
if [[ -n $STAGE ]]; then
  read -r digest _ <"$IMAGE.sha256"
  # shellcheck disable=SC2016  # expanded on the nodes
  srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --overlap --label --open-mode=append \
    --output="$LAUNCH/output/$SLURM_JOB_ID.stage.%n.out" bash -c '
      stage() {
        mkdir -p "$2" && exec 9>"$2/.lock" && flock 9 || return
        if [[ ! -s $2/$3.sqsh ]]; then
          rm -f "$2"/.*.draft
          cp "$1" "$2/.$3.draft" && echo "$3  $2/.$3.draft" | sha256sum --check --quiet &&
            sync "$2/.$3.draft" && mv "$2/.$3.draft" "$2/$3.sqsh" || return
        fi
        touch "$2/$3.sqsh" && ls -t "$2"/*.sqsh | tail -n +3 | xargs -r rm -f
      }
      stage "$@" || { echo "cannot copy $1 to $2 and find its SHA-256 there"; echo "$SLURMD_NODENAME" >>"$4"; }
    ' stage "$IMAGE" "$STAGE" "$digest" "$LAUNCH/bad.$SLURM_JOB_ID" || true
  SRUN+=("--container-image=$STAGE/$digest.sqsh")
fi

# Asked to stop (USR2 before the time limit, TERM by scancel): tell the step to save, and go on waiting for it.
asked='' pid='' attempt=0 silent=0 step=$((${#STAGE} > 0)) # steps are counted; staging was one
# shellcheck disable=SC2317  # called by the traps
forward() {
  asked=$1
  [[ -z $pid ]] || scancel --signal=USR2 "$SLURM_JOB_ID.$step" 2>/dev/null || true
}
trap 'forward USR2' USR2
trap 'forward TERM' TERM

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
while :; do
  attempt=$((attempt + 1))
  id=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$attempt
  good=()
  for host in "${hosts[@]}"; do
    grep -qxF -- "$host" "$LAUNCH/bad.$SLURM_JOB_ID" 2>/dev/null || good+=("$host")
  done
  if ((${#good[@]} < NODES)); then
    echo "attempt $id: $NODES nodes are needed and ${#good[@]} are good: ${good[*]-}"
    code=1
    break
  fi
  chosen=("${good[@]:0:NODES}")
  list=$(IFS=, && echo "${chosen[*]}")
  export MASTER_ADDR=${chosen[0]} MASTER_PORT=$((61000 + (SLURM_JOB_ID * 7 + attempt) % 4500))
  export INGOT_JOB_ATTEMPT=$id INGOT_JOB_NODES=$list
  echo "attempt $id on $list"
  srun --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 --nodelist="$list" --kill-on-bad-exit=1 --wait=60 \
    --overlap --label --open-mode=append --output="$LAUNCH/output/$id.%n.out" "${SRUN[@]}" \
    "$PYTHON" -m ingot.launch.worker --spec "$LAUNCH/spec.json" &
  pid=$!
  while :; do # a trap interrupts the wait, not the step
    rc=0
    wait "$pid" || rc=$?
    kill -0 "$pid" 2>/dev/null || break
  done
  pid=''
  step=$((step + 1))
  code=$rc silent=$((silent + 1))
  if [[ -s $LAUNCH/code.$id ]]; then code=$(<"$LAUNCH/code.$id") silent=0; fi
  echo "attempt $id ended: srun $rc, run $code"
  if ended || [[ -n $asked || $code == 0 || $code == 75 ]]; then break; fi
  if [[ $code == 2 || $code == 3 ]]; then break; fi
  if ((silent == 6)); then # the worker never got as far as to judge for itself
    echo "$silent attempts ended without a word; what srun said is in $LAUNCH/output" | tee "$LAUNCH/HALT"
    code=3
    break
  fi
  # a node that the cluster has lost is not asked again
  sinfo --noheader --Node --states=down,drain,fail,no_respond --nodes="$list" --format=%N 2>/dev/null |
    sort -u | tee -a "$LAUNCH/bad.$SLURM_JOB_ID" | sed "s/^/$SLURM_JOB_ID /" >>"$LAUNCH/down" || true
  sleep "$((attempt < 5 ? attempt : 30))" &
  wait $! || true
done

if [[ -e $RUN/FINISHED ]]; then exit 0; fi
last=$((${SLURM_ARRAY_TASK_ID:-1} == ${SLURM_ARRAY_TASK_MAX:-1}))
if [[ $asked != TERM && $code != 0 && $code != 2 && $code != 3 && $last == 1 ]] && ! ended; then
  scontrol requeue "$SLURM_JOB_ID" || true # the last rung: the next job of a chain would start sooner
fi
if [[ $code == 75 ]]; then exit 0; fi
exit "$code"
