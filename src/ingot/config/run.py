"""The config of a run: all sections together.

`global_train_batch_size`, data order, schedule and loss define the math. A field whose description begins with
"Execution" may change between two starts of a run: its result stays the same up to floating-point order.
"""

from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from ingot.config.base import Section, rule_error
from ingot.config.data import DataConfig, SourceConfig
from ingot.config.durations import Duration
from ingot.config.evaluation import EvalConfig, TaskConfig
from ingot.config.model import ModelConfig
from ingot.config.parallel import ParallelConfig
from ingot.config.secrets import secret_in
from ingot.config.training import (
    GenerateConfig,
    GuardsConfig,
    LoggersConfig,
    OptimizerConfig,
    ProfilerConfig,
    SchedulerConfig,
)
from ingot.divisors import divisors
from ingot.errors import ConfigError
from ingot.storage.names import plain_name, plain_name_from

PRECISION_ALIASES = {"amp_bf16": "bf16", "amp_fp16": "fp16", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32",
                     "amp_fp8": "fp8"}  # fmt: skip

MOST_SEQUENCES = 1 << 30  # in a step: a thousand times what any published run had
EVAL_BATCH = 8  # sequences, where the config does not say


class RunConfig(Section):
    """A training run."""

    name: str = Field(default="run", min_length=1)
    """Execution: the name of the run, one plain name, because the default run folder is named after it."""
    seed: int = Field(default=17, ge=0, lt=1 << 63)
    """Determines initial weights, data order and dropout."""
    max_seq_len: int = Field(default=2048, gt=0)
    """Tokens per training sequence."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    """The model."""
    tokenizer: str | None = None
    """Folder or tokenizer.json. Default: the tokenizer of the prepared data."""
    data: DataConfig | None = None
    """What to train and evaluate on; recipes do not set it."""

    global_train_batch_size: int = Field(default=256, gt=0)
    """Sequences per optimizer step, over all devices together."""
    max_duration: Duration = Duration(1, "ep")
    """How long to train."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """The learning-rate schedule."""
    mask_eos_loss: bool = False
    """Exclude from the loss the token after the end of a document (model.eos_token_id)."""
    gradient_clipping: float | None = Field(default=1.0, gt=0)
    """Largest global gradient norm; null for no clipping."""
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "bf16"
    """Data type of the matrix products; master weights and optimizer are always fp32. Composer's amp_* names work."""

    guards: GuardsConfig = GuardsConfig()
    """What to do when a loss is NaN or infinite, or jumps."""

    eval_interval: Duration = Duration(1000, "ba")
    """Execution: how often to evaluate, in addition to the end of the run; 0ba for only at the end."""
    eval_subset_num_batches: int = Field(default=-1, ge=-1)
    """Batches per evaluation, of device_eval_batch_size sequences (8 by default), for any number of processes; -1 for
    all."""
    device_eval_batch_size: int | None = Field(default=None, gt=0)
    """Execution: sequences that a process evaluates at once. Default: the training microbatch."""
    eval: EvalConfig = EvalConfig()
    """Execution: downstream tasks to score while training."""
    eval_first: bool = False
    """Execution: also evaluate before the first batch."""
    icl_subset_num_batches: int | None = Field(default=None, ge=-1)
    """Execution: batches per downstream task without categories, of device_eval_batch_size rows (8 by default), for any
    number of processes: the first questions of its file; -1 for all. Default: eval_subset_num_batches, which tasks with
    categories follow."""
    icl_seq_len: int | None = Field(default=None, gt=1)
    """Execution: tokens of a row of a downstream task; longer prompts lose their beginning. Default: max_seq_len."""

    save_folder: str | None = None
    """Execution: the run folder. Default: runs/NAME. With a URL (s3://, gs://, az://), checkpoints are kept there and
    only the newest one stays on this machine, in runs/NAME."""
    save_interval: Duration = Duration(1000, "ba")
    """Execution: how often to save, in addition to the end of the run; also in wall-clock units; 0ba for only then."""
    snapshot_interval: Duration | Literal["auto"] = Field(default="auto", union_mode="left_to_right")
    """Execution: how often each process copies its training state to host memory of its launcher, from where a restart
    within the job continues; with several nodes, also to another one, for a spare that takes a node's place. Also in
    wall-clock units; 0ba for never. auto: once a minute, if the copies fit into half of the free memory."""
    save_num_checkpoints_to_keep: int = Field(default=-1, ge=-1)
    """Execution: how many of the newest checkpoints to keep; -1 for all."""
    save_keep_every: Duration = Duration(0, "ba")
    """Execution: also keep every checkpoint at a multiple of this; 0ba for none."""
    save_weights_only: bool = False
    """Execution: save no optimizer state; a run cannot continue from such a checkpoint."""
    state_dict_type: Literal["sharded", "full"] = "sharded"
    """Execution: sharded: every process writes its own shard; full: rank 0 gathers everything into one set of files."""
    remote_save_folder: str | None = None
    """Execution: a URL or folder to copy some of the checkpoints to, in the background."""
    remote_save_interval: Duration = Duration(0, "ba")
    """Execution: how often to copy a checkpoint there, in addition to the last one; 0ba for every checkpoint."""
    load_path: str | None = None
    """Start from the weights of this run, checkpoint or Hugging Face folder, or of a run or checkpoint at a URL, with a
    fresh optimizer and schedule."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Execution: where to run."""
    parallel: ParallelConfig = ParallelConfig()
    """Execution: how model and batch are divided over the processes; one process needs nothing."""
    device_train_microbatch_size: int | Literal["auto"] = "auto"
    """Execution: sequences per forward pass on a device."""
    activation_checkpointing: bool | Literal["auto", "none", "full", "selective"] | float = "auto"
    """Execution: recompute activations in the backward pass instead of storing them. true or full: everything in each
    block; selective: everything but matrix products and attention; auto: on a GPU, the first of none, selective and
    full with which a microbatch of a few thousand tokens fits; a number between 0 and 1: the compiler chooses, and
    keeps at most this fraction of the activations."""
    compile: bool | Literal["auto"] = "auto"
    """Execution: use torch.compile. auto: only on a GPU."""
    cuda_graphs: bool | Literal["auto"] = "auto"
    """Execution: replay the kernels of a microbatch as one CUDA graph instead of launching them one by one. auto: on a
    single GPU, if a measurement after the first step shows that it is faster. true works with data parallelism, too:
    weights are then gathered before a step and gradients summed after it, and neither overlaps with computing."""
    deterministic: bool | Literal["auto"] = "auto"
    """Execution: use only deterministic kernels. auto: on a CPU, where they cost nothing."""
    max_wall_time: Duration | None = None
    """Execution: save and stop after this long, for example 23.5h; the same command continues the run."""
    hang_timeout: float = Field(default=120.0, gt=0)
    """Execution: the launcher considers a process hung after this many seconds without a finished step, or 10 of its
    steps if that is longer."""
    startup_timeout: float = Field(default=600.0, gt=0)
    """Execution: the same before the end of the second step (imports, compilation, reading a checkpoint); reading or
    writing counts as progress."""
    save_timeout: float = Field(default=420.0, gt=0)
    """Execution: the same during a save, and during an evaluation for each of its batches; reading or writing a
    checkpoint counts as progress."""
    log_interval: Duration = Duration(1, "ba")
    """Execution: how often to gather and write metrics."""
    loggers: LoggersConfig = LoggersConfig()
    """Execution: where metrics go."""
    profiler: ProfilerConfig = ProfilerConfig()
    """Execution: which steps to profile."""
    generate: GenerateConfig = GenerateConfig()
    """Execution: prompts to continue while training."""

    @classmethod
    def expand_shorthands(cls, values: dict[str, Any], file: Path | None = None) -> dict[str, Any]:
        """`data: FOLDER` becomes its train and val splits, or the folder itself where it is a split. Tasks are looked
        for next to the file that names them."""
        if file is not None and isinstance(tasks := values.get("eval"), dict):
            values = {**values, "eval": {"folder": str(file.parent), **tasks}}
        if not isinstance(text := values.get("data"), str):
            return values
        folder = Path(text)
        if (folder / "index.json").is_file() or Path(f"{text}.idx").is_file():
            return {**values, "data": {"train": {"path": text}}}
        data: dict[str, Any] = {"train": {"path": text, "split": "train"}}
        if not folder.is_dir() or any(folder.glob("val*")):
            data["eval"] = {"path": text, "split": "val", "shuffle": False}
        return {**values, "data": data}

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = cls.expand_shorthands(values)
        model = values.get("model", {})
        if isinstance(model, dict) and model.get("max_seq_len") is None:
            default = cls.model_fields["max_seq_len"].default
            values = {**values, "model": {**model, "max_seq_len": values.get("max_seq_len", default)}}
        return values

    @field_validator("name")
    @classmethod
    def _plain(cls, value: str) -> str:
        try:
            return plain_name(value)
        except ValueError as error:
            if "/" not in value or ".." in value:
                raise
            own = f"name={plain_name_from(value)} save_folder=runs/{value}"
            raise ValueError(f"{error}; to continue a v0.1 run of this name, set {own}") from None

    @field_validator("precision", mode="before")
    @classmethod
    def _precision_alias(cls, value: Any) -> Any:
        return PRECISION_ALIASES.get(value, value) if isinstance(value, str) else value

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _activation_mode(cls, value: Any) -> Any:
        if value in ("none", "full"):
            return value == "full"
        if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value < 1:
            raise ValueError("must be auto, none, full, selective, or a fraction of the activations between 0 and 1")
        return value

    @field_validator("device_train_microbatch_size")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be at least 1, or auto")
        return value

    @model_validator(mode="after")
    def _check(self) -> "RunConfig":
        if self.max_seq_len > self.model.context and self.model.positions == "learned":
            raise rule_error(
                "max_seq_len", f"{self.max_seq_len} is longer than model.max_seq_len {self.model.context}, the rows of "
                "the learned position table"
            )  # fmt: skip
        if self.mask_eos_loss and self.model.eos_token_id is None:
            raise rule_error("mask_eos_loss", "model.eos_token_id must say which token ends a document")
        micro, batch = self.device_train_microbatch_size, self.global_train_batch_size
        if batch > MOST_SEQUENCES:
            raise rule_error(
                "global_train_batch_size",
                f"{batch:,} sequences in one step are too many; use at most {MOST_SEQUENCES:,}",
            )
        if isinstance(micro, int) and batch % micro:
            near = max(n for n in divisors(batch) if n <= micro)
            raise rule_error(
                "device_train_microbatch_size",
                f"{micro} does not divide global_train_batch_size {batch}; use {near} or auto",
            )
        if self.remote_save_folder and self.remote_folder == self.save_folder:
            raise rule_error("remote_save_folder", "save_folder is already a URL; set only one of the two")
        if secret := next(secret_in(self.model_dump(mode="json")), None):
            raise rule_error(
                secret, "the URL has a password or a signature in it, which would be written into checkpoints and seen "
                "in process lists; pass credentials in the environment (AWS_..., AZURE_..., GOOGLE_...)"
            )  # fmt: skip
        return self

    @model_validator(mode="after")
    def _check_durations(self) -> "RunConfig":
        intervals = ["max_duration", "eval_interval", "log_interval", "save_keep_every", "guards.checksum_interval",
                     "generate.interval"]  # fmt: skip
        schedule = [f"scheduler.{name}" for name in ("t_warmup", "t_max", "t_scale", "t_decay", "t_cooldown")]
        for key in intervals + schedule:
            value = attrgetter(key)(self)
            if value is not None and value.is_wall_clock:
                units = "ba, ep, sp, tok or dur" if key in schedule else "ba, ep, sp or tok"
                raise rule_error(key, f"{value} is wall-clock time; use {units} here")
        if self.max_wall_time is not None and not self.max_wall_time.is_wall_clock:
            raise rule_error(
                "max_wall_time", f"{self.max_wall_time} is not wall-clock time; use for example 90min or 23.5h"
            )
        if self.max_duration.unit == "dur" or self.max_duration.value <= 0:
            raise rule_error(
                "max_duration", f"{self.max_duration} must be positive and not in dur; use for example 4800ba or 1ep"
            )
        return self

    @property
    def sources(self) -> DataConfig:
        """The data of the run; an error if the config does not name it."""
        if self.data is None:
            raise ConfigError("data is missing; name a prepared folder with data=FOLDER, or data.train.path=...")
        return self.data

    @property
    def eval_samples(self) -> int | None:
        """How many samples an evaluation uses; None for all."""
        batches = self.eval_subset_num_batches
        return batches * (self.device_eval_batch_size or EVAL_BATCH) if batches >= 0 else None

    def task_questions(self, task: TaskConfig, rows: int) -> int | None:
        """How many questions of a task an evaluation uses, where each has `rows` rows; None for all."""
        batches = self.eval_subset_num_batches if self.icl_subset_num_batches is None or task.has_categories else (
            self.icl_subset_num_batches)  # fmt: skip
        size = task.batch_size or self.device_eval_batch_size or EVAL_BATCH
        return batches * max(size // rows, 1) if batches >= 0 else None

    def order_seed(self, source: SourceConfig) -> int:
        """The seed of the order of a source's samples."""
        return source.shuffle_seed if source.shuffle_seed is not None else self.seed

    @property
    def no_loss_after_token(self) -> int | None:
        """The token after which the model predicts nothing: the position has no label."""
        return self.model.eos_token_id if self.mask_eos_loss else None

    @property
    def recompute(self) -> str | None:
        """What blocks recompute, as configured: full, selective or None; other modes are decided elsewhere."""
        return {True: "full", "selective": "selective"}.get(self.activation_checkpointing)

    @property
    def run_folder(self) -> str:
        """Where the run writes on this machine."""
        return self.save_folder if self.save_folder and "://" not in self.save_folder else f"runs/{self.name}"

    @property
    def remote_folder(self) -> str | None:
        """Where checkpoints are copied to, if anywhere."""
        return self.save_folder if self.save_folder and "://" in self.save_folder else self.remote_save_folder
