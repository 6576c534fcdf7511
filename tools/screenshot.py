"""Takes the picture of a report: `python tools/screenshot.py demo/report.html docs/images/report.png`.

Needs Chromium (Debian's package) and playwright. Look at the picture before committing it.
"""

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run", "--disable-sync"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=1100)
    parser.add_argument("--height", type=int, default=860)
    options = parser.parse_args()
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page(viewport={"width": options.width, "height": options.height})
        page.goto(options.report.resolve().as_uri())
        page.screenshot(path=options.picture)
        browser.close()


if __name__ == "__main__":
    main()
