"""Which faults strike a run, where and when: drawn from a seed, the same one for the same seed.

Nodes are chosen by name. A fault of a rank strikes inside it (tests/faults/hook); all others come from outside
(`inject.py`). A device error cannot be caused for real: it is the exception that torch raises.
"""

import random
from dataclasses import dataclass

NODES = 6
"""Of the cluster; a run takes two, and its spare."""
BATCHES, EVERY, EVAL_EVERY = 24, 4, 8
INSIDE = ("kill", "segfault", "stop", "exception", "device", "python", "gil", "agent")
"""Faults of a rank, as the hook knows them; the last one kills its agent."""
NODE_KINDS = (*INSIDE, "node", "drain", "cable", "workdir")
PHASES = ("hello", "preflight", "starting")
HANGS = ("stop", "python", "gil")


@dataclass(frozen=True)
class Fault:
    """One fault."""

    kind: str
    node: str = ""
    """Empty: it concerns the whole job."""
    moment: str = "batch"
    """submit, one of PHASES, batch, save or evaluation."""
    batch: int = 0
    """From which batch on, for the last three."""
    is_after_requeue: bool = False
    seconds: float = 0.0
    """How long it lasts."""

    def __str__(self) -> str:
        where = f" of {self.node}" if self.node else ""
        when = f"{self.moment} {self.batch}" if self.batch else self.moment
        again = " after a requeue" if self.is_after_requeue else ""
        return f"{self.kind}{where} at {when}{again}" + (f" for {self.seconds:g} s" if self.seconds else "")


@dataclass(frozen=True)
class Schedule:
    """A run and what strikes it."""

    seed: int
    spares: int
    chain: int
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        faults = "; ".join(map(str, self.faults))
        return f"seed {self.seed}: 2 nodes, spares {self.spares}, chain {self.chain}: {faults}"


def draw(seed: int) -> Schedule:
    """The schedule of a seed."""
    dice = random.Random(f"chaos {seed}")
    spares, chain = dice.choice((0, 1, 1)), dice.choice((1, 1, 1, 2))
    nodes = ["n1", "n2"] * 2 + [f"n{2 + number}" for number in range(1, spares + 1)]
    if dice.random() < 0.04:
        return Schedule(seed, spares, chain, (Fault("stage", moment="submit"),))
    faults: list[Fault] = []
    for _ in range(dice.choice((1, 2, 2, 3))):
        fault = _fault(dice, nodes)
        at_once = dice.random() < 0.25 and faults and faults[-1].moment in ("batch", *PHASES)
        if at_once and fault.moment in ("batch", *PHASES):  # several at the same moment
            last = faults[-1]
            if last.moment == "batch" or fault.kind not in INSIDE:
                fault = Fault(fault.kind, fault.node, last.moment, last.batch, fault.is_after_requeue, fault.seconds)
        faults.append(fault)
    requeues = any(fault.kind in ("requeue", "usr2") for fault in faults)
    return Schedule(seed, spares, chain, tuple(
        Fault(f.kind, f.node, f.moment, f.batch, f.is_after_requeue and requeues and f.kind not in ("requeue", "usr2"),
              f.seconds) for f in faults))  # fmt: skip


def _fault(dice: random.Random, nodes: list[str]) -> Fault:
    batch = dice.randrange(3, BATCHES - 1)
    node = dice.choice(nodes)
    again = dice.random() < 0.3
    if dice.random() < 0.55:
        kind = dice.choice(INSIDE)
        moment = dice.choice(("batch", "batch", "save", "evaluation"))
        return Fault(kind, node, moment, batch if moment == "batch" else dice.randrange(3, 17), again)
    kind = dice.choice(("node", "node", "drain", "cable", "supervisor", "requeue", "usr2", "ingot stop", "scancel",
                        "controller", "disk", "workdir"))  # fmt: skip
    if kind == "workdir":
        return Fault(kind, node, "submit")
    moment = dice.choice((*PHASES, "batch", "batch", "batch"))
    if kind in ("disk", "drain"):
        moment = "batch"
    seconds = {"node": dice.choice((2.0, 25.0)), "cable": dice.choice((3.0, 60.0)), "disk": 12.0,
               "controller": dice.choice((5.0, 20.0))}.get(kind, 0.0)  # fmt: skip
    own = node if kind in NODE_KINDS else ""
    return Fault(kind, own, moment, batch if moment == "batch" else 0, again, seconds)
