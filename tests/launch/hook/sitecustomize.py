"""Loaded by Python at start (through PYTHONPATH): one node of the cluster is not as it should be.

INGOT_TEST_NODE is JSON: {"node", "kind", "report_seconds"}. A clock cannot be set for one namespace alone, so `clock`
changes what the process reads; the other harms are real. `nccl` has a rank there write the log of an NCCL that found no
fast network.

INGOT_TEST_HOLD names a folder: `ingot prepare` then works in small pieces, and share K waits, before its third, for as
long as a file `hold.K` is there.
"""

import json
import os
import socket
import sys
import time

FAULT = json.loads(os.environ.get("INGOT_TEST_NODE", "{}"))
MODULES = {"lead": "ingot.launch.preflight.lead_checks", "agent": "ingot.launch.agent.cluster_agent",
           "probe": "ingot.launch.preflight.allreduce_probe"}  # fmt: skip
program = next((name for name, module in MODULES.items() if module in sys.orig_argv), "")
if not program and "INGOT_FAILURE_FILE" in os.environ:
    program = "rank"

if FAULT and program == "lead":
    from functools import partial

    import ingot.launch.supervisor.attempt
    import ingot.launch.supervisor.node_tests

    times = ingot.launch.supervisor.attempt.Times
    ingot.launch.supervisor.attempt.Times = partial(times, hello=FAULT["report_seconds"])
    ingot.launch.supervisor.node_tests.ROUND_SECONDS = 6.0

if FAULT and program and socket.gethostname() == FAULT["node"]:
    kind = FAULT["kind"]
    if kind == "clock":
        plain = time.time
        time.time = lambda: plain() + 30
    elif kind == "silent" and program == "agent":
        time.sleep(60)
    elif kind == "deaf" and program == "probe":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the others cannot reach it
    elif kind == "nccl" and program == "rank" and os.environ["RANK"] in FAULT["ranks"]:
        with open(os.environ["NCCL_DEBUG_FILE"], "w") as log:
            log.write("n2:7:7 [0] NCCL INFO NET/IB : No device found.\nn2:7:7 [0] NCCL INFO Using network Socket\n")

HOLD = os.environ.get("INGOT_TEST_HOLD")
if HOLD and "prepare" in sys.orig_argv and "launch" not in sys.orig_argv:
    from ingot.data.prepare.worker import TokenizeWorker
    from ingot.data.sources import pieces as sources

    sources.PIECE_BYTES = 4_000
    plain_tokenize = TokenizeWorker.tokenize
    turn = sys.orig_argv[sys.orig_argv.index("--share") + 1].partition("/")[0] if "--share" in sys.orig_argv else ""
    done = []

    def tokenize(self, number, *rest):  # type: ignore[no-untyped-def]
        done.append(number)
        if len(done) == 3:
            open(f"{HOLD}/started.{turn}", "w").close()
            while os.path.exists(f"{HOLD}/hold.{turn}"):
                time.sleep(0.02)
        return plain_tokenize(self, number, *rest)

    TokenizeWorker.tokenize = tokenize
