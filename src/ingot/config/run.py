"""What a run is: the sections of every layer put together.

`global_train_batch_size`, data order, schedule and loss define the math. Everything under "execution" may change
between two starts of a run without changing its result beyond floating-point order.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from ingot.config.base import Section, rule_error
from ingot.config.data import DataConfig, SourceConfig
from ingot.config.durations import Duration
from ingot.config.model import ModelConfig
from ingot.config.names import plain_name
from ingot.config.parallel import ParallelConfig
from ingot.config.secrets import secret_in
from ingot.errors import ConfigError

PRECISION_ALIASES = {"amp_bf16": "bf16", "amp_fp16": "fp16", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32",
                     "amp_fp8": "fp8"}  # fmt: skip

EVAL_BATCH = 8  # sequences, where the config does not say


class OptimizerConfig(Section):
    """How weights follow gradients."""

    name: Literal["adamw", "decoupled_adamw", "lion", "muon"] = "decoupled_adamw"
    """adamw decays by lr x weight_decay; decoupled_adamw by (lr / peak lr) x weight_decay, as Composer does; lion is
    decoupled too; muon takes the hidden matrices and leaves the rest to AdamW."""
    lr: float = Field(6e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running averages."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator (AdamW)."""
    weight_decay: float = Field(0.0, ge=0)
    """Decay of the weights."""
    decay: Literal["matrices", "all"] = "matrices"
    """What is decayed: matrices and embeddings, as Megatron and NeoX do; or biases and norms too, as Composer does."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Momentum (Muon)."""


class SchedulerConfig(Section):
    """The learning rate as a pure function of progress."""

    name: Literal[
        "constant_with_warmup", "linear_decay_with_warmup", "cosine_with_warmup", "exponential_decay_with_warmup",
        "inv_sqrt_with_warmup", "wsd"
    ] = "cosine_with_warmup"  # fmt: skip
    """Shape after the warmup; exponential is alpha_f to the power of the progress."""
    t_warmup: Duration = Duration(0, "ba")
    """Linear rise."""
    warmup_start: float = Field(0.0, ge=0, le=1)
    """Fraction of the peak that the warmup rises from."""
    t_max: Duration = Duration(1, "dur")
    """When linear, cosine, exponential and wsd reach alpha_f, and inv_sqrt ends."""
    alpha_f: float = Field(0.1, ge=0, le=1)
    """Final learning rate as a fraction of the peak."""
    t_scale: Duration | None = None
    """inv_sqrt: the time after which the rate has fallen to 1/sqrt(2). Default: t_warmup."""
    t_cooldown: Duration = Duration(0, "ba")
    """inv_sqrt: length of a linear fall to alpha_cooldown at the end."""
    alpha_cooldown: float = Field(0.0, ge=0, le=1)
    """inv_sqrt: the rate that the cooldown reaches, as a fraction of the peak."""
    t_decay: Duration = Duration(0.1, "dur")
    """wsd: length of the final decay."""
    warmup_floor: int = Field(0, ge=0)
    """Batches that the warmup counts at least: 1 gives the first step a rate (GPT-NeoX), 0 none (everyone else)."""
    floor: float = Field(0.0, ge=0, le=1)
    """Never below this fraction of the peak once the warmup is over."""
    decay_shape: Literal["linear", "cosine", "sqrt", "exponential"] = "sqrt"
    """wsd: shape of the final decay; sqrt is 1 - sqrt(progress), exponential 2 x 0.5^progress - 1, as Megatron's."""


class GuardsConfig(Section):
    """What to do when the numbers go wrong. stop: end the run, the last checkpoint is good. skip: leave this batch
    out (looks at every step before it changes weights, so a GPU waits for the host). rollback: go back to the last
    checkpoint and leave this batch out from there on."""

    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """When a loss or gradient norm is NaN or infinite."""
    spike: Literal["ignore", "stop", "skip", "rollback"] = "ignore"
    """When a loss jumps."""
    spike_threshold: float = Field(10.0, gt=0)
    """A jump is this many robust deviations (1.48 x the median distance from the median) above the median."""
    spike_window: int = Field(128, ge=8)
    """Batches that median and deviation are taken over."""
    max_skips: int = Field(20, ge=0)
    """More batches left out than this stop the run."""
    checksum_interval: Duration = Duration(0, "ba")
    """How often processes that hold the same weights compare them; 0ba for never."""


class TensorBoardConfig(Section):
    """Event files for TensorBoard."""

    log_dir: str | None = None
    """Where to write. Default: the run folder's tensorboard/."""


class LoggersConfig(Section):
    """Where metrics go besides the console and metrics.jsonl."""

    tensorboard: TensorBoardConfig | None = None
    """Write TensorBoard event files; `loggers.tensorboard={}` turns it on."""
    samples: bool = False
    """Write down which samples each process trained on, batch by batch: samples/rank-N.txt."""


class RunConfig(Section):
    """A run."""

    name: str = Field("run", min_length=1)
    """Name of the run: one plain name, since it names the default run folder."""
    seed: int = Field(17, ge=0)
    """Initial weights, data order and dropout follow from it."""
    max_seq_len: int = Field(2048, gt=0)
    """Tokens per training sequence."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    """The network."""
    tokenizer: str | None = None
    """Folder or tokenizer.json. Default: the one that the prepared data carries."""
    data: DataConfig | None = None
    """What to train and evaluate on; a recipe leaves it open."""

    global_train_batch_size: int = Field(256, gt=0)
    """Sequences per optimizer step, over all devices."""
    max_duration: Duration = Duration(1, "ep")
    """When to stop."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """The learning-rate schedule."""
    mask_eos_loss: bool = False
    """Leave out of the loss what follows the end of a document (model.eos_token_id)."""
    gradient_clipping: float | None = Field(1.0, gt=0)
    """Largest global gradient norm; null to leave gradients alone."""
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "bf16"
    """Type of the matrix products. Master weights and optimizer are fp32 always. Composer's amp_* names work."""

    guards: GuardsConfig = GuardsConfig()
    """What to do when a loss is no number, or jumps."""

    eval_interval: Duration = Duration(1000, "ba")
    """How often to evaluate, besides at the end; 0ba for only at the end."""
    eval_subset_num_batches: int = Field(-1, ge=-1)
    """Batches per evaluation, of device_eval_batch_size sequences or else of 8, however many processes share them; -1
    for all."""
    device_eval_batch_size: int | None = Field(None, gt=0)
    """Sequences that a process evaluates at once. Default: the training microbatch."""

    save_folder: str | None = None
    """The run folder. Default: runs/NAME. At a URL (s3://, gs://, az://) checkpoints are kept there, and here, in
    runs/NAME, only the newest."""
    save_interval: Duration = Duration(1000, "ba")
    """How often to save, besides at the end; wall-clock units work too; 0ba for only at the end."""
    save_num_checkpoints_to_keep: int = Field(-1, ge=-1)
    """Newest checkpoints kept; -1 for all."""
    save_keep_every: Duration = Duration(0, "ba")
    """Checkpoints at multiples of this are kept whatever the number of newest ones; 0ba for none."""
    save_weights_only: bool = False
    """Save no optimizer state; such a checkpoint cannot be continued."""
    state_dict_type: Literal["sharded", "full"] = "sharded"
    """Execution: sharded: every process writes its own part; full: the first gathers all into one set of files."""
    remote_save_folder: str | None = None
    """A second place, a URL or a folder, for copies of some checkpoints, made in the background."""
    remote_save_interval: Duration = Duration(0, "ba")
    """How often to copy there, besides at the end; 0ba for every checkpoint."""
    load_path: str | None = None
    """Start from the weights of this run, checkpoint or Hugging Face folder, or of a run or checkpoint at a URL (with a
    fresh optimizer and schedule)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Execution: where to run."""
    parallel: ParallelConfig = ParallelConfig()
    """Execution: how the run is spread over its processes; one process needs nothing."""
    device_train_microbatch_size: int | Literal["auto"] = "auto"
    """Execution: sequences per forward pass on a device."""
    activation_checkpointing: bool | Literal["auto", "none", "full", "selective"] | float = "auto"
    """Execution: recompute in the backward pass instead of storing. true or full: all of each block; selective: all but
    matrix products and attention; auto: on a GPU the least of none, selective and full with which a microbatch of a few
    thousand tokens fits; a number between 0 and 1: what the compiler chooses to stay within that part of the memory."""
    compile: bool | Literal["auto"] = "auto"
    """Execution: torch.compile. auto: on a GPU, yes."""
    cuda_graphs: bool | Literal["auto"] = "auto"
    """Execution: replay the kernels of a microbatch as one CUDA graph instead of launching them one by one. auto: on
    one GPU, where that is faster by measurement after the first step."""
    deterministic: bool | Literal["auto"] = "auto"
    """Execution: only deterministic kernels. auto: on a CPU, yes, where they cost nothing."""
    max_wall_time: Duration | None = None
    """Execution: save and stop after this long, for example 23.5h; the same command continues."""
    hang_timeout: float = Field(120.0, gt=0)
    """Execution: seconds without progress after which the launcher takes a process for hung, or 10 of its steps if
    that is longer; 30 times as long before the first step."""
    log_interval: Duration = Duration(1, "ba")
    """Execution: how often metrics are gathered and written."""
    loggers: LoggersConfig = LoggersConfig()
    """Execution: trackers."""

    @classmethod
    def expand_shorthands(cls, values: dict[str, Any]) -> dict[str, Any]:
        """`data: FOLDER` becomes its train and val splits, or the folder itself where it is a split."""
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
        return plain_name(value)

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
            raise ValueError("as a number it is a part of the memory, between 0 and 1; or auto, none, full, selective")
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
        if isinstance(micro, int) and batch % micro:
            near = max(n for n in range(1, min(micro, batch) + 1) if batch % n == 0)
            raise rule_error(
                "device_train_microbatch_size",
                f"{micro} does not divide global_train_batch_size {batch}; {near} would, or auto",
            )
        if self.remote_save_folder and self.remote_folder == self.save_folder:
            raise rule_error("remote_save_folder", "save_folder is at a URL already; give one of the two")
        for key in ("max_duration", "eval_interval", "log_interval", "save_keep_every"):
            if getattr(self, key).is_wall_clock:
                raise rule_error(key, f"{getattr(self, key)} is wall-clock time; use ba, ep, sp or tok here")
        if secret := next(secret_in(self.model_dump(mode="json")), None):
            raise rule_error(
                secret, "the URL has a password or a signature in it, which would be written into checkpoints and seen "
                "in process lists; give credentials in the environment (AWS_..., AZURE_..., GOOGLE_...)"
            )  # fmt: skip
        if self.max_wall_time is not None and not self.max_wall_time.is_wall_clock:
            raise rule_error("max_wall_time", f"{self.max_wall_time} is no wall-clock time; write 90min or 23.5h")
        if self.guards.checksum_interval.is_wall_clock:
            raise rule_error("guards.checksum_interval", "wall-clock time will not do; use ba, ep, sp or tok here")
        for key in ("t_warmup", "t_max", "t_scale", "t_decay", "t_cooldown"):
            value = getattr(self.scheduler, key)
            if value is not None and value.is_wall_clock:
                raise rule_error(f"scheduler.{key}", f"{value} is wall-clock time; use ba, ep, sp, tok or dur here")
        if self.max_duration.unit == "dur" or self.max_duration.value <= 0:
            raise rule_error("max_duration", f"{self.max_duration} is no length; use for example 4800ba or 1ep")
        return self

    @property
    def sources(self) -> DataConfig:
        """The data of the run, which must be known by the time that it is needed."""
        if self.data is None:
            raise ConfigError("data is missing; name a prepared folder with data=FOLDER, or data.train.path=...")
        return self.data

    @property
    def eval_samples(self) -> int | None:
        """How many samples an evaluation takes; None for all."""
        batches = self.eval_subset_num_batches
        return batches * (self.device_eval_batch_size or EVAL_BATCH) if batches >= 0 else None

    def order_seed(self, source: SourceConfig) -> int:
        """What the order of a source's samples follows from."""
        return source.shuffle_seed if source.shuffle_seed is not None else self.seed

    @property
    def unscored(self) -> int | None:
        """The token whose successor is not to be predicted."""
        return self.model.eos_token_id if self.mask_eos_loss else None

    @property
    def recompute(self) -> str | None:
        """What blocks recompute, as configured: full, selective, or nothing that they know of."""
        return {True: "full", "selective": "selective"}.get(self.activation_checkpointing)

    @property
    def run_folder(self) -> str:
        """Where the run writes on this machine."""
        return self.save_folder if self.save_folder and "://" not in self.save_folder else f"runs/{self.name}"

    @property
    def remote_folder(self) -> str | None:
        """Where checkpoints go besides."""
        return self.save_folder if self.save_folder and "://" in self.save_folder else self.remote_save_folder
