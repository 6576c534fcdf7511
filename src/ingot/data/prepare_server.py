"""What runs in the worker processes of `prepare_pool`: load once, fork, serve."""

import contextlib
import gc
import os
import signal
import socket
import sys
from pathlib import Path
from typing import IO

from ingot.data.engine import Engine, Probes, Rules, pick_engine
from ingot.data.input_files import ReadOptions
from ingot.data.packing import Plan
from ingot.data.prepare_pool import receive, send
from ingot.data.prepare_worker import Worker
from ingot.errors import IngotError


def main() -> None:
    """Load, choose the engine, fork once for each socket named on the command line, and wait for all to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides what Ctrl-C means
    sockets = [socket.socket(fileno=int(number)) for number in sys.argv[1:] if number.isdigit()]
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not end up among the replies
    engine = _load(replies) if "tokenizes" in sys.argv else None
    gc.freeze()  # what is shared stays shared
    for mine in sockets:
        if os.fork() == 0:
            for other in sockets:
                if other is not mine:
                    other.close()
            _serve(mine, engine)
    for each in sockets:
        each.close()
    for _ in sockets:
        os.wait()
    os._exit(0)


def _load(replies: IO[bytes]) -> Engine:
    """The engine for the tokenizer that comes over standard input; ends the process if there is none."""
    with contextlib.suppress(ImportError):
        import awkward  # type: ignore[import-untyped]  # noqa: F401  needed by gigatoken; now the caller is still busy
    request = receive(sys.stdin.buffer)
    if request is None:
        sys.exit()
    try:
        rules, probes = Rules(**request[0]["rules"]), Probes(**request[0]["probes"])
        engine = pick_engine(rules, probes, request[0]["wanted"])
    except IngotError as error:
        send(replies, {"error": str(error), "kind": type(error).__name__})
        sys.exit()
    send(replies, {"name": engine.name, "reason": engine.reason})
    return engine


def _serve(connection: socket.socket, engine: Engine | None) -> None:
    """Do tasks until the socket ends; never returns."""
    stream = connection.makefile("rwb")
    worker: Worker | None = None
    try:
        while (request := receive(stream)) is not None:
            head, blob = request
            del request
            if "plan" in head:
                plan = Plan(**{**head["plan"], "options": ReadOptions(**head["plan"]["options"])})
                worker = Worker(plan, Path(head["folder"]), engine)
                send(stream, {"pid": os.getpid()})
                continue
            assert worker is not None
            done = worker.run(head, blob, lambda counts: send(stream, {"progress": counts}))
            blob = b""
            send(stream, {"done": done})
    except IngotError as error:
        send(stream, {"error": str(error), "kind": type(error).__name__})
    except (BrokenPipeError, ConnectionResetError):
        pass  # the caller is gone
    except BaseException:
        sys.excepthook(*sys.exc_info())
    os._exit(0)  # without the clean-up of an interpreter, which takes a tenth of a second


if __name__ == "__main__":
    main()
