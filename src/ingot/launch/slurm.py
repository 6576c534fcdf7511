"""A run as a Slurm job: the script, and talking to Slurm.

The script is fixed text: what users wrote is in the spec file, and only values that the spec has checked by pattern
stand in `#SBATCH` lines. It holds what the published scripts lack: a marker that ends a finished chain, one srun that
ends all tasks when one fails, a trap that passes the time limit's signal on and goes on waiting, attempts inside the
allocation, logs that are appended to, nodes taken out that failed, and a port that nobody else draws.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ingot.errors import EXIT_FAULT, ConfigError, IngotError
from ingot.launch.node import NODES_VARIABLE
from ingot.launch.profiles import find_profile
from ingot.launch.spec import SPEC, LaunchSpec
from ingot.launch.worker import ATTEMPT_VARIABLE

SCRIPT = "job.sh"
PASSED = ("MASTER_ADDR", "MASTER_PORT", ATTEMPT_VARIABLE, NODES_VARIABLE)

BODY = r"""
set -euo pipefail
umask 027

ended() { [[ -e $RUN/FINISHED || -e $RUN/STOP || -e $LAUNCH/HALT ]]; }
if ended; then
  echo "nothing to do: $RUN has FINISHED, STOP or launch/HALT in it"
  exit 0
fi
mkdir -p "$LAUNCH/output"

# Asked to stop (USR2 before the time limit, TERM by scancel): tell the step to save, and go on waiting for it.
asked='' pid='' step=0 attempt=0
# shellcheck disable=SC2317  # called by the traps
forward() {
  asked=$1
  [[ -z $pid ]] || scancel --signal=USR2 "$SLURM_JOB_ID.$step" 2>/dev/null || true
}
trap 'forward USR2' USR2
trap 'forward TERM' TERM

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
rm -f "$LAUNCH/bad.$SLURM_JOB_ID" # after a requeue all get another chance, or there might be too few for ever
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
  code=$rc
  [[ ! -s $LAUNCH/code.$id ]] || code=$(<"$LAUNCH/code.$id")
  echo "attempt $id ended: srun $rc, run $code"
  if ended || [[ -n $asked || $code == 0 || $code == 75 ]]; then break; fi
  if [[ $code == 2 || $code == 3 ]]; then break; fi
  # a node that the cluster has lost is not asked again
  sinfo --noheader --Node --states=down,drain,fail,no_respond --nodes="$list" --format=%N 2>/dev/null |
    sort -u >>"$LAUNCH/bad.$SLURM_JOB_ID" || true
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
"""


class SlurmError(IngotError):
    """Slurm refused, or cannot be reached."""

    exit_code = EXIT_FAULT


def render(spec: LaunchSpec) -> str:
    """The whole script."""
    gpus = [f"--gpus-per-node={spec.gpus_per_node}"] if spec.gpus_per_node else []
    options = [
        f"--job-name={spec.name}", f"--nodes={spec.nodes + spec.spares}", "--ntasks-per-node=1", *gpus,
        *([f"--cpus-per-task={spec.cpus_per_task}"] if spec.cpus_per_task else []),
        "--exclusive", "--mem=0", "--wait-all-nodes=1", "--requeue", "--open-mode=append",
        f"--output={spec.folder}/slurm-%j.out", f"--time={spec.time}", f"--signal=B:USR2@{spec.signal_seconds}",
        *([f"--array=1-{spec.chain}%1"] if spec.chain > 1 else []),
        *(["--no-kill"] if spec.spares else []),
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
        "NODES": str(spec.nodes),
    }
    lines = ["#!/bin/bash", f"# Made by ingot for {spec.name}; its run is described in {SPEC} beside it."]
    lines += [f"#SBATCH {option}" for option in options]
    lines += [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    lines += ["# shellcheck disable=SC2054,SC2191  # commas and = within an option"]
    lines += [f"SRUN=({' '.join(map(shlex.quote, srun))})"]
    return "\n".join(lines) + BODY


def container_options(spec: LaunchSpec) -> list[str]:
    """Pyxis options. Variables of the image win over the host's unless they are named."""
    if spec.image is None:
        return []
    profile = find_profile(spec.profile)
    own = [f"{path}:{path}" for path in (spec.run_folder, spec.workdir)]
    mounts = list(dict.fromkeys([*own, *spec.mounts, *profile.mounts]))
    names = sorted({*PASSED, *profile.variables, *spec.env, *spec.secrets})
    return [f"--container-image={spec.image}", f"--container-mounts={','.join(mounts)}",
            f"--container-env={','.join(names)}", "--no-container-mount-home", "--container-writable"]  # fmt: skip


def write_script(spec: LaunchSpec) -> Path:
    """Spec and script into the run folder."""
    spec.write()
    path = spec.folder / SCRIPT
    path.write_text(render(spec), encoding="utf-8")
    path.chmod(0o750)
    return path


def submit(script: Path) -> str:
    """Hand the script to sbatch; gives the job id."""
    return ask(["sbatch", "--parsable", str(script)], f"the script is {script}").strip().partition(";")[0]


def job_states(job: str) -> dict[str, str] | None:
    """Ids and states of a job and its array elements; empty if Slurm no longer knows it, None if it cannot be asked."""
    try:
        found = ask(["squeue", "--noheader", "--array", "--states=all", f"--jobs={job}", "--format=%i %T"])
    except SlurmError as error:
        return {} if "Invalid job id" in str(error) else None
    return dict(line.split()[:2] for line in found.splitlines() if line.strip())


def cancel(job: str, now: bool = False) -> None:
    """End a job: with TERM first, which lets it save, or at once."""
    ask(["scancel", *(["--signal=KILL", "--full"] if now else []), job])


def ask(command: Sequence[str], more: str = "") -> str:
    """What a command of Slurm's says; an error is one sentence."""
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]} is not on this machine; run this where Slurm's commands are")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} gave no answer within a minute: is slurmctld running? {more}") from None
    if done.returncode:
        text = " ".join((done.stderr or done.stdout).split())
        raise SlurmError(f"{command[0]} refused: {text}" + (f"; {more}" if more else ""))
    return done.stdout
