"""One HTML file with everything in it: data, program, style, chart library. It opens without a network.

Text from a run (names, config values, messages) gets into the page as JSON only, and the program writes it as text, so
that it cannot become markup.
"""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from ingot.report.page.run_data import read_runs
from ingot.storage.atomic import write_whole

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; style-src \
'unsafe-inline'; img-src data:; connect-src 'self'">
<link rel="icon" href="data:,">
<title>ingot report</title>
<style>
{style}
</style>
</head>
<body>
<main id="page"></main>
<script type="application/json" id="data">{data}</script>
<script>
{library}
</script>
<script>
{program}
</script>
</body>
</html>
"""


def build_page(content: dict[str, Any]) -> str:
    """The page that shows `content`; see `assets/report.js` for its fields."""
    assets = {name: _asset(name) for name in ("uPlot.iife.min.js", "uPlot.min.css", "report.js", "report.css")}
    return PAGE.format(
        style=assets["uPlot.min.css"] + assets["report.css"], library=assets["uPlot.iife.min.js"],
        program=assets["report.js"], data=to_json(content),
    )  # fmt: skip


def to_json(content: dict[str, Any]) -> str:
    """JSON that cannot end the script element that it is in. Numbers keep seven digits."""
    text = json.dumps(_rounded(content), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def write_report(runs: list[Path], target: Path) -> None:
    """Write the report of one run or several as one file."""
    write_whole(target, build_page({"runs": read_runs(runs)}))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return value


def _asset(name: str) -> str:
    return (files("ingot.report.page") / "assets" / name).read_text(encoding="utf-8")
