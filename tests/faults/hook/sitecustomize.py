"""Loaded by Python at start (through PYTHONPATH): does real harm to one rank of a run at one batch.

INGOT_TEST_FAULT is JSON: {"kind", "rank", "batch", "attempts"}, with "node" (a host name) instead of "rank" for a fault that
stays with a node, whichever rank runs there, and "after" for a file to wait for, such as a checkpoint that is written in
the background. With "phase" (save, evaluation) it strikes when the first one after that batch begins, and with
"requeued" only in a job that was queued again. A list of such objects is several faults. A fault comes in through
`ingot.training.testing.wrap_step`, or through the heartbeat; what happens then is a real signal, a real hang, a real NaN.
"""

import ctypes
import json
import os
import signal
import socket
import time

FAULT = json.loads(os.environ.get("INGOT_TEST_FAULT", "null"))
FAULTS = FAULT if isinstance(FAULT, list) else [FAULT] if FAULT else []


def strike(trainer, fault, batch) -> None:  # type: ignore[no-untyped-def]
    kind = fault["kind"]
    while "after" in fault and not os.path.exists(fault["after"]):
        time.sleep(0.01)
    if "once" in fault:
        open(fault["once"], "w").close()
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "segfault":
        ctypes.string_at(0)
    elif kind == "abort":
        os.abort()
    elif kind == "exception":
        raise RuntimeError("a bug that strikes here")
    elif kind == "device":  # the lowest seam that is ours: what torch raises
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    elif kind == "message":  # what a library raises that is not there, such as NCCL
        raise RuntimeError(fault["text"])
    elif kind == "memory" and trainer.executor.microbatch > fault["room"]:  # of a device that is not there

        def run_out(batch, loss_scale=None):  # type: ignore[no-untyped-def]
            import torch

            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        trainer.executor.accumulate = run_out
    elif kind == "agent":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    elif kind == "python":
        time.sleep(3600)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1)  # the signal may need a moment to arrive
    elif kind == "gil":
        while True:  # a foreign function that keeps the interpreter's lock; a signal would end its sleep
            ctypes.PyDLL(None).sleep(3600)
    elif kind == "slow":
        time.sleep(fault.get("seconds", 0.2))
    elif kind == "desync":
        trainer.executor.sum_data = lambda value: value  # a collective that this rank leaves out
    elif kind == "nan":
        plain = trainer.executor.accumulate

        def accumulate(batch, loss_scale=None):  # type: ignore[no-untyped-def]
            trainer.executor.accumulate = plain
            loss = plain(batch, loss_scale)
            gradient = trainer.executor.parameters[0].tensor.grad
            (gradient.to_local() if hasattr(gradient, "to_local") else gradient).fill_(float("nan"))
            return loss

        trainer.executor.accumulate = accumulate
    elif kind == "noise":
        batch.tokens[:] = (batch.tokens * 7919 + 13) % 320
        batch.labels[:] = (batch.labels * 104729 + 7) % 320
    elif kind == "flip":
        import torch

        parameter = trainer.executor.parameters[0].tensor.detach()
        values = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        values.view(torch.int32).view(-1)[0] ^= 1 << 20


def wrapper(trainer, batch, step):  # type: ignore[no-untyped-def]
    number = trainer.progress.batch
    for fault in mine:
        at = fault["batch"]
        if "phase" not in fault and (number == at or (fault["kind"] == "slow" and number >= at)) and not is_over(fault):
            strike(trainer, fault, batch)
    return step(batch)


def strike_in_phases() -> None:
    from ingot.training.runtime.heartbeat import Heartbeat

    plain = Heartbeat.begin

    def begin(self, phase):  # type: ignore[no-untyped-def]
        plain(self, phase)
        for fault in mine:
            if fault.get("phase") == phase and self.batch >= fault["batch"] and not is_over(fault):
                strike(None, fault, None)

    Heartbeat.begin = begin


def is_over(fault) -> bool:  # type: ignore[no-untyped-def]
    return os.path.exists(fault.get("once", ""))


def strikes_here(fault) -> bool:  # type: ignore[no-untyped-def]
    """Whether this is the rank or the node, and the attempt; `once` names a file that a fault leaves, so as not to come
    again."""
    if "INGOT_FAILURE_FILE" not in os.environ and "node" in fault:
        return False
    if socket.gethostname() != fault["node"] if "node" in fault else os.environ.get("RANK", "0") != str(fault["rank"]):
        return False
    attempt = os.environ.get("INGOT_ATTEMPT", "1")
    if fault.get("requeued") and attempt.split(".")[1:2] == ["0"]:
        return False
    if "once" in fault or fault.get("attempts") == "all":
        return not is_over(fault)
    number = attempt.rpartition(".")[2] if attempt.startswith("local.") else attempt
    return number in map(str, fault.get("attempts", [1]))


mine = [fault for fault in FAULTS if strikes_here(fault)]
if mine:
    from ingot.training.testing import wrap_step

    wrap_step(wrapper)
if any("phase" in fault for fault in mine):
    strike_in_phases()
