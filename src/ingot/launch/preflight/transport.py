"""Which transport NCCL uses between nodes, by its own log: when a plugin does not load, NCCL falls back to sockets
without an error, and the run is several times slower.
"""

import re
from collections.abc import Mapping
from pathlib import Path

FAST = ("efa", "ib")


def log_to(path: Path) -> dict[str, str]:
    """Variables that make NCCL log what it chooses."""
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(path)}


def chosen_transport(log: str) -> str:
    """By the log at level INFO: efa, ib, socket, or another of NCCL's names; empty if it does not say yet."""
    provider = re.findall(r"NET/OFI Selected provider is ([\w;-]+)", log, re.IGNORECASE)
    channels = re.findall(r"via NET/([\w -]+)/", log)  # the connections that were made
    networks = re.findall(r"Using network ([\w -]+)", log)  # the plugin that was chosen
    devices = re.findall(r"NET/(\w+) : Using \[", log)  # what was found when it was loaded
    names = [name.strip().lower() for name in channels or networks or devices]
    if not names:
        names = ["ofi"] if provider else []
    if "socket" in names:  # one such connection slows down all
        return "socket"
    if any("libfabric" in name or name in ("ofi", "aws libfabric") for name in names):
        return provider[-1].partition(";")[0].lower() if provider else "ofi"
    return names[-1] if names else ""


def fallback(expected: str, log_says: str) -> str:
    """What is wrong with the transport, if the profile expects a fast one."""
    if expected not in FAST or log_says == expected:
        return ""
    return f"NCCL must use {expected} and its log says {log_says or 'nothing about it'}; check the plugin " \
           "and the devices in the container"  # fmt: skip


class TransportWatch:
    """Reads the logs of this machine's ranks until each has said what it uses."""

    def __init__(self, expected: str, logs: Mapping[int, Path]):
        self.expected, self.unknown = expected, dict(logs) if expected in FAST else {}
        self.found: tuple[int, str] | None = None

    def wrong(self) -> tuple[int, str] | None:
        """A rank that uses something slower, and a sentence on it."""
        for rank, path in list(self.unknown.items()):
            says = chosen_transport(path.read_text(errors="replace")) if path.is_file() else ""
            if says:
                del self.unknown[rank]
                if problem := fallback(self.expected, says):
                    self.found = self.found or (rank, problem)
        return self.found
