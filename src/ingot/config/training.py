"""How a run is trained and watched: optimizer, learning rate, guards, loggers, prompts, profiler.

Credentials of trackers never belong into a config: trackers take them from the environment or from their own login.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ingot.config.base import Section
from ingot.config.durations import Duration, StepRange

Beta = Annotated[float, Field(ge=0, lt=1)]
TrackerMode = Literal["online", "offline"]


class OptimizerConfig(Section):
    """The optimizer and its settings."""

    name: Literal["adamw", "decoupled_adamw", "lion", "muon"] = "decoupled_adamw"
    """adamw decays by lr x weight_decay; decoupled_adamw by (lr / peak lr) x weight_decay, as in Composer; lion is
    decoupled too; muon updates the hidden matrices and leaves the rest to AdamW."""
    lr: float = Field(default=6e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of the running averages of gradients and of their squares."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator, for numerical stability (AdamW)."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay; see name for what it is multiplied by."""
    decay: Literal["matrices", "all"] = "matrices"
    """Which weights decay: matrices and embeddings (Megatron, NeoX), or biases and norms too (Composer)."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum (Muon)."""


class SchedulerConfig(Section):
    """The learning rate, a pure function of the run's progress."""

    name: Literal[
        "constant_with_warmup", "linear_decay_with_warmup", "cosine_with_warmup", "exponential_decay_with_warmup",
        "inv_sqrt_with_warmup", "wsd"
    ] = "cosine_with_warmup"  # fmt: skip
    """Shape after the warmup; exponential_decay is alpha_f to the power of the progress."""
    t_warmup: Duration = Duration(0, "ba")
    """Length of the linear warmup."""
    warmup_start: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the start of the warmup, as a fraction of the peak."""
    t_max: Duration = Duration(1, "dur")
    """When linear, cosine, exponential and wsd reach alpha_f and inv_sqrt ends, counted from the start of the run."""
    alpha_f: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate as a fraction of the peak."""
    t_scale: Duration | None = None
    """inv_sqrt: the time after which the learning rate has fallen to 1/sqrt(2). Default: t_warmup."""
    t_cooldown: Duration = Duration(0, "ba")
    """inv_sqrt: length of a final linear decay to alpha_cooldown."""
    alpha_cooldown: float = Field(default=0.0, ge=0, le=1)
    """inv_sqrt: learning rate at the end of the cooldown, as a fraction of the peak."""
    t_decay: Duration = Duration(0.1, "dur")
    """wsd: length of the final decay."""
    warmup_floor: int = Field(default=0, ge=0)
    """Smallest batch number that the warmup computes with: with 1 the first step has a learning rate above 0
    (GPT-NeoX), with 0 it does not (everyone else)."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """Lower bound of the learning rate after the warmup, as a fraction of the peak."""
    decay_shape: Literal["linear", "cosine", "sqrt", "exponential"] = "sqrt"
    """wsd: shape of the final decay; sqrt is 1 - sqrt(progress), exponential 2 x 0.5^progress - 1 (Megatron)."""


class GuardsConfig(Section):
    """What to do when the numbers go wrong. stop: end the run; the last checkpoint is good. skip: drop this batch
    (checks every step before it changes weights, so the GPU waits for the host). rollback: go back to the last
    checkpoint and skip this batch from there on."""

    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """What to do when a loss or gradient norm is NaN or infinite."""
    spike: Literal["ignore", "stop", "skip", "rollback"] = "ignore"
    """What to do when a loss jumps."""
    spike_threshold: float = Field(default=10.0, gt=0)
    """A jump is this many robust deviations (1.48 x the median distance from the median) above the median."""
    spike_window: int = Field(default=128, ge=8)
    """Number of batches that median and deviation are computed over."""
    max_skips: int = Field(default=20, ge=0)
    """Stop the run after more skipped batches than this."""
    checksum_interval: Duration = Duration(0, "ba")
    """How often processes with the same weights compare them; 0ba for never."""


class TensorBoardConfig(Section):
    """Event files for TensorBoard."""

    log_dir: str | None = None
    """Where to write. Default: tensorboard/ in the run folder."""


class WandbConfig(Section):
    """Weights & Biases. The login is that of `wandb login`, or WANDB_API_KEY."""

    project: str = "ingot"
    """Project."""
    entity: str | None = None
    """User or team. Default: that of the login."""
    name: str | None = None
    """Name of the run. Default: the run's name."""
    group: str | None = None
    """Group. Default: the run's name."""
    tags: list[str] = Field(default_factory=list)
    """Tags."""
    mode: TrackerMode = "online"
    """offline writes to trackers/wandb in the run folder; `wandb sync` uploads it later."""
    id: str | None = Field(default=None, pattern=r"^[\w.-]{1,64}$")
    """Id of the tracker's run. Default: chosen once and kept in the run folder."""


class MLflowConfig(Section):
    """MLflow. The login is that of MLflow's environment variables."""

    tracking_uri: str | None = None
    """URL of the server, or a database such as sqlite:///mlflow.db. Default: MLFLOW_TRACKING_URI."""
    experiment_name: str = "ingot"
    """Experiment; made if there is none."""
    name: str | None = None
    """Name of the run. Default: the run's name."""
    group: str | None = None
    """Group, a tag. Default: the run's name."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Tags."""
    id: str | None = Field(default=None, pattern=r"^[0-9a-f]{32}$")
    """Id of an MLflow run to continue. Default: made once and kept in the run folder."""


class CometConfig(Section):
    """Comet. The login is that of `comet login`, or COMET_API_KEY."""

    project: str = "ingot"
    """Project."""
    workspace: str | None = None
    """Workspace. Default: that of the login."""
    name: str | None = None
    """Name of the experiment. Default: the run's name."""
    group: str | None = None
    """Group, a logged parameter. Default: the run's name."""
    tags: list[str] = Field(default_factory=list)
    """Tags."""
    mode: TrackerMode = "online"
    """offline writes to trackers/comet in the run folder; `comet upload` uploads it later."""
    id: str | None = Field(default=None, pattern=r"^[0-9A-Za-z]{32,50}$")
    """Key of the experiment. Default: chosen once and kept in the run folder."""


class TrackioConfig(Section):
    """Trackio. Local by default; the login of a Space is that of `hf auth login`, or HF_TOKEN."""

    project: str = "ingot"
    """Project."""
    name: str | None = None
    """Name of the run. Default: the run's name."""
    group: str | None = None
    """Group. Default: the run's name."""
    space_id: str | None = None
    """Hugging Face Space that receives the metrics, for example my-team/runs. Default: Trackio's database on this
    machine."""


class LoggersConfig(Section):
    """Where metrics go in addition to the console and metrics.jsonl. `loggers.NAME={}` turns a tracker on."""

    tensorboard: TensorBoardConfig | None = None
    """Write TensorBoard event files."""
    wandb: WandbConfig | None = None
    """Report to Weights & Biases."""
    mlflow: MLflowConfig | None = None
    """Report to MLflow."""
    comet: CometConfig | None = None
    """Report to Comet; `cometml` is accepted too."""
    trackio: TrackioConfig | None = None
    """Report to Trackio."""
    samples: bool = False
    """Record which samples each process trained on, batch by batch, in samples/rank-N.txt."""

    @model_validator(mode="before")
    @classmethod
    def _accept_cometml(cls, values: Any) -> Any:
        if isinstance(values, dict) and "cometml" in values and "comet" not in values:
            values = {**values, "comet": values["cometml"]}
            del values["cometml"]
        return values


class GenerateConfig(Section):
    """Texts that a run generates while it trains, for people to read: in generated.jsonl, the report and trackers."""

    prompts: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts to continue at each checkpoint, token by most likely token."""
    interval: Duration | None = None
    """How often, in place of at each checkpoint; also after the last batch."""
    max_new_tokens: int = Field(default=64, ge=1, le=4096)
    """Tokens to generate for each prompt, at most."""

    @field_validator("prompts", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else () if value is None else value


class ProfilerConfig(Section):
    """Measures where the time of some steps goes. Not to be confused with a cluster profile (`ingot launch profiles`).
    Nothing here changes the result of a run."""

    steps: StepRange | None = None
    """Steps to profile, for example 10-13 (at most 20). Each rank writes a table of its time and a trace for Perfetto
    to profile/ in the run folder."""
    end_run: bool = False
    """End the run after these steps, as `ingot profile` does. Neither that nor a stop before it saves a checkpoint."""
    memory_history: bool = False
    """On a GPU, record every allocation, and when memory runs out write PyTorch's own snapshot (a pickle, for
    https://pytorch.org/memory_viz) next to the report of what filled it. Costs some speed."""
