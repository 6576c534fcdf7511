"""Other stacks' run descriptions and checkpoints, translated to ours: one file per stack."""

from ingot.migrate.detect import DIALECTS, load_run_config, translate

__all__ = ["DIALECTS", "load_run_config", "translate"]
