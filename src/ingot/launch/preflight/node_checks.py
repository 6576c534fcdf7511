"""What a node finds out about itself before a run, without importing torch: one sentence for each check that fails.

Nothing is decided here: whether a finding is the node's fault or everybody's shows only next to the others' reports.
"""

import hashlib
import platform
import re
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ingot.config.data import DatasetConfig
from ingot.config.run import RunConfig
from ingot.data.formats.indexed_reader import IndexFile
from ingot.data.formats.mds_reader import read_index
from ingot.data.loading.open_dataset import locate
from ingot.errors import DataError, IngotError
from ingot.launch.preflight.diagnosis import own_checks
from ingot.launch.profiles import Profile
from ingot.launch.spec import LaunchSpec
from ingot.migrate import load_run_config
from ingot.version import code_hash

FREE_BYTES = 1_000_000_000  # of the run folder, /tmp and shared memory; the trainer knows what a checkpoint takes
LEFTOVER_MB = 512  # of GPU memory: another process uses it
LEFTOVER_SECONDS = 5.0  # a process that was just killed may still be freeing its memory
OPEN_FILES, LOCKED_BYTES = 8192, 1_000_000_000  # what RDMA with many peers takes
STORE_SOCKETS = 5  # of each rank, to the rendezvous in rank 0: its own, and one for each thread that needs answers
OTHER_FILES = 1024  # of any process: libraries, data, logs
GPU_QUERY = "index,ecc.errors.uncorrected.volatile.total,remapped_rows.pending,memory.used"
RDMA = ("efa", "ib")
INFINIBAND = Path("/sys/class/infiniband")  # EFA devices are here too
SHARED_VARIABLES = ("NCCL_", "FI_", "TORCH_")  # what a collective needs to be the same everywhere


@dataclass
class Report:
    """What a node found out about itself."""

    checks: dict[str, str]
    """A sentence for each check that failed."""
    common: dict[str, str]
    """What must be the same on all nodes."""


def check_node(spec: LaunchSpec, profile: Profile, env: Mapping[str, str]) -> Report:
    """All checks of this node."""
    checks: dict[str, Callable[[], str]] = {
        "disk": lambda: _disk(spec),
        "nics": lambda: _nics(profile),
        "limits": lambda: _limits(profile, spec.nodes * spec.processes),
        "gpus": lambda: _gpus(spec.gpus_per_node),
        "nvlink": _nvlink,
        "shm": _shared_memory,
    }
    made = own_checks(spec, profile)
    findings = {name: check() for name, check in checks.items() if name in made}
    if "data" in made:
        try:
            check_data(spec)
        except DataError as error:
            findings["data"] = str(error)
        except IngotError as error:
            findings["config"] = str(error)
    return Report({name: sentence for name, sentence in findings.items() if sentence}, _versions(spec, profile, env))


def _versions(spec: LaunchSpec, profile: Profile, env: Mapping[str, str]) -> dict[str, str]:
    def digest(text: str) -> str:
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    return {
        "ingot's code": code_hash(), "python": platform.python_version(), "torch": metadata.version("torch"),
        "the launch spec": digest(spec.model_dump_json()), "the profile": digest(profile.model_dump_json()),
        **{name: value for name, value in env.items() if name.startswith(SHARED_VARIABLES)},
    }  # fmt: skip


def _gpus(expected: int) -> str:
    if shutil.which("nvidia-smi") is None:
        return f"{expected} GPUs are needed and nvidia-smi is not installed"
    command = ["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader,nounits"]
    end = time.monotonic() + LEFTOVER_SECONDS
    while True:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=15)
        except subprocess.TimeoutExpired:
            return "nvidia-smi does not answer: the driver hangs; reboot the node"
        if done.returncode:
            return f"nvidia-smi fails: {' '.join((done.stdout or done.stderr).split())}"
        found = gpu_problem(done.stdout, expected)
        if "in use" not in found or time.monotonic() > end:
            return found
        time.sleep(0.5)


def gpu_problem(answer: str, expected: int) -> str:
    """What is wrong by nvidia-smi's answer; [N/A] is what a GPU does not support."""
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.strip()]
    if len(rows) < expected:
        return f"{len(rows)} of {expected} GPUs are there"
    for index, uncorrected, pending, used in rows:
        if uncorrected.isdigit() and int(uncorrected):
            return f"GPU {index} has {uncorrected} uncorrected memory errors; reset or replace it"
        if pending == "Yes":
            return f"GPU {index} needs a reset to remap bad memory rows"
        if len(rows) == expected and used.isdigit() and int(used) > LEFTOVER_MB:
            return f"{used} MB of GPU {index} are in use by another process"
    return ""


def _nvlink() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        done = subprocess.run(["nvidia-smi", "nvlink", "--status"], capture_output=True, text=True, timeout=15)
    except subprocess.TimeoutExpired:
        return "nvidia-smi does not answer about NVLink; reboot the node"
    return nvlink_problem(done.stdout)


def nvlink_problem(answer: str) -> str:
    """Links that are down, by nvidia-smi's answer; GPUs without NVLink have none in it."""
    down = [f"GPU {gpu} link {link}" for gpu, links in re.findall(r"^GPU (\d+):.*\n((?:\s+.*\n?)*)", answer, re.M)
            for link in re.findall(r"Link (\d+): <inactive>", links)]  # fmt: skip
    return f"NVLink is down: {', '.join(down[:4])}; reset or replace the GPU" if down else ""


def _nics(profile: Profile) -> str:
    needed = profile.nics or 0
    states = [port.read_text() for port in INFINIBAND.glob("*/ports/1/state")]
    active = sum("ACTIVE" in state for state in states)
    return "" if active >= needed else f"{active} of {needed} network devices are active in {INFINIBAND}"


def _limits(profile: Profile, world: int) -> str:
    files, locked = (resource.getrlimit(r)[0] for r in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    if found := files_problem(files, world, profile.transport in RDMA):
        return found
    if profile.transport in RDMA and locked != resource.RLIM_INFINITY and locked < LOCKED_BYTES:
        return f"a process may lock {locked:,} bytes and RDMA needs {LOCKED_BYTES:,}; set ulimit -l unlimited"
    return ""


def files_problem(limit: int, world: int, is_rdma: bool) -> str:
    """Whether rank 0 runs out of descriptors, since all ranks connect to it."""
    needed = {f"rank 0 of {world:,} ranks": STORE_SOCKETS * world + OTHER_FILES} if world > 1 else {}
    needed |= {"RDMA": OPEN_FILES} if is_rdma else {}
    who = max(needed, key=needed.__getitem__, default="")
    if not who or limit == resource.RLIM_INFINITY or limit >= needed[who]:
        return ""
    return f"a process may open {limit:,} files and {who} needs {needed[who]:,}; raise ulimit -n"


def _shared_memory() -> str:
    try:
        size = shutil.disk_usage("/dev/shm").total  # noqa: S108
    except OSError:
        return "there is no /dev/shm, which NCCL uses between processes"
    needed = f"NCCL needs {FREE_BYTES:,}; give the container more shared memory"
    return "" if size > FREE_BYTES else f"/dev/shm has {size:,} bytes and {needed}"  # noqa: S108


def _disk(spec: LaunchSpec) -> str:
    for folder in (spec.run_folder, tempfile.gettempdir()):
        free = shutil.disk_usage(folder).free
        if free < FREE_BYTES:
            return f"{folder} has {free / 1e9:.2f} GB free and {FREE_BYTES / 1e9:g} GB are needed; free some space"
    return ""


def config_of(spec: LaunchSpec) -> RunConfig:
    """The config of a training run."""
    begin = spec.arguments.index("--") + 1 if "--" in spec.arguments else 0
    dialect = spec.arguments[1] if spec.arguments[:1] == ["--dialect"] else None
    return load_run_config(spec.arguments[begin:], dialect)


def check_data(spec: LaunchSpec) -> None:
    """Read the config and the index of each local dataset; remote ones are not touched."""
    config = config_of(spec)
    for source in (config.sources.train, *config.sources.eval_sources.values()):
        parts: list[DatasetConfig] = [*source.mix.values()] or [source]
        for part in parts:
            if part.remote is None:
                kind, path = locate(Path(part.path), part.split)
                if kind == "mds":
                    read_index(path / "index.json")
                else:
                    IndexFile(path.with_name(path.name + ".idx"))
