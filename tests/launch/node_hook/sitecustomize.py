"""Loaded by Python at start (through PYTHONPATH) where the nodes of a job are agents of one machine: each has the host
name that its agent was given, and INGOT_TEST_FAULT may say "node" in place of "rank" (see tests/faults/hook)."""

import json
import os
import runpy
import socket
from pathlib import Path

NODE = os.environ.get("SLURMD_NODENAME")
if NODE:
    socket.gethostname = lambda: NODE  # type: ignore[assignment]
if "INGOT_FAILURE_FILE" in os.environ:
    fault = json.loads(os.environ.get("INGOT_TEST_FAULT", "null"))
    if fault and "node" in fault and fault["node"] == NODE:
        os.environ["INGOT_TEST_FAULT"] = json.dumps(fault | {"rank": os.environ["RANK"]})
    if fault and fault.get("node", NODE) == NODE:
        hook = runpy.run_path(str(Path(__file__).parents[2] / "faults" / "hook" / "sitecustomize.py"))
        plain = hook["strike"]

        def strike(trainer, kind, batch):  # type: ignore[no-untyped-def]
            if kind == "device":  # the lowest seam that is ours: what torch raises
                raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
            plain(trainer, "slow" if kind == "python" else kind, batch)

        plain.__globals__["FAULT"].setdefault("seconds", 3600.0)
        hook["wrapper"].__globals__["strike"] = strike
