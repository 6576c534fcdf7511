"""A preparation as Slurm jobs: an array, each element of which does its share of the pieces, and a last job that finds
them done, writes the shards and gives the data set its name.

There is nothing to coordinate: the pieces, their numbers and the journals of `ingot prepare` are the protocol. An
element that was killed is run again and goes on; the last job waits until all have done well, and would do itself what
one had left undone. An element asks for a whole node, on which `ingot prepare` uses all cores.
"""

from ingot.launch.slurm.script import assemble
from ingot.launch.spec import LaunchSpec

ARRAY, LAST = "array.sh", "last.sh"
BODY = r"""
[[ ! -s $LAUNCH/bad.$SLURM_JOB_ID ]] || exit 1
share=() # the last job has none
[[ -z ${SLURM_ARRAY_TASK_ID-} ]] || share=(--share "$SLURM_ARRAY_TASK_ID/$NODES")

# Before the time limit: back into the queue. What is done is done, and the next start goes on from there.
trap 'scontrol requeue "$SLURM_JOB_ID" || true' USR2
for attempt in 1 2 3 4 5; do
  export INGOT_JOB_ATTEMPT=$life.$attempt
  echo "attempt $INGOT_JOB_ATTEMPT on $SLURM_JOB_NODELIST"
  srun --nodes=1 --ntasks=1 --label --open-mode=append --output="$LAUNCH/output/$INGOT_JOB_ATTEMPT.%n.out" \
    "${SRUN[@]}" "$PYTHON" -m ingot.launch.supervisor.node_agent --spec "$LAUNCH/spec.json" "${share[@]}" &
  pid=$!
  while :; do # a trap interrupts the wait, not the step
    rc=0
    wait "$pid" || rc=$?
    kill -0 "$pid" 2>/dev/null || break
  done
  code=$rc
  [[ ! -s $LAUNCH/code.$INGOT_JOB_ATTEMPT ]] || code=$(<"$LAUNCH/code.$INGOT_JOB_ATTEMPT")
  echo "attempt $INGOT_JOB_ATTEMPT ended: srun $rc, ingot $code"
  if [[ $code == 0 || $code == 2 || $code == 3 ]]; then break; fi
  sleep "$attempt"
done
exit "$code"
"""


def render_array(spec: LaunchSpec) -> str:
    """The script of the elements: as many as the spec has nodes."""
    return assemble(spec, 1, [f"--array=0-{spec.nodes - 1}"], BODY)


def render_last(spec: LaunchSpec) -> str:
    """The script of the job that ends the work."""
    return assemble(spec, 1, [], BODY)
