"""A real Slurm of several nodes on one machine: munge, slurmctld and one slurmd per node, each node in namespaces of its
own with its own host name, address and processes. Up in about a second; everything ends with the test.

Debian's packages are installed if they are missing and this is root; where that cannot be, tests are skipped with the
reason.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "unshare", "ip")
SMALL_BYTES = 48 << 20
PACKAGES = ("slurm-wlm", "slurm-wlm-basic-plugins", "munge", "iproute2")
NODE = """
hostname "$1"
mount --make-rprivate /
mount --bind "$3/hosts" /etc/hosts
mount --bind "$3/nsswitch" /etc/nsswitch.conf
until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done
ip link set lo up
ip addr add "$2/24" dev eth0
ip link set eth0 up
exec slurmd -D -N "$1"
"""
CONF = """
ClusterName=test
SlurmctldHost=localhost({net}.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
PlugStackConfig={folder}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1,sched_min_interval=100000
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
MessageTimeout=10
KillWait=20
MinJobAge=300
JobRequeue=1
EnforcePartLimits=ALL
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
"""


def missing() -> str:
    """Why there can be no cluster here; empty if there can."""
    if os.geteuid():
        return "a Slurm of several nodes on one machine needs root"
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if absent and shutil.which("apt-get"):
        subprocess.run(["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES],
                       capture_output=True, timeout=300, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"})  # fmt: skip
        absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if absent:
        return f"{', '.join(absent)} are not installed and apt-get could not install {' '.join(PACKAGES)}"
    if subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"], capture_output=True
    ).returncode:
        return "this machine allows no namespaces"
    return ""


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _free_network(first: int) -> int:
    """A network that no bridge has, such as one that a killed test left: 198.18.N.0/24."""
    shown = subprocess.run(
        ["ip", "-o", "-4", "addr"], capture_output=True, text=True, env=os.environ | {"PATH": _path()}
    )
    return next(n for n in (20 + (first + i) % 200 for i in range(200)) if f" 198.18.{n}.1/" not in shown.stdout)


class Cluster:
    """Nodes n1 to nN, in the partition `main`."""

    def __init__(self, folder: Path, nodes: int, number: int = 0, more: str = ""):
        """number: tells clusters of one process apart; more: lines of slurm.conf."""
        self.folder, self.nodes, self.more = folder, nodes, more
        self.key = os.getpid() + 7919 * number
        self.number = _free_network(self.key % 200)
        self.bridge, self.net = f"ig{self.key % 100000}", f"198.18.{self.number}"
        defaults = str(Path(__file__).parent / "defaults.yaml")
        self.env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path(),
                                 "INGOT_LAUNCH_DEFAULTS": defaults}  # fmt: skip
        self.processes: dict[str, subprocess.Popen] = {}
        self.small = folder / "small"
        """A disk that all nodes share, of a few megabytes."""

    def start(self) -> None:
        folder = self.folder
        for name in ("state", "spool", "small"):
            (folder / name).mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL_BYTES}", "none", str(self.small)], check=True)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        self._ip("link", "add", self.bridge, "type", "bridge")
        self._ip("addr", "add", f"{self.net}.1/24", "dev", self.bridge)
        self._ip("link", "set", self.bridge, "up")
        names = [f"{self.net}.{10 + i} n{i}" for i in range(1, self.nodes + 1)]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "\n".join(names) + "\n")
        switch = Path("/etc/nsswitch.conf").read_text() if Path("/etc/nsswitch.conf").exists() else ""
        lines = ["hosts: files" if line.startswith("hosts:") else line for line in switch.splitlines()]
        (folder / "nsswitch").write_text("\n".join(lines) + "\n")
        (folder / "plugstack.conf").touch()
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        port = 20000 + (self.key * 13) % 10000
        conf = CONF.format(net=self.net, port=port, folder=folder)
        conf += "NodeName=DEFAULT CPUs=4 RealMemory=4000 State=UNKNOWN\n"
        for i in range(1, self.nodes + 1):
            conf += f"NodeName=n{i} NodeHostname=n{i} NodeAddr={self.net}.{10 + i} Port={port + i}\n"
        conf += f"PartitionName=main Nodes=n[1-{self.nodes}] Default=YES MaxTime=INFINITE State=UP\n"
        (folder / "slurm.conf").write_text(conf + self.more)
        self._run("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.sock",
                  f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/munge.seed", f"--log-file={folder}/munge.log")  # fmt: skip
        wait_until(lambda: (folder / "munge.sock").exists(), "munge")
        self.start_controller()
        for i in range(1, self.nodes + 1):
            self.start_node(f"n{i}")
        idle = ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"]
        wait_until(lambda: len(set(self.ask(*idle).split())) == self.nodes, "idle nodes")

    def start_controller(self) -> None:
        self._run("slurmctld", "-D")
        wait_until(lambda: "is UP" in self.ask("scontrol", "ping"), "slurmctld")

    def stop_controller(self) -> None:
        """As its administrator stops it: killed, it would forget the jobs of its last seconds."""
        self.processes["slurmctld"].terminate()
        with suppress(subprocess.TimeoutExpired):
            self.processes["slurmctld"].wait(10)
        self._end("slurmctld")

    def start_node(self, name: str) -> None:
        number = int(name[1:])
        (self.folder / "spool" / name).mkdir(exist_ok=True)
        self._run("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL", "bash",
                  "-c", NODE, "node", name, f"{self.net}.{10 + number}", str(self.folder), label=name)  # fmt: skip
        parent = self.processes[name].pid
        own = os.readlink("/proc/self/ns/net")

        def child() -> str:
            found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
            return next((p for p in found if os.readlink(f"/proc/{p}/ns/net") != own), "")

        wait_until(child, f"the namespace of {name}")
        link = f"{self.bridge}.{number}"
        subprocess.run(["ip", "link", "del", link], capture_output=True, env=self.env)
        self._ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", child())
        self._ip("link", "set", link, "master", self.bridge, "up")

    def on(self, name: str, *command: str) -> None:
        """Run a command as it would run on the node: what it mounts or binds is that node's alone."""
        parent = self.processes[name].pid
        (pid,) = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        spaces = ("--mount", "--net", "--uts", "--pid")
        subprocess.run(["nsenter", f"--target={pid}", *spaces, *command], check=True, capture_output=True, env=self.env)

    def kill_node(self, name: str) -> None:
        """The node dies, with everything that runs on it."""
        self._end(name)

    def reboot_node(self, name: str) -> None:
        """It dies and is back before Slurm notices."""
        self.kill_node(name)
        time.sleep(2)
        self.start_node(name)

    def restore(self) -> None:
        """All nodes up, idle, and without what a test has mounted or cut."""
        self.ask("scancel", "--full", "--signal=KILL", "--user=root")
        for i in range(1, self.nodes + 1):
            if f"n{i}" in self.processes:
                self._end(f"n{i}")
        for i in range(1, self.nodes + 1):
            self.start_node(f"n{i}")
            self.ask("scontrol", "update", f"NodeName=n{i}", "State=RESUME")
        idle = ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"]
        wait_until(lambda: len(set(self.ask(*idle).split())) == self.nodes, "idle nodes")

    def stop(self) -> None:
        for name in list(self.processes):
            self._end(name)
        subprocess.run(["umount", "--lazy", str(self.small)], capture_output=True)
        shown = subprocess.run(
            ["ip", "-o", "link", "show", "master", self.bridge], capture_output=True, text=True, env=self.env
        )
        for line in shown.stdout.splitlines():
            subprocess.run(
                ["ip", "link", "del", line.split(": ")[1].partition("@")[0]], capture_output=True, env=self.env
            )
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True, env=self.env)

    def ask(self, *command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, env=self.env).stdout

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, env=self.env)

    def _run(self, *command: str, label: str | None = None) -> None:
        log = (self.folder / f"{label or command[0]}.out").open("ab")
        self.processes[label or command[0]] = subprocess.Popen(
            command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_end_with_parent,
            start_new_session=True,
        )  # fmt: skip
        log.close()

    def _end(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


RUNNING: list[Cluster] = []


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    if why := missing():
        pytest.skip(why)
    if RUNNING:  # each file that names the fixture has one of its own; the first one's cluster serves all
        yield RUNNING[0]
        return
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), 3)
    try:
        cluster.start()
        RUNNING.append(cluster)
        yield cluster
    finally:
        cluster.stop()
