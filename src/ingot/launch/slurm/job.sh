# shellcheck shell=bash disable=SC2154
# The whole job: its supervisor, on the first node of the allocation and outside any image. Everything else (agents,
# attempts, requeues) is the supervisor's. Its guard takes over this process, and with it Slurm's signals.
set -euo pipefail
umask 027
if [[ ! -x $SUPERVISOR_PYTHON ]]; then
  echo "$SUPERVISOR_PYTHON is not on ${SLURMD_NODENAME:-this node}: install ingot-llm in a folder that the nodes share," \
    "and launch from there" >&2
  exit 2
fi
exec "$SUPERVISOR_PYTHON" -m ingot.launch.slurm.guard --spec "$SPEC_FILE"
