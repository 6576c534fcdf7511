"""What the name of a file says about its content: JSON, CSV, Parquet or text, plain or compressed."""

import os
from collections import Counter
from collections.abc import Sequence

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".xz": "xz", ".bz2": "bz2", ".zip": "zip"}
_PROSE = "txt text md markdown mdx rst adoc asciidoc org tex bib html htm xhtml xml srt vtt po log wiki textile"
_CODE = (
    "py pyi pyx js jsx mjs cjs ts tsx java kt kts scala groovy c h cc cpp cxx hh hpp hxx cu cuh m mm swift rs go rb "
    "php pl pm t lua r rmd jl cs fs vb hs ml mli clj cljs ex exs erl el lisp scm rkt sh bash zsh fish ps1 bat sql "
    "yaml yml toml ini cfg conf properties proto graphql cmake mk gradle css scss sass less vue svelte tf nix zig "
    "dart asm s f f90 f95 v sv vhd vhdl tcl awk diff patch"
)
FORMATS = {f".{name}": name for name in ("jsonl", "json", "parquet", "csv")}
FORMATS |= {".ndjson": "jsonl", ".tsv": "csv"} | {f".{name}": "text" for name in f"{_PROSE} {_CODE}".split()}
# Text without a suffix, in any case.
_TEXT_NAMES = {
    "enwik8", "enwik9", "readme", "license", "copying", "notice", "authors", "contributors", "changelog",
    "changes", "news", "history", "todo", "install", "makefile", "dockerfile", "gemfile", "rakefile",
}  # fmt: skip


def format_of(name: str) -> tuple[str, str | None] | None:
    """The format (jsonl, json, parquet, csv, text or zip) and the compression; None if the name says neither."""
    stem, suffix = os.path.splitext(name.lower())
    compression = COMPRESSIONS.get(suffix)
    kind = FORMATS.get(os.path.splitext(stem)[1] if compression else suffix)
    if not suffix and os.path.basename(stem) in _TEXT_NAMES:
        kind = "text"
    if kind is None and compression == "zip":
        kind = "zip"
    return (kind, compression) if kind else None


def is_readable_member(name: str) -> bool:
    """Whether a file in a zip archive is read: by its suffix, and not if it is itself compressed."""
    kind = format_of(name)
    return kind is not None and kind[1] is None


def count_by_suffix(names: Sequence[str], shown: int = 8) -> str:
    """How many files of each suffix, the most frequent first: 12 .md, 11 .py."""
    counts = Counter(suffix_of(name) for name in names).most_common()
    text = [f"{count:,} {suffix}" for suffix, count in counts[:shown]]
    if rest := counts[shown:]:
        text.append(f"{sum(count for _, count in rest):,} with {len(rest)} other suffixes")
    return ", ".join(text)


def suffix_of(name: str) -> str:
    """The suffix of a file as it is shown: `.md`, `.md.gz`, or `without a suffix`."""
    if os.path.basename(name.rstrip("/")).startswith("."):
        return "hidden folder" if name.endswith("/") else "hidden"
    stem, suffix = os.path.splitext(os.path.basename(name).lower())
    if suffix in COMPRESSIONS:
        suffix = os.path.splitext(stem)[1] + suffix
    return (suffix if suffix.isprintable() else ascii(suffix)) or "without a suffix"
