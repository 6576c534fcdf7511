"""The names in a run folder, in a file of their own so that a launcher can know them without loading torch."""

from ingot.checkpoint.manifest import CHECKPOINTS
from ingot.config.evaluation import FOLDER as EVALUATIONS
from ingot.config.evaluation import GENERATED

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
TOKENIZER = "tokenizer"
LOGS = "logs"
TENSORBOARD = "tensorboard"
TRACKERS = "trackers"  # ids of the run at trackers, what they hold, files of offline ones
SAMPLES = "samples"
PROFILE = "profile"  # where the time of some steps went, and what filled the memory
GUARDS = "guards.jsonl"  # skipped batches, and why
OWNER = "owner.json"  # exists while a run owns the folder
STOP = "STOP"  # created by the user: save and stop
FINISHED = "FINISHED"  # created at the end of a run
STOPPED = "stopped.json"  # why and where a run stopped before its end
FAILURES = "failures.jsonl"  # why processes failed
MICROBATCH = "microbatch.json"  # a microbatch size that ran out of memory
OURS = (CONFIG, METRICS, CHECKPOINTS, LOGS, TOKENIZER, TENSORBOARD, TRACKERS, SAMPLES, GENERATED, PROFILE, GUARDS,
        FINISHED, STOPPED, FAILURES, MICROBATCH, EVALUATIONS)  # fmt: skip
"""What `--fresh` removes."""

MARK = "----- attempt "


def attempt_mark(attempt: str) -> str:
    """The line with which an attempt begins in a log that several attempts share."""
    return f"{MARK}{attempt} -----"
