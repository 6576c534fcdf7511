"""The report while a run goes on: a small server on this machine that builds the page and its data when asked.

Read only. It answers a few fixed paths with what it has computed and opens no file by a name from a request. The Host
header must name the address it listens on, so that a page from elsewhere cannot read it through a browser's DNS.
"""

import errno
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from ingot.errors import ConfigError, IngotError
from ingot.report.page.downsample import downsample
from ingot.report.page.page import build_page, to_json
from ingot.report.page.run_data import read_run
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
            return {"runs": [read_run(run) for run in self.runs], "live": LIVE_SECONDS} if path == "/" else None
        if path == "/":
            return {"list": [_entry(run) for run in find_runs(self.root)], "live": LIVE_SECONDS}
        for run in find_runs(self.root):
            if path == f"/run/{quote(run.name, safe='')}/":
                return {"runs": [read_run(run)], "live": LIVE_SECONDS}
        return None


def find_runs(root: Path) -> list[Path]:
    """The run folders in a folder, by name."""
    return sorted(metrics.parent for metrics in root.glob(f"*/{METRICS}"))


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


def serve(paths: list[Path], host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve the report until Ctrl-C; `ready` gets its address."""
    pages = LivePages(paths)
    if pages.root is None:
        pages.content("/")  # refuses what is not a run before it listens

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not _is_own(self.headers.get("Host", ""), host, server.server_port):
                self._answer(403, "text/plain", f"this report is at {host}:{server.server_port}")
                return
            path = quote(unquote(self.path.partition("?")[0]))
            is_data = path.endswith("/data.json")
            try:
                content = pages.content(path.removesuffix("data.json"))
            except IngotError as error:
                self._answer(503, "text/plain", str(error))
                return
            if content is None:
                self._answer(404, "text/plain", "no such page")
            elif is_data:
                self._answer(200, "application/json", to_json(content))
            else:
                self._answer(200, "text/html", build_page(content))

        def _answer(self, code: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(code)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Requests are not worth a line."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        hint = "; choose another with --port" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot serve at {host}:{port}: {error.strerror}{hint}") from None
    with server:
        ready(f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def _is_own(header: str, host: str, port: int) -> bool:
    name = header.removesuffix(f":{port}").strip("[]")
    return name in (host, "localhost", "127.0.0.1", "::1")
