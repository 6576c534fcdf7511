"""Processes that start with torch imported, for tests that run many of them.

A fresh interpreter spends 1.2 to 2.5 s of CPU time importing torch, several times what a small run needs. Here a server,
one per test worker, imports torch and ingot once and forks each process that a test asks for: `WarmProcess` is a
`subprocess.Popen` with its own process id, arguments, working directory, environment and standard streams, which ends
like any other interpreter. Only the imports were done earlier. What a test says about start-up itself (what is imported
when, how fast, Ctrl-C meanwhile) needs a fresh interpreter, and so does an environment that is read by those imports.
"""

import atexit
import contextlib
import fcntl
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRELOADED = """ingot.cli.train ingot.training.trainer ingot.cli.eval ingot.cli.generate ingot.cli.export
ingot.parallel.executors.distributed ingot.migrate.checkpoints.import_checkpoint"""
READ_BY_IMPORTS = ("PYTHON", "LD_", "LANG", "LC_", "OMP_", "MKL_", "OPENBLAS_", "MALLOC_", "TORCH_", "TRITON", "NCCL",
                   "GLOO", "HF_", "HOME", "FORCE_COLOR", "PY_COLORS", "TERMINAL_WIDTH", "TYPER", "_TYPER")  # fmt: skip
MESSAGE_BYTES = 1 << 18


class WarmProcess(subprocess.Popen[Any]):
    """`subprocess.Popen` of `[sys.executable, "-m" or "-c", ...]`, forked from a process that has torch."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
                       startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int,
                       c2pwrite: int, errread: int, errwrite: int, restore_signals: Any, gid: Any, gids: Any, uid: Any,
                       umask: Any, start_new_session: bool, *others: Any) -> None:  # fmt: skip
        env = dict(os.environ if env is None else env)
        words = [str(word) for word in args]
        is_plain = preexec_fn is None and not pass_fds and (gid, uid, umask) == (None, None, -1)
        if not is_plain or not can_be_warm(words, env):
            super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, p2cread,
                p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask, start_new_session,
                *others,
            )  # fmt: skip
            return
        job = {"words": words[1:], "cwd": os.fspath(cwd or os.getcwd()), "env": env, "session": start_new_session}
        given = [child if child >= 0 else number for number, child in enumerate((p2cread, c2pwrite, errwrite))]
        self.warm, self.pid = server().start(job, given)
        self._child_created = True
        for theirs, ours in ((p2cread, p2cwrite), (c2pwrite, c2pread), (errwrite, errread)):
            if theirs != -1 and ours != -1:
                os.close(theirs)
        if (devnull := getattr(self, "_devnull", None)) is not None:
            os.close(devnull)

    warm: "Server | None" = None

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self.warm is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc,no-any-return]
        return self.warm.wait(self.pid, block=not wait_flags & os.WNOHANG)

    def _internal_poll(self, *args: Any, **options: Any) -> int | None:
        if self.warm is None:
            return super()._internal_poll(*args, **options)  # type: ignore[misc,no-any-return]
        if self.returncode is None:
            pid, status = self.warm.wait(self.pid, block=False)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def can_be_warm(words: list[str], env: dict[str, str]) -> bool:
    """Whether a process that is forked from this one's server is what these words start in that environment."""
    return (
        words[0] == sys.executable
        and words[1] in ("-m", "-c")
        and _read_by_imports(env) == _read_by_imports(os.environ)
    )


def _read_by_imports(env: Any) -> dict[str, str]:
    return {k: v for k, v in env.items() if k.startswith(READ_BY_IMPORTS)}


class Server:
    """The process that forks, and the socket to it."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )
        self.owner = os.getpid()
        self.watched: dict[int, int] = {}

    def start(self, job: dict[str, Any], streams: list[int]) -> tuple["Server", int]:
        socket.send_fds(self.socket, [json.dumps({"start": job}).encode()], streams)
        pid = json.loads(self.socket.recv(MESSAGE_BYTES))
        self.watched[pid] = os.pidfd_open(pid)
        return self, pid

    def wait(self, pid: int, block: bool) -> tuple[int, int]:
        """Like `os.waitpid`: the process's parent is the server."""
        poll = select.poll()
        poll.register(self.watched[pid], select.POLLIN)
        if not poll.poll(None if block else 0):
            return 0, 0
        self.socket.send(json.dumps({"reap": pid}).encode())
        status = json.loads(self.socket.recv(MESSAGE_BYTES))
        os.close(self.watched.pop(pid))
        return pid, status

    def close(self) -> None:
        self.socket.close()
        self.process.wait()


_servers: list[Server] = []


def server() -> Server:
    if not _servers or _servers[0].owner != os.getpid():
        _servers[:] = [Server()]
    return _servers[0]


def close_server() -> None:
    while _servers:
        _servers.pop().close()


def run_warm(*arguments: Any, input: str | None = None, capture_output: bool = False, timeout: float | None = None,
             check: bool = False, **options: Any) -> subprocess.CompletedProcess[Any]:  # fmt: skip
    """`subprocess.run` of a `WarmProcess`."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options["stdout"] = options["stderr"] = subprocess.PIPE
    with WarmProcess(*arguments, **options) as process:
        try:
            out, errors = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, errors)
    if check:
        done.check_returncode()
    return done


def spawn_warm(function: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    """`torch.multiprocessing.spawn` of a function of a module, whose arguments JSON can express, in warm processes."""
    code = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {function.__module__} import {function.__name__} as f; "
    code += "f(*json.loads(sys.argv[2]))"
    paths = json.dumps(sys.path)
    ranks = [WarmProcess([sys.executable, "-c", code, paths, json.dumps([rank, *args])]) for rank in range(nprocs)]
    try:
        living = list(ranks)
        while living:
            time.sleep(0.01)
            for rank in [rank for rank in living if rank.poll() is not None]:
                living.remove(rank)
                assert rank.returncode == 0, f"process {ranks.index(rank)} ended with {rank.returncode}"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


class Forker:
    """The server's side. `serve` returns in forked children only, with what each is to run."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(_address(os.getpid()))
        self.listener.listen()
        self.clients: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of a process: it, who waits for it

    def serve(self) -> dict[str, Any]:
        while True:
            for ready in select.select([self.connection, self.listener, *self.clients], [], [])[0]:
                if ready is self.listener:
                    client, _ = self.listener.accept()
                    job = self._answer(client)
                elif ready is self.connection:
                    job = self._answer(self.connection)
                else:
                    pid, client = self.clients.pop(ready)
                    with client, contextlib.suppress(OSError):  # unless it has gone
                        client.send(json.dumps(os.waitpid(pid, 0)[1]).encode())
                    os.close(ready)
                    continue
                if job is not None:
                    return job

    def _answer(self, connection: socket.socket) -> dict[str, Any] | None:
        message, streams, *_ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
        if not message:
            if connection is self.connection:
                os._exit(0)
            connection.close()
            return None
        request = json.loads(message)
        if "reap" in request:
            connection.send(json.dumps(os.waitpid(request["reap"], 0)[1]).encode())
            return None
        job = request.get("start") or request["run"]
        pid = 0
        if "start" in request or _read_by_imports(job["env"]) == _read_by_imports(os.environ):
            pid = os.fork()
            if pid == 0:
                for mine in (
                    self.connection,
                    self.listener,
                    connection,
                    *(client for _, client in self.clients.values()),
                ):
                    mine.close()
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                    os.close(stream)
                return dict(job)
        connection.send(json.dumps(pid).encode())
        for stream in streams:
            os.close(stream)
        if pid and "run" in request:
            self.clients[os.pidfd_open(pid)] = pid, connection
        elif "run" in request:
            connection.close()
        return None


def _address(pid: int) -> str:
    return f"\0ingot-tests-{pid}"


def warm_shell() -> dict[str, str]:
    """Environment variables with which `ingot` in a shell is a warm process."""
    path = os.pathsep.join(
        [str(Path(__file__).parent / "warm_bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    run_warm([sys.executable, "-c", "pass"])  # once it has answered, it listens
    return {"PATH": path, "INGOT_TEST_SERVER": _address(server().process.pid)[1:], "INGOT_TEST_PYTHON": sys.executable}


def become(job: dict[str, Any]) -> None:
    """Turn this forked child into the interpreter that the words of the job start."""
    if job["session"]:
        os.setsid()
        if os.isatty(0):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # its Ctrl-C is for this process
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        mode, errors = "w" if number else "r", "backslashreplace" if number == 2 else "strict"
        line = number == 2 or os.isatty(number)
        stream = open(number, mode, errors=errors, buffering=1 if line else -1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    random.seed()
    sys.modules["numpy"].random.seed()
    kind, what, *arguments = job["words"]
    if kind == "-m":
        sys.path[0] = job["cwd"]
        sys.argv = [what, *arguments]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = ""
        sys.argv = ["-c", *arguments]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests; they close the socket
    for module in PRELOADED.split():
        __import__(module)
    gc.collect()
    gc.freeze()
    request = Forker(socket.socket(fileno=int(sys.argv[1]))).serve()
    try:
        become(request)
        ended: object = None
    except SystemExit as error:
        ended = error.code
    if ended is None or isinstance(ended, int):  # the ends of modules are not waited for: 0.2 s of them
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            ended = 120
        os._exit((ended or 0) & 0xFF)
    sys.exit(ended)  # type: ignore[arg-type]
