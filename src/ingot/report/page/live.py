"""The report while a run goes on: a small server on this machine that builds the page and its data when asked.

Read only. It answers a few fixed paths with what it has computed and opens no file by a name from a request. The Host
header must name this machine or be a plain address, so that a page from elsewhere cannot read it through a browser's
DNS. Runs that are links to outside the folder are not shown.
"""

import errno
import ipaddress
import socket
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from ingot.errors import ConfigError, IngotError
from ingot.report.page.downsample import downsample
from ingot.report.page.page import build_page, to_json
from ingot.report.page.run_data import read_run, read_runs
from ingot.report.page.run_text import own_file
from ingot.training.runtime.run_files import METRICS

LIVE_SECONDS = 5  # between updates of the page
CURVE_POINTS = 120  # of the small curves in the list of runs
LOSS = "loss/train/total"


class LivePages:
    """What each path shows: one run or several together at `/`, or a list of runs with a page for each."""

    def __init__(self, paths: list[Path]):
        self.runs = paths
        self.root = paths[0] if len(paths) == 1 and not (paths[0] / METRICS).exists() else None
        if self.root is not None and not self.root.is_dir():
            raise ConfigError(f"{self.root} is not a folder")

    def content(self, path: str) -> dict[str, Any] | None:
        """The data behind `/` or `/run/NAME/`; None if there is no such page."""
        if self.root is None:
            return {"runs": read_runs(self.runs), "live": LIVE_SECONDS} if path == "/" else None
        if path == "/":
            return {"list": [_entry(run) for run in find_runs(self.root)], "live": LIVE_SECONDS}
        for run in find_runs(self.root):
            if path == f"/run/{quote(run.name, safe='')}/":
                return {"runs": [read_run(run)], "live": LIVE_SECONDS}
        return None


def find_runs(root: Path) -> list[Path]:
    """The run folders in a folder, by name."""
    inside = root.resolve()
    found = (metrics.parent for metrics in root.glob(f"*/{METRICS}"))
    return sorted(run for run in found if run.resolve().is_relative_to(inside) and own_file(run, METRICS))


def _entry(run: Path) -> dict[str, Any]:
    link = f"run/{quote(run.name, safe='')}/"
    try:
        found = read_run(run)
    except IngotError:
        return {"name": run.name, "link": link, "state": "no metrics yet", "step": 0, "loss": None, "curve": []}
    steps, losses = found["series"].get(LOSS, ([], []))
    curve = downsample(steps, losses, CURVE_POINTS)[1]
    return {"name": run.name, "link": link, "state": found["state"], "step": int(found["last"]["time/batch"]),
            "loss": found["last"].get(LOSS), "curve": curve}  # fmt: skip


class LiveServer(ThreadingHTTPServer):
    """Answers requests for pages, each in a thread."""

    daemon_threads = True

    def __init__(self, pages: LivePages, host: str, port: int):
        self.pages, self.host = pages, host
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), LiveHandler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has gone away is not worth a line."""

    def is_own(self, header: str) -> bool:
        """Whether a Host header names this server. A plain address is safe: it has no DNS that others control."""
        name, _, port = header.rpartition(":") if header.rpartition(":")[2].isdigit() else (header, "", "")
        if port and int(port) != self.server_port:
            return False
        name = name.strip("[]").lower()
        is_open = self.host in ("0.0.0.0", "::")  # noqa: S104  to any address of this machine, if the user says so
        with suppress(ValueError):
            address = ipaddress.ip_address(name)
            return is_open or address.is_loopback or name == self.host
        here = {self.host.lower(), "localhost"}
        return name in (here | {socket.gethostname().lower(), socket.getfqdn().lower()} if is_open else here)


class LiveHandler(BaseHTTPRequestHandler):
    """One request."""

    server: LiveServer
    timeout = 30.0  # for a client that says nothing

    def do_GET(self) -> None:
        if not self.server.is_own(self.headers.get("Host", "")):
            self._answer(403, "text/plain", f"this report is at {self.server.host}:{self.server.server_port}")
            return
        path = quote(unquote(self.path.partition("?")[0]))
        is_data = path.endswith("/data.json")
        try:
            content = self.server.pages.content(path.removesuffix("data.json"))
            text = "" if content is None else to_json(content) if is_data else build_page(content)
        except IngotError as error:
            self._answer(503, "text/plain", str(error))
        except Exception as error:  # whatever a folder holds, the other pages stay
            self._answer(500, "text/plain", f"this page cannot be made: {type(error).__name__}: {error}")
        else:
            kind = "application/json" if is_data else "text/html"
            self._answer(200, kind, text) if content is not None else self._answer(404, "text/plain", "no such page")

    def _answer(self, code: int, kind: str, text: str) -> None:
        body = text.encode(errors="replace")
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Requests are not worth a line."""


def serve(paths: list[Path], host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve the report until Ctrl-C; `ready` gets its address."""
    pages = LivePages(paths)
    if pages.root is None:
        pages.content("/")  # refuses what is not a run before it listens
    try:
        server = LiveServer(pages, host, port)
    except OSError as error:
        hint = "; choose another with --port" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot serve at {host}:{port}: {error.strerror}{hint}") from None
    with server:
        ready(f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
