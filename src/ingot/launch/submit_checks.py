"""What cannot work is refused before anything is queued, with `--dry-run` too."""

import os
import re
import shutil
from pathlib import Path

from ingot.config.run import RunConfig
from ingot.data.loading.open_dataset import check_local, locate
from ingot.errors import ConfigError
from ingot.launch.agent.environment import read_secret
from ingot.launch.measured_times import START_UP_SECONDS, STEP_SECONDS, MeasuredTimes, read_times
from ingot.launch.protocol import LaunchFolder
from ingot.launch.register import refuse_state_of_another
from ingot.launch.spec import LaunchSpec

# Those of a disk or memory of one machine. One that is not listed may be shared.
LOCAL_FILE_SYSTEMS = ("bcachefs", "btrfs", "devtmpfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay",
                      "ramfs", "reiserfs", "rootfs", "squashfs", "tmpfs", "vfat", "xfs", "zfs")  # fmt: skip
# those of each machine, whatever is mounted there
LOCAL_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108
MOUNTS, EXPORTS = Path("/proc/self/mountinfo"), Path("/var/lib/nfs/etab")


def check_submission(spec: LaunchSpec) -> list[str]:
    """Refuse a job of Slurm that cannot work; returns notes for the user."""
    run, has_slurm = Path(spec.run_folder), shutil.which("sbatch") is not None
    times = read_times(run)  # refuses a damaged state file
    refuse_state_of_another(LaunchFolder(run))
    check_spares(spec)
    check_time_limit(spec, times)
    return [*check_folder(spec, has_slurm), *check_secrets(spec, has_slurm)]


def check_data(config: RunConfig, spec: LaunchSpec, is_here: bool) -> list[str]:
    """Data that is not there is refused where this machine must see it: for a run on it, and below the folder where the
    command was given. Elsewhere the nodes may see more than this machine does, so that is a note."""
    sources = (config.sources.train, *config.sources.eval_sources.values())
    if is_here:
        for source in sources:
            check_local(source, config.model.vocab_size)
        return []
    notes: dict[str, None] = {}
    for part in [part for source in sources for part in (source.mix.values() or [source]) if part.remote is None]:
        path = Path(spec.workdir) / part.path
        if path.is_relative_to(spec.workdir) and spec.workdir != "/":
            locate(path, part.split)
        elif (seen := _on_this_machine(path, spec)) is not None and not _is_data(seen):
            where = f"{path} ({seen} here)" if seen != path else str(path)
            notes[f"warning: {where} does not exist on this machine; each node must see this data"] = None
    return list(notes)


def _on_this_machine(path: Path, spec: LaunchSpec) -> Path | None:
    """Where a path on the nodes is here; None if it is on a volume of Kubernetes, which this machine does not see."""
    if any(path.is_relative_to(claim.split(":")[1]) for claim in spec.claims):
        return None
    for source, target, *_ in (mount.split(":") for mount in spec.mounts if spec.image):
        if path.is_relative_to(target):
            return Path(source) / path.relative_to(target)
    return path


def _is_data(path: Path) -> bool:
    return path.exists() or Path(f"{path}.idx").exists()


def check_spares(spec: LaunchSpec) -> None:
    if spec.spares > spec.nodes:
        raise ConfigError(f"--spares {spec.spares} is more than --nodes {spec.nodes}: a spare waits to replace one "
                          f"node; use at most --spares {spec.nodes}")  # fmt: skip


def check_time_limit(spec: LaunchSpec, times: MeasuredTimes) -> None:
    """A job must get as far as one step, and save it before the time limit."""
    limit = seconds_of(spec.time)
    if not limit:
        return
    start_up, step = times.start_up or START_UP_SECONDS, times.step or STEP_SECONDS
    parts = [(start_up, "to start", times.start_up), (step, "for a step", times.step)]
    if spec.verb == "prepare":
        parts = [(START_UP_SECONDS, "to start", 0.0)]
    needed = sum(seconds for seconds, _, _ in parts) + spec.signal_seconds
    if limit < needed:
        said = [f"{seconds:.0f} s {what} ({'measured' if of else 'assumed'})" for seconds, what, of in parts]
        said += [f"{spec.signal_seconds} s to save (--signal-seconds)"]
        raise ConfigError(f"--time {spec.time} ({limit} s) is too short: {', '.join(said)} are {needed:.0f} s; such a "
                          "job would end before it has saved anything")  # fmt: skip
    if times.save and spec.signal_seconds < times.save + step and spec.verb == "train":
        raise ConfigError(f"--signal-seconds {spec.signal_seconds} is too short: a step took up to {step:.0f} s and a "
                          f"save {times.save:.0f} s; leave it out or use {times.signal_seconds}")  # fmt: skip


def check_secrets(spec: LaunchSpec, has_slurm: bool) -> list[str]:
    """A job finds secrets in the environment that it is submitted with, or in the home folder. A machine that cannot
    submit may lack them, so there it is only a note."""
    try:
        for name in spec.secrets:
            read_secret(name)
    except ConfigError as error:
        if has_slurm:
            raise
        return [f"{error}; the machine that submits the job needs it"]
    return []


def check_folder(spec: LaunchSpec, has_slurm: bool) -> list[str]:
    """The run folder must be on a disk that the nodes share. A machine that cannot submit has other mounts, so there it
    is only a note."""
    kind = local_file_system(Path(spec.run_folder))
    if not kind or spec.local_folder or LaunchFolder(Path(spec.run_folder)).jobs():  # it has worked before
        return []
    where = f"the run folder {spec.run_folder} is on a disk of this machine ({kind})"
    if not has_slurm:
        return [f"{where}; on the cluster it must be on one that all nodes share"]
    raise ConfigError(f"{where}, which the nodes do not see; choose a save_folder on a shared file system, or add "
                      "--local-folder if they do see it")  # fmt: skip


def local_file_system(path: Path) -> str:
    """The kind of the file system if it is one of this machine alone, else nothing. A local disk that this machine
    exports to others is shared."""
    real = Path(os.path.realpath(path))
    mount, kind = _mount_of(real)
    if any(real.is_relative_to(folder) for folder in LOCAL_FOLDERS) and kind:
        return kind
    return kind if kind in LOCAL_FILE_SYSTEMS and not _is_exported(real, mount) else ""


def _mount_of(path: Path) -> tuple[Path, str]:
    """The mount point that a path is under, and its file system; the later of two mounts on one point counts."""
    found = (Path("/"), "")
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return found
    for line in lines:
        fields, _, rest = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields.split()[4])
        if path.is_relative_to(point) and len(Path(point).parts) >= len(found[0].parts):
            found = Path(point), rest.split()[0]
    return found


def _is_exported(path: Path, mount: Path) -> bool:
    """Whether this machine is itself the NFS server of a folder: the head node of many small clusters."""
    try:
        lines = EXPORTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    exported = [Path(line.split()[0]) for line in lines if line.startswith("/")]
    return any(path.is_relative_to(folder) and folder.is_relative_to(mount) for folder in exported)


def seconds_of(limit: str) -> int:
    """Slurm's MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS or DAYS-HOURS[:MINUTES[:SECONDS]]; 0 means that there is
    no limit."""
    if limit.lower() in ("unlimited", "infinite"):
        return 0
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
