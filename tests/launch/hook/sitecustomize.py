"""Loaded by Python at start (through PYTHONPATH): one node of the cluster is not as it should be.

INGOT_TEST_NODE is JSON: {"node", "kind", "report_seconds"}. A clock cannot be set for one namespace alone, so `clock`
changes what the process reads; the other harms are real.
"""

import json
import os
import socket
import sys
import time

FAULT = json.loads(os.environ.get("INGOT_TEST_NODE", "{}"))
program = next((name for name in ("worker", "allreduce") if f"ingot.launch.{name}" in sys.orig_argv), "")

if FAULT and program == "worker":
    import ingot.launch.preflight

    ingot.launch.preflight.REPORT_SECONDS = FAULT["report_seconds"]
    ingot.launch.preflight.ROUND_SECONDS = 6.0

if FAULT and program and socket.gethostname() == FAULT["node"]:
    kind = FAULT["kind"]
    if kind == "clock":
        plain = time.time
        time.time = lambda: plain() + 30
    elif kind == "silent" and program == "worker":
        time.sleep(60)
    elif kind == "deaf" and program == "allreduce":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the others cannot reach it
    elif kind == "port" and program == "worker" and os.environ["INGOT_JOB_ATTEMPT"].endswith((".1", "doctor")):
        taken = socket.create_server(("", int(os.environ["MASTER_PORT"])))
