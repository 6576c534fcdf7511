"""Loaded by Python at start (through PYTHONPATH): does real harm to one rank of a run at one batch.

INGOT_TEST_FAULT is JSON: {"kind", "rank", "batch", "attempts"}. The trainer is wrapped from outside, as it is imported;
what happens then is a real signal, a real hang, a real NaN.
"""

import ctypes
import importlib.util
import json
import os
import signal
import sys
import time

FAULT = json.loads(os.environ.get("INGOT_TEST_FAULT", "null"))


def strike(trainer, kind, batch) -> None:  # type: ignore[no-untyped-def]
    if "once" in FAULT:
        open(FAULT["once"], "w").close()
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "segfault":
        ctypes.string_at(0)
    elif kind == "abort":
        os.abort()
    elif kind == "exception":
        raise RuntimeError("a bug that strikes here")
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1)  # the signal may need a moment to arrive
    elif kind == "gil":
        while True:  # a foreign function that keeps the interpreter's lock; a signal would end its sleep
            ctypes.PyDLL(None).sleep(3600)
    elif kind == "slow":
        time.sleep(FAULT.get("seconds", 0.2))
    elif kind == "desync":
        trainer.spread.batch_tokens = lambda own: __import__("torch").tensor(1.0)
    elif kind == "nan":
        plain = trainer.step.accumulate

        def accumulate(batch):  # type: ignore[no-untyped-def]
            trainer.step.accumulate = plain
            loss = plain(batch)
            gradient = next(iter(trainer.names)).grad
            (gradient.to_local() if hasattr(gradient, "to_local") else gradient).fill_(float("nan"))
            return loss

        trainer.step.accumulate = accumulate
    elif kind == "noise":
        batch.tokens[:] = (batch.tokens * 7919 + 13) % 320
        batch.labels[:] = (batch.labels * 104729 + 7) % 320
    elif kind == "flip":
        import torch

        parameter = next(iter(trainer.names)).detach()
        values = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        values.view(torch.int32).view(-1)[0] ^= 1 << 20


class Finder:
    """Wraps the trainer as it is imported."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "ingot.training.trainer":
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        plain = found.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            plain(module)
            wrap(module.Trainer)

        found.loader.exec_module = exec_module
        return found


def wrap(trainer_class: type) -> None:
    plain = trainer_class._step  # type: ignore[attr-defined]

    def step(self, batch):  # type: ignore[no-untyped-def]
        at = FAULT["batch"]
        if self.batch == at or (FAULT["kind"] == "slow" and self.batch >= at):
            strike(self, FAULT["kind"], batch)
        return plain(self, batch)

    trainer_class._step = step  # type: ignore[attr-defined]


def strikes_here() -> bool:
    """Whether this is the rank, and the attempt; `once` names a file that a fault leaves, so as not to come again."""
    if not FAULT or os.environ.get("RANK", "0") != str(FAULT["rank"]):
        return False
    if "once" in FAULT or FAULT.get("attempts") == "all":
        return not os.path.exists(FAULT.get("once", ""))
    return os.environ.get("INGOT_ATTEMPT", "1") in map(str, FAULT.get("attempts", [1]))


if strikes_here():
    sys.meta_path.insert(0, Finder())
