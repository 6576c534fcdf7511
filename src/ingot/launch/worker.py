"""What jobs start that version 0.1 has queued: its job script and this version's agents do not fit together."""

import argparse
import os
import sys
from pathlib import Path

from ingot.errors import EXIT_GIVEN_UP, IngotError
from ingot.launch.protocol import ATTEMPT_VARIABLE, LaunchFolder
from ingot.launch.spec import read_spec


def main() -> int:
    """End the job and all that wait behind it. Nothing has started, and nothing is lost."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--spec", type=Path, required=True)
    options, _ = parser.parse_known_args()
    try:
        launch = LaunchFolder(Path(read_spec(options.spec).run_folder))
        reason = f"this job was queued by an earlier version; `ingot launch resume {launch.run}` continues"
        launch.halt(reason)
        launch.record_result(os.environ.get(ATTEMPT_VARIABLE, "1"), EXIT_GIVEN_UP, 0)
        print(reason, file=sys.stderr)
    except (IngotError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
    return EXIT_GIVEN_UP


if __name__ == "__main__":
    sys.exit(main())
