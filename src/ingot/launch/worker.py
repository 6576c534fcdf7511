"""Jobs that were queued before the node agent moved still start `python -m ingot.launch.worker`."""

import sys

from ingot.launch.agent.node_agent import main

if __name__ == "__main__":
    sys.exit(main())
