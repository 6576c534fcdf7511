"""The names in a run folder. Apart, so that a launcher can know them without loading torch."""

from ingot.checkpoint.manifest import CHECKPOINTS

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
TOKENIZER = "tokenizer"
LOGS = "logs"
TENSORBOARD = "tensorboard"
SAMPLES = "samples"
GUARDS = "guards.jsonl"  # batches that were left out, and why
OWNER = "owner.json"  # while a run is going on
STOP = "STOP"  # made by the user: save and end
FINISHED = "FINISHED"  # made at the end of a run
FAILURES = "failures.jsonl"  # why processes failed
MICROBATCH = "microbatch.json"  # a microbatch size that did not fit
OURS = (CONFIG, METRICS, CHECKPOINTS, LOGS, TOKENIZER, TENSORBOARD, SAMPLES, GUARDS, FINISHED, FAILURES,
        MICROBATCH)  # fmt: skip
"""What starting over removes."""
