"""What a message of one rank advises does not always suit a run on a cluster."""

import re

# A rank is not started by hand; and nothing that deletes checkpoints is advised to someone who sees only a summary.
_BAD = re.compile(r"[;,]? *(?:or )?(?:run again with --debug for the stack trace|"
                  r"(?:delete them and )?(?:start over with|use) --fresh)")  # fmt: skip


def without_bad_advice(message: str) -> str:
    """A message without `--debug` and `--fresh`."""
    return _BAD.sub("", message)
