"""Rejects phrases that a native speaker would not write, in code, messages, help and documentation: part of `make lint`.

python tools/check_prose.py [FILE_OR_FOLDER...]
"""

import re
import sys
from bisect import bisect_right
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHECKED = (".ci", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "Makefile", "README.md", "benchmarks", "containers",
           "docs", "examples", "pyproject.toml", "src", "tests", "tools")  # fmt: skip
SUFFIXES = (".cff", ".md", ".py", ".sh", ".toml", ".yaml", ".yml", "Dockerfile", "Makefile", "/run")

# A phrase as a regular expression, and what to write.
PHRASES = {
    r"(?<!there )(?<!here )\b(?:is|are|was|were) no (?!longer|more\b|less\b|fewer\b|better|faster|different|one\b|need\b|way\b)[a-z]+":
        "'is not a ...', 'has no ...', or 'there is no ...'",
    r"\bbeside\b": "'next to', 'along with', or rewrite",
    r"\b(?:made |begin |drawn |put |written |start )anew\b|\banew\b": "'again', 'rebuilt'",
    r"\bof ours\b": "'our'",
    r"\bmend(?:s|ed|ing)?\b": "'fix'",
    r"\bgives back\b|\bgive back\b": "'returns'",
    r"\b(?:stands|stand) (?:in|at|beside|below|above) (?:the|its|a)\b": "'is in'",
    r"\blies in\b|\blie in\b": "'is in'",
    r"\bto be had\b": "'available'",
    r"\bwould do\b(?! (?:it|so|this|that|the))": "'set X to at least N'",
    r"\bleaves? word\b|\bwithout a word\b": "'reports', 'without reporting'",
    r"\bto no avail\b": "'without success'",
    r"\bas ever\b": "leave it out",
    r"\bwill not do\b": "'is not allowed'",
    r"\bgoes on behind\b|\bso many (?:samples|tokens|batches|seconds)\b|\bso long before\b": "'this many', 'continues after'",
    r"\bdata sets?\b": "'dataset'",
    r"\btrains? on from\b": "'continue training from'",
    r"\bare no numbers\b|\bis no number\b": "'is NaN or infinite'",
    r"\b(?:colour|behaviour|licence|favour|honour|neighbour|centre|artefact)|(?:initial|normal|util|recogn|organ|quant|orthogonal|serial|summar)is(?:e|i|a)|\b(?:mis)?spelt\b": "American spelling",
}  # fmt: skip

# Files that are not checked, and why. Empty is best.
ALLOWED = {
    "tools/check_prose.py": "names the phrases",
    "tests/test_prose.py": "names the phrases",
    "tests/v0_1/": "written by v0.1, kept as they are",
    "tests/config/foundry/": "files of other projects, kept as they are",
    "tests/config/megatron/": "files of other projects, kept as they are",
    "tests/config/neox/": "files of other projects, kept as they are",
}


def main(arguments: list[str]) -> int:
    places = [Path(a) for a in arguments] or [ROOT / name for name in CHECKED]
    found = [problem for place in places for path in files(place) for problem in check(path)]
    print("\n".join(found) if found else "prose: no violations")
    return 1 if found else 0


def files(place: Path) -> list[Path]:
    every = sorted(place.rglob("*")) if place.is_dir() else [place]
    return [path for path in every if path.is_file() and path.as_posix().endswith(SUFFIXES)]


def check(path: Path) -> list[str]:
    """What to change, each with its place."""
    path = path.resolve()
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
    if any(name.startswith(file) for file in ALLOWED):
        return []
    text, starts = running_text(path.read_text(encoding="utf-8"))
    found = []
    for phrase, better in PATTERNS.items():
        for match in phrase.finditer(text):
            number = bisect_right(starts, match.start())
            found.append((number, f"{name}:{number}: '{match[0]}': write {better}"))
    return [problem for _, problem in sorted(found)]


def running_text(text: str) -> tuple[str, list[int]]:
    """The text without line ends, comment signs and quotes, so that a phrase is found across lines; and where in it
    each line starts."""
    parts, starts, length = [], [], 0
    for line in text.splitlines():
        if line.lstrip().startswith("def test_"):
            line = line.replace("_", " ")  # the name of a test is a sentence
        parts.append(re.sub(r"""^\s*(?:[#>*-] |f?["'])?|["'\\]*$""", "", line).strip() + " ")
        starts.append(length)
        length += len(parts[-1])
    return "".join(parts), starts


PATTERNS = {re.compile(phrase, re.IGNORECASE): better for phrase, better in PHRASES.items()}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
