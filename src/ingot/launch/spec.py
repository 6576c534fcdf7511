"""Where and how a run executes: one description, from which local processes, a Slurm script or Kubernetes manifests are
made. What the run does is in its arguments, which are passed on unchanged and never through a shell.

The fields are also the options of `ingot launch`: their docstrings are its help, their flags its spellings. Values that
end up in a script are checked here by pattern, before anything is rendered: a name that a shell could interpret is
refused.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ingot.config.base import Section, rule_error
from ingot.config.load import validate
from ingot.config.secrets import NAMES, SHORTEST, why_secret
from ingot.errors import ConfigError
from ingot.launch.protocol import LaunchFolder
from ingot.storage.atomic import write_whole
from ingot.storage.small_files import OddFile, move_away, read_text

PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+:@=,/\[\]%-]*")


def _plain(value: str) -> str:
    if not PLAIN.fullmatch(value) or len(value) > 1000:
        raise ValueError(f"{value[:60]!r} may contain only letters, digits and _ . + : @ = , / [ ] % -")
    return value


def _path(value: str) -> str:
    # no colon and no comma, because lists of mounts are made of paths
    if not re.fullmatch(r"/[A-Za-z0-9_.+@=/-]*", value) or len(value) > 1000 or ".." in value.split("/"):
        raise ValueError(f"{value[:60]!r} must be an absolute path of letters, digits and _ . + @ = / -")
    return value


def _variable(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value) or len(value) > 1000:
        raise ValueError(f"{value[:60]!r} is not a valid environment variable name")
    return value


def _split_at_commas(values: Any) -> Any:
    """`-m A:/a,B:/b` and `-m A:/a -m B:/b` mean the same."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return values
    return [part for value in values for part in value.split(",")]


# What the scripts set themselves. Other options of Slurm may be added.
OWN_SLURM_OPTION = re.compile(
    r"--(?:job-name|nodes|ntasks|ntasks-per-node|gpus|gpus-per-node|gres|cpus-per-task|exclusive|mem|wait-all-nodes"
    r"|requeue|no-requeue|open-mode|output|time|signal|partition|account|qos|reservation|constraint|exclude|array|no-kill"
    r"|nodelist|label|kill-on-bad-exit|wait|overlap|container-(?:image|mounts|env|writable)|no-container-mount-home"
    r"|cpu-bind|mail-user|mail-type|chdir|export|wrap|dependency)(?:=|$)"
)

HETEROGENEOUS = re.compile(r":|(?:--)?(?:het|pack)job|--(?:het|pack)-group(?:=.*)?")


def _slurm_options(values: list[str]) -> list[str]:
    """`--mpi pmix --x` as `--mpi=pmix` and `--x`, each of which is safe on a line of the script."""
    found: list[str] = []
    for word in (word for value in values for word in shlex.split(value)):
        if HETEROGENEOUS.fullmatch(word):
            raise ValueError(f"{word!r} makes a heterogeneous job; all nodes of a run are alike: use --constraint to "
                             "choose them, and one launch per kind of node")  # fmt: skip
        if OWN_SLURM_OPTION.match(word):
            raise ValueError(f"{word.partition('=')[0]} is set by ingot; see `ingot launch slurm --help`")
        if re.fullmatch("--" + PLAIN.pattern, word):
            found.append(word)
        elif found and "=" not in found[-1] and PLAIN.fullmatch(word):
            found[-1] += f"={word}"
        else:
            raise ValueError(f"{word[:60]!r} is not an option of plain characters; write '--name=value --name=value'")
    return found


def _read_pairs(values: Any) -> Any:
    """NAME=VALUE options as a dictionary."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return values
    for pair in values:
        if "=" not in pair:
            raise ValueError(f"{pair!r} has no value; write --env NAME=VALUE, or pass it on with --secret NAME")
    return dict(pair.split("=", 1) for pair in values)


def _matching(pattern: str, expected: str, most: int = 1000) -> AfterValidator:
    """Text of a given form. expected: the form in words"""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value) or len(value) > most:
            raise ValueError(f"must be {expected}, of at most {most} characters" if len(value) > most else
                             f"must be {expected}")  # fmt: skip
        return value

    return AfterValidator(check)


Plain = Annotated[str, AfterValidator(_plain)]
AbsolutePath = Annotated[str, AfterValidator(_path)]
Variable = Annotated[str, AfterValidator(_variable)]
SlurmOptions = Annotated[list[str], AfterValidator(_slurm_options)]
PATH = r"/[A-Za-z0-9_.+@=/-]"
PATHS = "of letters, digits and _ . + @ = / -"
Mount = Annotated[
    str, _matching(rf"{PATH}*:{PATH}*(:(ro|rw))?", f"SOURCE:TARGET or SOURCE:TARGET:ro, two absolute paths {PATHS}")
]
Claim = Annotated[
    str,
    _matching(rf"[a-z0-9]([a-z0-9.-]*[a-z0-9])?:{PATH}+(:(ro|rw))?",
              f"CLAIM:TARGET or CLAIM:TARGET:ro, the name of a volume claim and an absolute path {PATHS}"),
]  # fmt: skip
Label = Annotated[
    str,
    _matching("[a-z0-9]([a-z0-9.-]*[a-z0-9])?",
              "a name of Kubernetes: lower-case letters, digits, . and -, with a letter or digit at both ends", 63),
]  # fmt: skip
Name = Annotated[
    str, _matching("[A-Za-z0-9][A-Za-z0-9_.-]*", "letters, digits and _ . -, beginning with a letter or digit", 63)
]
Namespace = Annotated[
    str,
    _matching("[a-z0-9]([a-z0-9-]*[a-z0-9])?",
              "a namespace of Kubernetes: lower-case letters, digits and -, with a letter or digit at both ends", 63),
]  # fmt: skip
Features = Annotated[
    str, _matching(r"[A-Za-z0-9_.&|\[\]*,-]+", "node features of Slurm: letters, digits and _ . & | [ ] * , -")
]
TimeLimit = Annotated[
    str,
    _matching("(?i:unlimited|infinite)|([0-9]{1,5}-)?[0-9]{1,7}(:[0-9]{1,2}){0,2}",
              "MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, DAYS-HOURS:MINUTES[:SECONDS] or UNLIMITED, "
              "as Slurm reads it; one hour is 1:00:00", 30),
]  # fmt: skip


def _flags(*flags: str) -> dict[str, Any]:
    return {"flags": list(flags)}


class LaunchSpec(Section):
    """A run and where it executes."""

    name: Name
    """Name of the job. Default: the run's name."""
    verb: Literal["train", "prepare"] = "train"
    """What each process does."""
    arguments: list[str] = Field(default_factory=list, max_length=10_000)
    """The arguments of the verb."""
    run_folder: AbsolutePath
    """The run folder, which all nodes see under the same path; for prepare, a folder inside the output folder."""
    workdir: AbsolutePath
    """Where the command was given: relative paths in its arguments mean the same on the nodes."""
    local_folder: bool = False
    """Accept a run folder on a disk of this machine: the nodes see it under the same path."""
    nodes: int = Field(1, ge=1, le=100_000, json_schema_extra=_flags("--nodes", "-N"))
    """Number of nodes; for prepare, of jobs, each on its own node."""
    spares: int = Field(0, ge=0)
    """Extra nodes that wait to replace a failed one."""
    gpus_per_node: int = Field(0, ge=0, le=64)
    """GPUs per node; 0 trains on CPUs. Default: the profile's, or for local runs this machine's."""
    processes_per_node: int | None = Field(None, ge=1)
    """Processes per node. Default: one per GPU, or one."""
    cpus_per_task: int | None = Field(None, ge=1)
    """CPU cores per node. Default: the cluster's."""
    image: str | None = Field(None, max_length=1000, json_schema_extra=_flags("--image", "-i"))
    """Container image: path of a squash file, or a registry name."""
    stage: AbsolutePath | None = None
    """Folder on each node's own disk. Jobs copy the squash file there first and verify its hash."""
    mounts: Annotated[list[Mount], BeforeValidator(_split_at_commas)] = Field(
        default_factory=list, json_schema_extra=_flags("--mounts", "-m")
    )
    """Folders in the container: SOURCE:TARGET[:ro], separated by commas."""
    profile: Plain = "tcp"
    """Cluster profile; `ingot launch profiles` lists them."""
    env: Annotated[dict[Variable, Annotated[str, Field(max_length=4000)]], BeforeValidator(_read_pairs)] = Field(
        default_factory=dict
    )
    """NAME=VALUE to set on the nodes, in addition to the cluster profile's; repeatable."""
    secrets: list[Variable] = Field(default_factory=list, json_schema_extra=_flags("--secret"))
    """Name of a variable to pass on, whose value is never written to disk; repeatable."""
    python: AbsolutePath | None = None
    """The interpreter on the nodes. Default: this one, or the image's python3."""
    time: TimeLimit = Field("24:00:00", json_schema_extra=_flags("--time", "-t"))
    """Time limit of one job, as Slurm reads it: 90 is in minutes, 1:00:00 an hour, 2-12 two days and 12 hours."""
    partition: Plain | None = Field(None, json_schema_extra=_flags("--partition", "-p"))
    """Slurm partition."""
    account: Plain | None = Field(None, json_schema_extra=_flags("--account", "-A"))
    """Slurm account."""
    qos: Plain | None = None
    """Slurm quality of service."""
    constraint: Features | None = Field(None, json_schema_extra=_flags("--constraint", "-C"))
    """Slurm node features."""
    exclude: list[Plain] = Field(default_factory=list, json_schema_extra=_flags("--exclude", "-x"))
    """Nodes not to use."""
    reservation: Plain | None = None
    """Slurm reservation."""
    mail_user: Plain | None = None
    """Address to which Slurm writes when a job ends, fails or is requeued."""
    mail_type: Plain | None = None
    """Slurm events to write about. Default: END,FAIL,REQUEUE."""
    cpu_bind: Plain | None = None
    """How srun binds processes to cores; `no` does not."""
    srun_args: SlurmOptions = Field(default_factory=list)
    """More options of srun, as one string."""
    sbatch_args: SlurmOptions = Field(default_factory=list)
    """More options of sbatch, as one string."""
    chain: int = Field(1, ge=1, le=1000)
    """Jobs to queue in a row; each continues where the previous one stopped."""
    preflight: bool = True
    """Check the nodes before each attempt."""
    signal_seconds: int = Field(180, ge=10, le=65_535)
    """Seconds to save and stop before the job is killed. Default: as measured in this run, else 180."""
    namespace: Namespace = "default"
    """Kubernetes namespace."""
    claims: list[Claim] = Field(default_factory=list)
    """Kubernetes volumes that all pods mount: CLAIM:TARGET[:ro]."""
    queue: Label | None = None
    """Kueue queue, which admits all pods at once."""
    secret_name: Label | None = None
    """Kubernetes Secret that holds the values of --secret under their names."""
    restarts: int = Field(10, ge=0, le=1000)
    """How often Kubernetes may replace all pods."""

    @model_validator(mode="after")
    def _check(self) -> "LaunchSpec":
        for name, value in {"image": self.image or "", **{f"env.{k}": v for k, v in self.env.items()}}.items():
            if re.search(r"[\x00-\x1f\x7f]", value):
                raise rule_error(name.partition(".")[0], f"{name} contains a control character")
        for name, value in self.env.items():
            if (NAMES.search(name) and len(value) >= SHORTEST) or why_secret(name, value):
                raise rule_error("env", f"{name} looks like a secret, and env is written to disk; use --secret {name}")
        if self.image is not None and not re.fullmatch(r"[A-Za-z0-9/][A-Za-z0-9_.+:@#/-]*", self.image):
            raise rule_error("image", f"{self.image[:60]!r} is neither a path nor an image name")
        if self.stage is not None and not (self.image or "").startswith("/"):
            raise rule_error("stage", "only a squash file can be copied to the nodes; set --image to its path")
        if any("\x00" in argument for argument in self.arguments):
            raise rule_error("arguments", "an argument contains a NUL character")
        return self

    @property
    def processes(self) -> int:
        """Processes on each node."""
        return self.processes_per_node or self.gpus_per_node or 1

    @property
    def folder(self) -> Path:
        """The launcher's folder."""
        return LaunchFolder(Path(self.run_folder)).path

    def write(self) -> Path:
        """Write the spec into the run folder, readable only by its owner."""
        path = LaunchFolder(Path(self.run_folder)).spec_file
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self.model_dump_json(indent=1), private=True)
        return path


def make_spec(values: dict[str, Any]) -> LaunchSpec:
    """A validated spec; an error names the field."""
    return validate(LaunchSpec, values)


def read_spec(path: Path) -> LaunchSpec:
    try:
        return make_spec(json.loads(read_text(path)))
    except FileNotFoundError:
        again = "a run of `ingot train` continues with the same command"
        raise ConfigError(f"{path} does not exist: nothing was launched from this folder; {again}") from None
    except (ValueError, OddFile) as error:
        then = f"move it away with `{move_away(path)}`, and launch the run with its command again"
        raise ConfigError(f"{path} is not a launch spec: {error}; {then}") from None
