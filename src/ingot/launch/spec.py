"""Where and how a run runs: the one description that local processes, a Slurm script and Kubernetes manifests are made
of. What the run *is* stands in its arguments, which are passed on as they are and never through a shell.

Values that end up in a script are checked by pattern, here, before anything is rendered: a name that could mean
something to a shell is refused.
"""

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from ingot.config.base import Section, rule_error
from ingot.config.load import validate
from ingot.config.secrets import NAMES, SHORTEST
from ingot.errors import ConfigError
from ingot.launch.protocol import LAUNCH, SPEC

PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+:@=,/\[\]%-]*")


def _plain(value: str) -> str:
    if not PLAIN.fullmatch(value) or len(value) > 1000:
        raise ValueError(f"{value[:60]!r} may only have letters, digits and _ . + : @ = , / [ ] % -")
    return value


def _path(value: str) -> str:
    # no : and no comma: lists of mounts are made of paths
    if not re.fullmatch(r"/[A-Za-z0-9_.+@=/-]*", value) or len(value) > 1000 or ".." in value.split("/"):
        raise ValueError(f"{value[:60]!r} must be an absolute path of letters, digits and _ . + @ = / -")
    return value


def _variable(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value) or len(value) > 1000:
        raise ValueError(f"{value[:60]!r} is no name of an environment variable")
    return value


Plain = Annotated[str, AfterValidator(_plain)]
AbsolutePath = Annotated[str, AfterValidator(_path)]
Variable = Annotated[str, AfterValidator(_variable)]
Mount = Annotated[str, Field(pattern=r"^/[A-Za-z0-9_.+@=/-]*:/[A-Za-z0-9_.+@=/-]*(:(ro|rw))?$", max_length=1000)]
Claim = Annotated[
    str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?:/[A-Za-z0-9_.+@=/-]+(:(ro|rw))?$", max_length=1000)
]
Label = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=63)]


class LaunchSpec(Section):
    """A run, placed."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=63)]
    """Name of the job."""
    verb: Literal["train", "prepare"] = "train"
    """What each process does."""
    arguments: list[str] = Field(default_factory=list, max_length=10_000)
    """What stands behind the verb."""
    run_folder: AbsolutePath
    """The run folder, seen by all nodes under the same path; for prepare, a folder of its own in the output's."""
    workdir: AbsolutePath
    """Where the command was given: relative paths in its arguments mean the same on the nodes."""
    nodes: int = Field(1, ge=1, le=100_000)
    """Nodes that work; for prepare, jobs that share the work, each on a node of its own."""
    spares: int = Field(0, ge=0)
    """Nodes that wait until one of the others fails."""
    gpus_per_node: int = Field(0, ge=0, le=64)
    """GPUs of each node; 0 trains on CPUs."""
    processes_per_node: int | None = Field(None, ge=1)
    """Processes on each node. Default: one per GPU, or one."""
    cpus_per_task: int | None = Field(None, ge=1)
    """CPU cores of each node's task. Default: what the cluster gives."""
    image: str | None = Field(None, max_length=1000)
    """Container image: a squash file (absolute path) or a registry name."""
    stage: AbsolutePath | None = None
    """Folder on each node's own disk to which the squash file is copied first, with its hash checked."""
    mounts: list[Mount] = Field(default_factory=list)
    """Folders seen inside the container: SOURCE:TARGET[:ro]."""
    profile: Plain = "tcp"
    """The cluster's network profile."""
    env: dict[Variable, Annotated[str, Field(max_length=4000)]] = Field(default_factory=dict)
    """Variables beyond those of the profile."""
    secrets: list[Variable] = Field(default_factory=list)
    """Names of variables whose values are taken where the job starts, and are written nowhere."""
    python: AbsolutePath | None = None
    """The interpreter on the nodes. Default: this one, or python3 of the image."""
    time: Annotated[str, Field(pattern=r"^([0-9]{1,3}-)?[0-9]{1,3}(:[0-9]{2}){0,2}$")] = "24:00:00"
    """Time limit of one job: days-hours:minutes:seconds."""
    partition: Plain | None = None
    """Slurm partition."""
    account: Plain | None = None
    """Slurm account."""
    qos: Plain | None = None
    """Slurm quality of service."""
    constraint: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.&|\[\]*,-]+$", max_length=1000)] | None = None
    """Slurm node features."""
    exclude: list[Plain] = Field(default_factory=list)
    """Nodes not to use."""
    reservation: Plain | None = None
    """Slurm reservation."""
    chain: int = Field(1, ge=1, le=1000)
    """Jobs queued at once, one after another: the next continues what the last one could not finish."""
    preflight: bool = True
    """Check the nodes before each attempt."""
    signal_seconds: int = Field(180, ge=10, le=65_535)
    """How long before the time limit the run is asked to save and stop."""
    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=63)] = "default"
    """Kubernetes namespace."""
    claims: list[Claim] = Field(default_factory=list)
    """Kubernetes volumes seen by all pods: CLAIM:TARGET[:ro]."""
    queue: Label | None = None
    """Kueue queue that admits all pods at once."""
    secret_name: Label | None = None
    """Kubernetes Secret that holds the values of `secrets`, under their names."""
    restarts: int = Field(10, ge=0, le=1000)
    """How often Kubernetes may make all pods anew."""

    @model_validator(mode="after")
    def _check(self) -> "LaunchSpec":
        for name, value in {"image": self.image or "", **{f"env.{k}": v for k, v in self.env.items()}}.items():
            if re.search(r"[\x00-\x1f\x7f]", value):
                raise rule_error(name.partition(".")[0], f"{name} has a control character in it")
        for name, value in self.env.items():
            if NAMES.search(name) and len(value) >= SHORTEST:
                raise rule_error("env", f"{name} looks like a secret, and would be written down; use --secret {name}")
        if self.image is not None and not re.fullmatch(r"[A-Za-z0-9/][A-Za-z0-9_.+:@#/-]*", self.image):
            raise rule_error("image", f"{self.image[:60]!r} is neither a path nor an image name")
        if self.stage is not None and not (self.image or "").startswith("/"):
            raise rule_error("stage", "only a squash file, an --image that is a path, can be copied to the nodes")
        if any("\x00" in argument for argument in self.arguments):
            raise rule_error("arguments", "an argument has a NUL character in it")
        return self

    @property
    def processes(self) -> int:
        """Processes on each node."""
        return self.processes_per_node or self.gpus_per_node or 1

    @property
    def folder(self) -> Path:
        """Where the launcher keeps its files."""
        return Path(self.run_folder) / LAUNCH

    def write(self) -> Path:
        """Keep the spec in the run folder, readable by its owner alone."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path, draft = self.folder / SPEC, self.folder / f".{SPEC}.{os.getpid()}"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(self.model_dump_json(indent=1))
        os.replace(draft, path)
        return path


def make_spec(values: dict[str, Any]) -> LaunchSpec:
    """Validate; an error names the field."""
    return validate(LaunchSpec, values)


def read_spec(path: Path) -> LaunchSpec:
    try:
        return make_spec(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"{path} is not there: nothing was launched from this folder") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no launch spec: {error}") from None
