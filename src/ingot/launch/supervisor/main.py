"""What a job script runs, through its guard: `python -m ingot.launch.supervisor.main --spec FILE`, on the first node of
the job and outside any image. It loads neither torch nor anything of the training."""

import argparse
import asyncio
import os
import sys
from pathlib import Path

from ingot.errors import EXIT_FAULT, IngotError
from ingot.launch.slurm.allocation import SlurmCluster
from ingot.launch.spec import read_spec
from ingot.launch.supervisor.cluster import Share
from ingot.launch.supervisor.supervise import Supervisor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--spec", type=Path, required=True)
    options = parser.parse_args()
    try:
        return asyncio.new_event_loop().run_until_complete(_supervise(options.spec))
    except IngotError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


async def _supervise(path: Path) -> int:
    spec = read_spec(path)
    share = None
    if spec.verb == "prepare":  # an element of the array, or the job after it
        share = Share(int(os.environ.get("SLURM_ARRAY_TASK_ID", spec.nodes)), spec.nodes)
    cluster = SlurmCluster(spec)
    try:
        return await Supervisor(spec, cluster, share=share).run()
    except IngotError as error:
        await cluster.comment(f"ingot: error: {error}")
        raise


if __name__ == "__main__":
    code = EXIT_FAULT
    try:
        code = main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a thread may wait for a file system that does not answer
