"""The run folder: opening it, `--fresh`, and whether its checkpoint may be resumed with the current config."""

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ingot.checkpoint.manifest import MANIFEST, Manifest
from ingot.config.dotted_keys import flatten
from ingot.config.load import to_yaml
from ingot.config.run import RunConfig
from ingot.errors import CheckpointError, disk_error
from ingot.storage.atomic import write_whole
from ingot.training.runtime.lease import Lease
from ingot.training.runtime.run_files import CONFIG, LOGS, OURS

# With another value of these keys it would be another run.
FIXED = ("seed", "max_seq_len", "global_train_batch_size", "data.train.shuffle", "data.train.shuffle_seed",
         "optimizer.name")  # fmt: skip
EXECUTION = ("name", "max_wall_time", "hang_timeout", "startup_timeout", "save_timeout", "save_folder", "load_path",
             "device", "device_train_microbatch_size", "activation_checkpointing", "compile", "deterministic",
             "parallel", "log_interval", "loggers", "profiler", "generate", "data.prefetch_batches", "data.train.path",
             "data.eval", "tokenizer", "save_interval", "save_num_checkpoints_to_keep", "save_keep_every",
             "snapshot_interval", "save_weights_only", "state_dict_type", "remote_save", "eval_interval", "eval.",
             "eval_first", "icl_", "device_eval_batch_size", "max_duration")  # fmt: skip


def open_run_folder(config: RunConfig, fresh: bool) -> Lease:
    """Create the folder, take its lease, and with `fresh` remove what an earlier run left."""
    run = Path(config.run_folder)
    try:
        run.mkdir(parents=True, exist_ok=True)
        lease = Lease(run)
        if fresh:
            for name in OURS:
                path = run / name
                if name == LOGS:  # the ranks of this launch already write their own logs there
                    for log in path.glob("*"):
                        if not log.name.startswith("rank-"):
                            log.unlink()
                elif path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        (run / LOGS).mkdir(exist_ok=True)
    except OSError as error:
        raise disk_error("write the run folder", run, error) from None
    return lease


def write_config(run: Path, config: RunConfig) -> None:
    """Write the resolved config, once nothing can refuse it any more."""
    write_whole(run / CONFIG, to_yaml(config, f"# The resolved config of run '{config.name}'.\n"))


def check_disk_space(run: Path, checkpoint_bytes: int) -> None:
    """Fail before step 1 instead of at the first save."""
    free = shutil.disk_usage(run).free
    if free < checkpoint_bytes:
        raise disk_error(
            "save checkpoints in", run,
            OSError(f"one checkpoint takes {checkpoint_bytes / 1e9:.2f} GB and only {free / 1e9:.2f} GB are free"),
        )  # fmt: skip


class ResumeState(msgspec.Struct):
    """What a resumed run reads from the `state` of a manifest."""

    data: dict[str, Any]
    scaler: dict[str, Any]
    tokenizer: Any = None
    left_out: list[Annotated[int, msgspec.Meta(ge=1)]] = []
    guard: list[float] = []
    train_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    reporter: dict[str, Annotated[int, msgspec.Meta(ge=0)] | Annotated[str, msgspec.Meta(pattern=r"\n\Z")]] | None = (
        None
    )
    """Sizes of files, and lines that wait to be written to one."""
    execution: dict[str, str] = {}


def read_state(manifest: Manifest) -> ResumeState:
    """The state to resume from, with types and bounds checked: a manifest may come from anywhere."""
    try:
        return msgspec.convert(manifest.state, ResumeState)
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"{manifest.folder / MANIFEST} is damaged: its state cannot be resumed ({error}); restore it, or move "
            f"{manifest.folder} away to continue from the checkpoint before it"
        ) from None


def changed_keys(config: RunConfig, manifest: Manifest) -> list[str]:
    """What differs between a checkpoint's config and this one; raises if it may not be continued."""
    configs = manifest.state.get("config", {}), json.loads(config.model_dump_json())
    old, new = ({key: value for key, value in flatten(values).items() if value != {}} for values in configs)
    changed = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))
    shown = {k: f"{k} was {old.get(k)} and is now {new.get(k)}" for k in changed}
    then = "choose another save_folder, or start over with --fresh"
    if model := [shown[key] for key in changed if key.startswith("model.") and not key.endswith("_pdrop")]:
        raise CheckpointError(f"the checkpoint {manifest.folder} is of another model ({'; '.join(model)}); {then}")
    if fixed := [shown[key] for key in changed if key in FIXED]:
        raise CheckpointError(
            f"the checkpoint {manifest.folder} cannot be continued: {'; '.join(fixed)}, which would change the order "
            f"of the data or the meaning of its state; {then}"
        )
    return [text for key, text in shown.items() if not key.startswith(EXECUTION)]
