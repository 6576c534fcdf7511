"""A job on Slurm, as its supervisor sees it: nodes, agents, time, the way back into the queue.

Each srun starts the agents of a few nodes, of one in a job of up to 32, and ends with them: it does not end a step
because one of its tasks has failed. A node that is back from a reboot without the step, though, makes srun end the step
on all its nodes, and the copies in the memory of their agents are gone: hence a step for each group of neighbors.
Of a task that ends, srun says so; that is faster than waiting for an agent that never was. Only where it does not reach
a node to begin with, it ends the tasks of its others: those that it reaches are started again.
"""

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from ingot.launch.image import expected_sum
from ingot.launch.messages import ADDRESS_VARIABLE
from ingot.launch.protocol import CLUSTER_AGENT, LaunchFolder
from ingot.launch.slurm.script import node_python, script_body, srun_options
from ingot.launch.spec import LaunchSpec
from ingot.launch.supervisor.cluster import AgentEnded, LostNode, say
from ingot.launch.supervisor.records import StopReason

MAX_SRUNS = 32  # at a time, for all nodes
ANSWER_SECONDS = 20.0  # for a command of Slurm
PING_SECONDS, PING_PAUSES = 3.0, (0.5, 1.0, 0.0)  # a slower failure counts at once; pauses between pings
STAGE_SECONDS = 3600.0
END_SECONDS = 5.0  # for srun, once its agents have been told to leave
STEPS_END_SECONDS = 30.0  # for what an earlier supervisor has started and not ended
TASK_ENDED = re.compile(r"srun: error: (\S+): tasks? [\d,-]+: (.+)")
NOT_LAUNCHED = re.compile(r"srun: error: Task launch for \S+ failed on node (\S+): (.+)")
MISSING_STEP = re.compile(r"srun: error: Aborting, .*missing step on node (\d+)")
NODE_TIMES = re.compile(r"^NodeName=(\S+) .*\bBootTime=(\d+) SlurmdStartTime=(\d+)", re.MULTILINE)
MAX_COMMENT = 1000
DEPUTY = "ingot.launch.slurm.deputy"
LOST_STATES = ("down", "fail", "error", "future")
UNHEARD_STATE = "unknown"  # what a controller that has just started says of every node
DRAINED_STATES = ("drain", "maint", "reboot")


class SlurmCluster:
    """The allocation that this process runs in."""

    def __init__(self, spec: LaunchSpec, env: Mapping[str, str] = os.environ, keeps_output: bool = True):
        """keeps_output: what agents print goes to files of the launch folder; otherwise this process prints it"""
        self.spec, self.env, self.keeps_output = spec, dict(env), keeps_output
        self.job = env["SLURM_JOB_ID"]
        array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
        self.element = f"{array}_{task}" if array and task else self.job
        """What to call it when talking to Slurm: the last element of an array has the number of the whole array."""
        self.restart = int(env.get("SLURM_RESTART_COUNT", "0"))
        self.host = env.get("SLURMD_NODENAME") or socket.gethostname()
        self.ended: asyncio.Queue[AgentEnded] = asyncio.Queue()
        self.launch = LaunchFolder(Path(spec.run_folder))
        self._image: list[str] = []
        self._sruns: list[asyncio.subprocess.Process] = []
        self._srun_of: dict[str, asyncio.subprocess.Process] = {}
        """The last one that has started the agent of a node."""
        self._deputy: asyncio.subprocess.Process | None = None
        self._is_queued_again = False
        """By Slurm itself, which ends this start of the job."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def nodes(self) -> list[str]:
        return await self._host_names(self.env["SLURM_JOB_NODELIST"])

    async def stage(self) -> dict[str, str]:
        assert self.spec.stage is not None and self.spec.image is not None
        digest = expected_sum(Path(self.spec.image))
        script = script_body("stage_image.sh") + (
            'said=$(stage_image "$1" "$2" "$3" 2>&1) && echo "staged $SLURMD_NODENAME"'
            ' || echo "failed $SLURMD_NODENAME ${said:-with another checksum}"'
        )
        nodes = await self.nodes()
        command = ["srun", f"--nodes={len(nodes)}", "--ntasks-per-node=1", "--overlap", "--no-kill",
                   "--kill-on-bad-exit=0", "bash", "-c", script, "stage", self.spec.image, self.spec.stage,
                   digest]  # fmt: skip
        _, said = await self._ask(*command, seconds=STAGE_SECONDS)
        self._image = [f"--container-image={self.spec.stage}/{digest}.sqsh"]
        staged = set(re.findall(r"^staged (\S+)$", said, re.MULTILINE))
        failed = dict(re.findall(r"^failed (\S+) (.*)$", said, re.MULTILINE))
        return {node: failed.get(node, "the node did not answer") for node in nodes if node not in staged}

    async def start_agents(self, nodes: Sequence[str], env: Mapping[str, str]) -> None:
        await self._end_replaced(nodes)
        size = -(-len(nodes) // MAX_SRUNS)
        for first in range(0, len(nodes), size):
            await self._start_srun(nodes[first : first + size], env)
        await self.start_deputy(nodes, env[ADDRESS_VARIABLE])

    async def _end_replaced(self, nodes: Sequence[str]) -> None:
        """Two agents on a node would take the place of each other for ever; and what an earlier one ended with says
        nothing of the next."""
        said = [self.ended.get_nowait() for _ in range(self.ended.qsize())]
        for item in said:
            if item.node not in nodes:
                self.ended.put_nowait(item)
        earlier = {self._srun_of.pop(node) for node in nodes if node in self._srun_of}
        await _end([process for process in earlier if process not in self._srun_of.values()], grace=0)

    async def _start_srun(self, nodes: Sequence[str], env: Mapping[str, str]) -> None:
        command = ["srun", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1",
                   f"--nodelist={','.join(nodes)}", "--overlap", "--no-kill", "--kill-on-bad-exit=0", "--wait=0",
                   *self._output_options(), *srun_options(self.spec), *self._image,
                   node_python(self.spec), "-m", CLUSTER_AGENT, "--spec", str(self.launch.spec_file)]  # fmt: skip
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE, env={**self.env, **env}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            for node in nodes:
                self.ended.put_nowait(AgentEnded(node, f"cannot start srun: {error.strerror or error}"))
            return
        self._sruns.append(process)
        self._srun_of.update(dict.fromkeys(nodes, process))
        task = asyncio.ensure_future(self._listen(process, list(nodes), env))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _output_options(self) -> list[str]:
        if not self.keeps_output:
            return []
        with contextlib.suppress(OSError):  # a full disk: srun says so
            self.launch.output.mkdir(parents=True, exist_ok=True)
        output = self.launch.output / f"{self.job}.{self.restart}.{len(self._sruns)}.%n.out"
        return ["--open-mode=append", f"--output={output}"]

    async def start_deputy(self, nodes: Sequence[str], address: str) -> None:
        """On another node than this one; where that node dies, the next agents bring a new one."""
        elsewhere = [node for node in nodes if node != self.host]
        running = self._deputy is not None and self._deputy.returncode is None
        if not self.spec.spares or not elsewhere or running:  # without spares, Slurm itself requeues the job
            return
        command = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={elsewhere[-1]}", "--overlap", "--no-kill",
                   "--wait=0", "--cpu-bind=none", sys.executable, "-m", DEPUTY, self.element, address]  # fmt: skip
        with contextlib.suppress(OSError):
            self._deputy = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL, env=self.env, start_new_session=True,
            )  # fmt: skip

    async def _listen(self, process: asyncio.subprocess.Process, nodes: list[str], env: Mapping[str, str]) -> None:
        """What srun says of its tasks, to the end."""
        assert process.stderr is not None
        last, unreached = "", dict[str, str]()
        while raw := await process.stderr.readline():
            line = raw.decode(errors="replace").strip()
            say(line)
            last = line if "error" in line else last
            if found := NOT_LAUNCHED.match(line):
                unreached[found[1]] = found[2]
                self._note_end(process, found[1], f"srun cannot start it: {found[2]}")
            elif found := MISSING_STEP.match(line):
                order = {node: number for number, node in enumerate(await self.nodes())}
                restarted = sorted(nodes, key=lambda node: order.get(node, -1))[int(found[1])]
                for node in nodes:
                    self._note_end(process, node, line, restarted)
            elif not unreached and (found := TASK_ENDED.match(line)):
                for node in await self._host_names(found[1]):
                    self._note_end(process, node, found[2])
        code = await process.wait()
        if unreached and (others := [node for node in nodes if node not in unreached]):
            await self.start_agents(others, env)
            return
        for node in nodes:
            self._note_end(process, node, last or f"srun ended with exit code {code}")

    def _note_end(self, process: asyncio.subprocess.Process, node: str, reason: str, ended_for: str = "") -> None:
        if self._srun_of.get(node) is process:  # otherwise another one has started an agent there since
            self.ended.put_nowait(AgentEnded(node, reason, ended_for))

    async def end_agents(self) -> None:
        if self._deputy is not None and self._deputy.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._deputy.terminate()
            self._sruns.append(self._deputy)
        await _end(self._sruns)

    async def abandon_steps(self) -> None:
        """srun's own end, and that of its watching child, would end the step of that number: another supervisor's."""
        for process in (*self._sruns, *([self._deputy] if self._deputy is not None else [])):
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    async def end_earlier_steps(self) -> None:
        end = asyncio.get_running_loop().time() + STEPS_END_SECONDS
        while asyncio.get_running_loop().time() < end:
            _, said = await self._ask("squeue", "--steps", "--noheader", f"--jobs={self.element}", "--format=%i")
            steps = re.findall(r"^\s*(\S+\.\d+)\s*$", said, re.MULTILINE)  # neither the script nor `extern`
            if not steps:
                return
            await self._ask("scancel", "--signal=KILL", *steps)
            await asyncio.sleep(0.2)

    async def lost_nodes(self, nodes: Sequence[str]) -> list[LostNode]:
        if not nodes:
            return []
        code, said = await self._ask("sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N|%T|%E")
        found: dict[str, LostNode] = {}
        for line in said.splitlines() if code == 0 else []:
            node, _, rest = line.strip().partition("|")
            state, _, reason = rest.partition("|")
            why = state if reason in ("", "none") else f"{state}: {reason}"
            if state.startswith(DRAINED_STATES):
                found[node] = LostNode(node, why, is_drained=True)
            elif state.startswith(UNHEARD_STATE):
                continue
            elif state.startswith(LOST_STATES) or state.endswith("*"):
                found[node] = LostNode(node, why)
        return list(found.values())

    async def restarted_nodes(self, nodes: Sequence[str], since: str) -> dict[str, str]:
        ask = ("env", "SLURM_TIME_FORMAT=%s", "scontrol", "--oneliner", "show", "node", ",".join(nodes))
        code, said = await self._ask(*ask)
        begin = datetime.fromisoformat(since).timestamp()
        found: dict[str, str] = {}
        for node, boot, slurmd in NODE_TIMES.findall(said) if code == 0 else []:
            for what, time in (("it was booted", int(boot)), ("its slurmd was started", int(slurmd))):
                if time > begin:
                    found.setdefault(node, f"{what} at {datetime.fromtimestamp(time):%H:%M:%S}")
        return found

    async def is_answering(self) -> bool:
        for wait in PING_PAUSES:  # a ping that fails at once proves little: Slurm may have signalled it
            begin = asyncio.get_running_loop().time()
            code, said = await self._ask("scontrol", "ping")
            if code == 0 and " UP" in said:
                return True
            if asyncio.get_running_loop().time() - begin > PING_SECONDS:
                break
            await asyncio.sleep(wait)
        say(f"scontrol ping: exit code {code}, {said.strip()[:200] or 'nothing said'}")
        return False

    async def ended_for(self, nodes: Sequence[str]) -> list[LostNode]:
        """Without spares (and `--no-kill`), Slurm ends a job that has lost a node, and queues it again at once."""
        _, said = await self._ask("scontrol", "--oneliner", "show", "job", self.element)
        restarts = max(map(int, re.findall(r"\bRestarts=(\d+)", said)), default=0)
        lost = [item for item in await self.lost_nodes(nodes) if not item.is_drained] if restarts > self.restart else []
        self._is_queued_again = bool(lost)
        return lost

    async def signal_reason(self) -> StopReason:
        _, said = await self._ask("scontrol", "show", "job", self.job)
        if re.search(r"\bPreemptTime=\d", said):
            return "preempt"
        return "time-limit" if re.search(r"\bReason=TimeLimit\b", said) else "signal"

    async def requeue(self, exclude: Sequence[str]) -> bool:
        """Slurm ends this process as soon as the job is in the queue again, with a signal that is not for the run."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        code, said = (0, "") if self._is_queued_again else await self._ask("scontrol", "requeue", self.element)
        if code:
            say(f"scontrol requeue: {said}")
            return False
        await self._exclude(self.element, exclude)
        return True

    async def hand_over(self, exclude: Sequence[str]) -> bool:
        task, last = self.env.get("SLURM_ARRAY_TASK_ID"), self.env.get("SLURM_ARRAY_TASK_MAX")
        if self.spec.verb != "train" or task == last or self._is_queued_again:
            return False
        assert task is not None
        await self._exclude(f"{self.env['SLURM_ARRAY_JOB_ID']}_[{int(task) + 1}-{last}]", exclude)
        return True

    async def _exclude(self, job: str, nodes: Sequence[str]) -> None:
        """Of a job in the queue."""
        if not nodes:
            return
        names = ",".join(dict.fromkeys([*self.spec.exclude, *nodes]))
        code, said = await self._ask("scontrol", "update", f"JobId={job}", f"ExcNodeList={names}")
        if code:
            say(f"scontrol update ExcNodeList: {said}")
        if self.spec.spares:
            await self._ask_for_fewer_spares(job, {*self.spec.exclude, *nodes})

    async def _ask_for_fewer_spares(self, job: str, out: set[str]) -> None:
        """If so many nodes are out that the job would wait in the queue for a spare. (Of a range, Slurm takes the lower
        end, though more nodes are free.)"""
        partition = [f"--partition={name}"] if (name := self.env.get("SLURM_JOB_PARTITION")) else []
        code, said = await self._ask("sinfo", "--noheader", "--Node", *partition, "--format=%N|%T")
        found = dict(line.strip().split("|", 1) for line in said.splitlines() if "|" in line) if code == 0 else {}
        left = [node for node, state in found.items() if node not in out and not _is_unusable(state)]
        count = len(left)
        if not self.spec.nodes <= count < self.spec.nodes + self.spec.spares:
            return
        size = [f"NumNodes={count}", f"NumTasks={count}", f"NumCPUs={count * (self.spec.cpus_per_task or 1)}"]
        code, said = await self._ask("scontrol", "update", f"JobId={job}", *size)
        say(f"scontrol update {size[0]}: {said}" if code else f"{count} nodes are left: the job asks for no more")

    async def comment(self, text: str) -> None:
        words = " ".join(text.split())[:MAX_COMMENT]
        await self._ask("scontrol", "update", f"JobId={self.element}", f"Comment={words}")

    async def _host_names(self, names: str) -> list[str]:
        if "[" not in names:
            return names.split(",")
        return (await self._ask("scontrol", "show", "hostnames", names))[1].split()

    async def _ask(self, *command: str, seconds: float = ANSWER_SECONDS, again: bool = True) -> tuple[int, str]:
        """Exit code and output of a command; no exit code is 0 unless it answered in time."""
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT, env=self.env,
            )  # fmt: skip
        except OSError as error:
            return 127, f"{command[0]}: {error.strerror or error}"
        try:
            async with asyncio.timeout(seconds):
                said, _ = await process.communicate()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            return 124, f"{command[0]} did not answer within {seconds:g} s"
        if process.returncode == -signal.SIGTERM and again:  # Slurm signals all processes of the script
            return await self._ask(*command, seconds=seconds, again=False)
        return process.returncode or 0, said.decode(errors="replace")


def _is_unusable(state: str) -> bool:
    return state.startswith((*LOST_STATES, *DRAINED_STATES)) or state.endswith("*")


async def _end(sruns: Sequence[asyncio.subprocess.Process], grace: float = END_SECONDS) -> None:
    """With their steps."""
    running = [process for process in sruns if process.returncode is None]
    for wait, number in ((grace, signal.SIGTERM), (END_SECONDS, signal.SIGKILL), (1.0, None)):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await asyncio.gather(*(process.wait() for process in running))
                return
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                if number is not None:
                    process.send_signal(number)
