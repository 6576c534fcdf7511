"""Whether `[ ... ]`, `[[ ... ]]` and `case` hold, as far as their words are known."""

import re
from collections.abc import Sequence

from ingot.migrate.shell.syntax import Case, Command, Word
from ingot.migrate.shell.values import Text, plain

COMPARISONS = {
    "-eq": lambda a, b: a == b, "-ne": lambda a, b: a != b, "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b, "-gt": lambda a, b: a > b, "-ge": lambda a, b: a >= b,
}  # fmt: skip
PATTERN = re.compile(r"[*?\[\]\\&|<>()]")
GLOB = re.compile(r"[*?\[\\]")


def holds(fields: Sequence[Text], written: Sequence[Word] = ()) -> bool | None:
    """The result of a test; None if it is not certain. `written`: the words of `[[`, which has patterns."""
    texts = [plain(field) for field in fields]
    first = texts[0]
    if first in ("[", "[["):
        if texts[-1] != ("]" if first == "[" else "]]"):
            return None
        texts, written = texts[:-1], written[:-1]
    words, negated = texts[1:], False
    while len(words) > 1 and words[0] == "!":
        words, negated = words[1:], not negated
    if None in words or any(PATTERN.search(word.text) for word in written[1:]):
        return None
    if written and GLOB.search(words[-1] or ""):  # what a variable holds may be a pattern, too
        return None
    found = _holds([word or "" for word in words])
    return None if found is None else found != negated


def _holds(words: list[str]) -> bool | None:
    match words:
        case [word] if word != "!":
            return bool(word)
        case ["-z", word]:
            return not word
        case ["-n", word]:
            return bool(word)
        case [left, "=" | "==", right]:
            return left == right
        case [left, "!=", right]:
            return left != right
        case [left, compare, right] if compare in COMPARISONS:
            whole = re.compile(r"-?(?:0|[1-9]\d{0,17})")
            if whole.fullmatch(left) and whole.fullmatch(right):
                return bool(COMPARISONS[compare](int(left), int(right)))
    return None


def matching_clauses(case: Case, value: str | None) -> list[tuple[tuple[Command, ...], bool]]:
    """The bodies that may run, in order; the last one may be certain to run if none before it does."""
    found: list[tuple[tuple[Command, ...], bool]] = []
    if case.falls_through:
        return [(body, False) for _, body in case.clauses]
    for patterns, body in case.clauses:
        texts = [re.sub(r"^(['\"])(.*)\1$", r"\2", word.text) for word in patterns]
        always = "*" in texts
        if value is not None and all(re.fullmatch(r"[\w.,/:=+ -]*", text) or text == "*" for text in texts):
            if always or value in texts:
                return [*found, (body, True)]
            continue
        found.append((body, always))
        if always:
            break
    if value is not None and not found:
        return [((), True)]
    return found
