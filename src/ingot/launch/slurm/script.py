"""A run as a Slurm job: the script, and talking to Slurm.

The script is fixed text: what users wrote is in the spec file, and only values that the spec has checked by pattern
stand in `#SBATCH` lines. It holds what the published scripts lack: a marker that ends a finished chain, one srun that
ends all tasks when one fails, a trap that passes the time limit's signal on and goes on waiting, attempts inside the
allocation, logs that are appended to, nodes taken out that failed, and a port that nobody else draws.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ingot.errors import EXIT_FAULT, ConfigError, IngotError
from ingot.launch.profiles import find_profile
from ingot.launch.spec import LAUNCH, SPEC, LaunchSpec
from ingot.launch.supervisor.local_ranks import NODES_VARIABLE
from ingot.launch.supervisor.node_agent import ATTEMPT_VARIABLE
from ingot.launch.supervisor.restart_policy import NO_PROGRESS_LIMIT

SCRIPT = "job.sh"
STARTS, ENDS = "starts", "ends"  # in the launch folder, of this launch: starts of its jobs, and why they ended
MAX_STARTS = NO_PROGRESS_LIMIT  # of jobs in a row, without a new checkpoint
MAX_REQUEUES = 20  # of one job, with or without
PASSED = ("MASTER_ADDR", "MASTER_PORT", ATTEMPT_VARIABLE, NODES_VARIABLE)

HEAD = r"""
set -euo pipefail
umask 027

life=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0} # one start of this job
ended() { [[ -e $RUN/FINISHED || -e $RUN/STOP || -e $LAUNCH/HALT ]]; }
if ended; then
  echo "nothing to do: $RUN has FINISHED, STOP or launch/HALT in it"
  exit 0
fi
mkdir -p "$LAUNCH/output"

# Restarts are bounded, whoever caused them: this script, the next job of a chain, or Slurm after the death of a node.
halt() { # for good, and for the rest of the chain
  echo "$1" | tee "$LAUNCH/HALT"
  exit 3
}
newest_checkpoint() {
  local path step newest=0
  for path in "$RUN"/checkpoints/*/manifest.json; do
    step=${path%/manifest.json} step=${step##*/}
    if [[ $step =~ ^[0-9]+$ ]] && ((10#$step > newest)); then newest=$((10#$step)); fi
  done
  echo "$newest"
}
halt_without_progress() { # each start is a line of the file `starts`, with the newest checkpoint that it found
  local count host last why
  count=$(grep -c " $(newest_checkpoint)\$" "$LAUNCH/starts" 2>/dev/null) || true
  if ((${count:-0} >= MAX_STARTS)); then
    read -r last host _ < <(tail -n 1 "$LAUNCH/starts")
    why=$(grep "^$last " "$LAUNCH/ends" 2>/dev/null | tail -n 1) || true
    why=${why:-$last on $host: it ended without a word; the node may have died}
    halt "$count starts of the job have led to no new checkpoint: giving up; the last was $why"
  fi
}
if ((${SLURM_RESTART_COUNT:-0} > MAX_REQUEUES)); then
  halt "job $SLURM_JOB_ID has been requeued $SLURM_RESTART_COUNT times: giving up; 'ingot launch resume $RUN' continues"
fi
if [[ $VERB == train ]]; then
  halt_without_progress
  echo "$life ${SLURMD_NODENAME:-?} $(newest_checkpoint)" >>"$LAUNCH/starts"
fi
why='' # this start ended
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
  if [[ -s $LAUNCH/bad.$SLURM_JOB_ID ]]; then
    why="cannot copy $IMAGE to $STAGE on $(sort -u "$LAUNCH/bad.$SLURM_JOB_ID" | paste -sd ,)"
    echo "$why"
  fi
  SRUN+=("--container-image=$STAGE/$digest.sqsh")
fi
"""

BODY = r"""
# Asked to stop (USR2 before the time limit, TERM by scancel): tell the step to save, and go on waiting for it.
asked='' pid='' attempt=0 silent=0 idle=0 step=$((${#STAGE} > 0)) # steps are counted; staging was one
# shellcheck disable=SC2317  # called by the traps
forward() {
  asked=$1
  echo "$1" >"$LAUNCH/stop.$life" || true # first: the nodes tell a request from srun's own TERM by it
  [[ -z $pid ]] || scancel --signal=USR2 "$SLURM_JOB_ID.$step" 2>/dev/null || true
}
trap 'forward USR2' USR2
trap 'forward TERM' TERM

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
while :; do
  if [[ -n $asked ]]; then # between two attempts
    code=75
    break
  fi
  attempt=$((attempt + 1))
  id=$life.$attempt
  good=()
  for host in "${hosts[@]}"; do
    grep -qxF -- "$host" "$LAUNCH/bad.$SLURM_JOB_ID" 2>/dev/null || good+=("$host")
  done
  if ((${#good[@]} < NODES)); then
    why="$NODES nodes are needed and ${#good[@]} are good: ${good[*]:-none}${why:+; $why}"
    echo "attempt $id: $why"
    code=1
    break
  fi
  chosen=("${good[@]:0:NODES}")
  list=$(IFS=, && echo "${chosen[*]}")
  export MASTER_ADDR=${chosen[0]} MASTER_PORT=$((61000 + (SLURM_JOB_ID * 7 + attempt) % 4500))
  export INGOT_JOB_ATTEMPT=$id INGOT_JOB_NODES=$list
  echo "attempt $id on $list"
  before=$(newest_checkpoint)
  srun --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 --nodelist="$list" --kill-on-bad-exit=1 --wait=60 \
    --overlap --label --open-mode=append --output="$LAUNCH/output/$id.%n.out" "${SRUN[@]}" \
    "$PYTHON" -m ingot.launch.supervisor.node_agent --spec "$LAUNCH/spec.json" &
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
  why="attempt $id ended with code $code (srun: $rc)"
  echo "attempt $id ended: srun $rc, run $code"
  if ended || [[ -n $asked || $code == 0 || $code == 75 ]]; then break; fi
  if [[ $code == 2 || $code == 3 ]]; then break; fi
  if ((silent == 6)); then # the worker never got as far as to judge for itself
    halt "$silent attempts ended without a word; what srun said is in $LAUNCH/output"
  fi
  if [[ $(newest_checkpoint) == "$before" ]]; then idle=$((idle + 1)); else idle=0; fi
  if ((idle == 6 + ${#hosts[@]} - NODES)); then # the nodes judge what they record; this is for what they could not
    halt "$idle attempts in a row have led to no new checkpoint: giving up; $why"
  fi
  # a node that the cluster has lost is not asked again
  sinfo --noheader --Node --states=down,drain,fail,no_respond --nodes="$list" --format=%N 2>/dev/null |
    sort -u | tee -a "$LAUNCH/bad.$SLURM_JOB_ID" | sed "s/^/$SLURM_JOB_ID /" >>"$LAUNCH/down" || true
  sleep "$((attempt < 5 ? attempt : 30))" &
  wait $! || true
done

if [[ -e $RUN/FINISHED ]]; then exit 0; fi
last=$((${SLURM_ARRAY_TASK_ID:-1} == ${SLURM_ARRAY_TASK_MAX:-1}))
if [[ $code == 75 && -e $LAUNCH/stop.$life ]]; then
  why="it was asked to save and stop (${asked:-a signal}); see --time and --signal-seconds if that came too early"
fi
echo "$life on ${SLURMD_NODENAME:-?}: $why" >>"$LAUNCH/ends"
if ended || [[ $last == 0 ]]; then
  :
elif [[ $code == 75 && ! -e $LAUNCH/stop.$life ]]; then
  echo "the run stopped by itself (max_wall_time), so the job is not requeued"
elif [[ $asked != TERM && $code != 0 && $code != 2 && $code != 3 ]]; then
  halt_without_progress
  scontrol requeue "$SLURM_JOB_ID" || true # the last rung: the next job of a chain would start sooner
fi
if [[ $code == 75 ]]; then exit 0; fi
exit "$code"
"""


class SlurmError(IngotError):
    """Slurm refused, or cannot be reached."""

    exit_code = EXIT_FAULT


def render(spec: LaunchSpec) -> str:
    """The script of a training run."""
    chain = [f"--array=1-{spec.chain}%1"] if spec.chain > 1 else []
    return assemble(spec, spec.nodes + spec.spares, [*chain, *(["--no-kill"] if spec.spares else [])], BODY)


def assemble(spec: LaunchSpec, nodes: int, more: Sequence[str], body: str) -> str:
    """Options, values and fixed text as a script."""
    gpus = [f"--gpus-per-node={spec.gpus_per_node}"] if spec.gpus_per_node else []
    options = [
        f"--job-name={spec.name}", f"--nodes={nodes}", "--ntasks-per-node=1", *gpus,
        *([f"--cpus-per-task={spec.cpus_per_task}"] if spec.cpus_per_task else []),
        "--exclusive", "--mem=0", "--wait-all-nodes=1", "--requeue", "--open-mode=append",
        f"--output={spec.folder}/slurm-%j.out", f"--time={spec.time}", f"--signal=B:USR2@{spec.signal_seconds}", *more,
        *(f"--{name}={value}" for name in ("partition", "account", "qos", "reservation")
          if (value := getattr(spec, name))),
        *([f'--constraint="{spec.constraint}"'] if spec.constraint else []),
        *([f"--exclude={','.join(spec.exclude)}"] if spec.exclude else []),
    ]  # fmt: skip
    srun = [*([f"--cpus-per-task={spec.cpus_per_task}"] if spec.cpus_per_task else []), *gpus, *container_options(spec)]
    values = {
        "RUN": spec.run_folder,
        "LAUNCH": str(spec.folder),
        "PYTHON": spec.python or ("python3" if spec.image else sys.executable),
        "VERB": spec.verb,
        "NODES": str(spec.nodes),
        "MAX_STARTS": str(MAX_STARTS),
        "MAX_REQUEUES": str(MAX_REQUEUES),
        "IMAGE": spec.image or "",
        "STAGE": spec.stage or "",
    }
    lines = ["#!/bin/bash", f"# Made by ingot for {spec.name}; its run is described in {SPEC} beside it."]
    lines += [f"#SBATCH {option}" for option in options]
    lines += [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    lines += ["# shellcheck disable=SC2054,SC2191  # commas and = within an option"]
    lines += [f"SRUN=({' '.join(map(shlex.quote, srun))})"]
    return "\n".join(lines) + HEAD + body


def container_options(spec: LaunchSpec) -> list[str]:
    """Pyxis options. Variables of the image win over the host's unless they are named."""
    if spec.image is None:
        return []
    profile = find_profile(spec.profile)
    run = Path(spec.run_folder)
    own = [f"{path}:{path}" for path in (run if spec.verb == "train" else run.parent, spec.workdir)]
    mounts = list(dict.fromkeys([*own, *spec.mounts, *profile.mounts]))
    passed = PASSED if spec.verb == "train" else (ATTEMPT_VARIABLE,)
    names = sorted({*passed, *profile.variables, *spec.env, *spec.secrets})
    image = [] if spec.stage else [f"--container-image={spec.image}"]  # else the script knows where it is
    return [*image, f"--container-mounts={','.join(mounts)}", f"--container-env={','.join(names)}",
            "--no-container-mount-home", "--container-writable"]  # fmt: skip


def write_script(spec: LaunchSpec, name: str, text: str) -> Path:
    """Spec and script into the run folder."""
    spec.write()
    path = spec.folder / name
    path.write_text(text, encoding="utf-8")
    path.chmod(0o750)
    return path


def submit(script: Path, options: Sequence[str], env: Mapping[str, str]) -> str:
    """Hand the script to sbatch, with variables for the job; gives the job id."""
    own = dict(os.environ)
    if "SLURM_JOB_ID" in own:  # inside a job: its size, memory and array are not the new one's
        own = {name: value for name, value in own.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}
    answer = ask(["sbatch", "--parsable", *options, str(script)], f"the script is {script}", {**own, **env})
    return answer.strip().partition(";")[0]


def job_states(job: str) -> dict[str, str] | None:
    """Ids and states of a job and its array elements; empty if Slurm says that it no longer knows it, None if it cannot
    be asked, or says nothing at all."""
    try:
        found = ask(["squeue", "--noheader", "--array", "--states=all", f"--jobs={job}", "--format=%i %T"])
    except SlurmError as error:
        return {} if "Invalid job id" in str(error) else None
    return dict(line.split()[:2] for line in found.splitlines() if line.strip()) or None


def cancel(job: str) -> None:
    """End a job: TERM, on which it saves, and KILL when Slurm's KillWait is over."""
    ask(["scancel", job])


def run_folder_of(job: str) -> Path | None:
    """Where a job of ours writes, if Slurm still knows it."""
    found = re.search(rf"^ *StdOut=(.+)/{LAUNCH}/slurm-[^/]+$", ask(["scontrol", "show", "job", job]), re.MULTILINE)
    return Path(found[1]) if found else None


def ask(command: Sequence[str], more: str = "", env: Mapping[str, str] | None = None) -> str:
    """What a command of Slurm's says; an error is one sentence."""
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]} is not on this machine; run this where Slurm's commands are")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} gave no answer within a minute: is slurmctld running? {more}") from None
    if done.returncode:
        text = " ".join((done.stderr or done.stdout).split())
        raise SlurmError(f"{command[0]} refused: {text}" + (f"; {more}" if more else ""))
    return done.stdout
