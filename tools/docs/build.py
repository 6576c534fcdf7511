"""Build the documentation site in build/docs/html: `make docs`.

The sources keep their places, so that a relative link works on the site and in a code browser alike: README, docs/,
examples/ and the rest are copied to build/docs/source, and the generated pages are written there, never into the
repository. Any warning is an error: a broken link, a missing anchor, a page that no menu names, a docstring that does
not parse.

Sphinx with MyST and Furo, instead of Zensical, which is faster and as strict about links: Zensical takes its API pages
from a plugin of MkDocs 1.x, which is unmaintained, it accepts a menu entry without a page, and its search needs a web
server. Sphinx does all of this itself, and PyTorch's projects use it.
"""

import shutil
import sys
from pathlib import Path

import benchmark_pages
import metric_pages
import peer_pages
import reference_pages

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "docs"
SOURCES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "docs", "examples", "containers/README.md")


def copy_sources(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    for name in SOURCES:
        source = ROOT / name
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target / name)
        else:
            shutil.copy2(source, target / name)


def generated_pages() -> dict[str, str]:
    """Every page that is made from the code, by its path in the repository's tree."""
    return {
        **reference_pages.pages(),
        **metric_pages.pages(),
        **peer_pages.pages(),
        **benchmark_pages.pages(ROOT / "benchmarks" / "results"),
    }


def main() -> int:
    from sphinx.cmd.build import main as sphinx

    source, html = BUILD / "source", BUILD / "html"
    copy_sources(source)
    for name, text in generated_pages().items():
        path = source / name
        assert not path.exists(), f"{name} is generated; remove it from the repository"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    shutil.rmtree(html, ignore_errors=True)
    settings = str(Path(__file__).parent)
    code = sphinx(["-b", "html", "-q", "-W", "--keep-going", "-j", "auto", "-c", settings, "-d", str(BUILD / "cache"),
                   str(source), str(html)])  # fmt: skip
    if code == 0:
        (html / "index.html").write_text('<meta http-equiv="refresh" content="0; url=docs/index.html">\n')
        print(f"documentation: {html / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
