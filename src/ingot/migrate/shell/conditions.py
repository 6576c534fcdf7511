"""Whether `[ ... ]`, `[[ ... ]]` and `case` hold, as far as their words are known."""

import re
from collections.abc import Sequence

from ingot.migrate.shell.syntax import Case, Command, Word
from ingot.migrate.shell.values import Text, plain

COMPARISONS = {
    "-eq": lambda a, b: a == b, "-ne": lambda a, b: a != b, "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b, "-gt": lambda a, b: a > b, "-ge": lambda a, b: a >= b,
}  # fmt: skip
GLOB = re.compile(r"[*?\[\\]")
PLAIN = re.compile(r"[\w.,/:=+%@-]*")  # stands for itself in a pattern


def holds(fields: Sequence[Text]) -> bool | None:
    """The result of `test` or `[`; None if it is not certain."""
    texts = [plain(field) for field in fields]
    if texts[0] == "[":
        if texts[-1] != "]":
            return None
        texts = texts[:-1]
    words, negated = texts[1:], False
    while len(words) > 1 and words[0] == "!":
        words, negated = words[1:], not negated
    found = None if None in words else _holds([word or "" for word in words])
    return None if found is None else found != negated


def double_holds(fields: Sequence[Text], written: Sequence[Word]) -> bool | None:
    """The result of `[[`, with `&&` and `||` from left to right as far as they decide it; None if it is not certain."""
    alternatives: list[list[list[tuple[str | None, Word]]]] = [[[]]]
    for field, word in zip(fields[1:-1], written[1:-1], strict=True):
        if word.text == "||":
            alternatives.append([[]])
        elif word.text == "&&":
            alternatives[-1].append([])
        else:
            alternatives[-1][-1].append((plain(field), word))
    for terms in alternatives:
        found: bool | None = True
        for term in terms:
            if found:
                found = _term(term)
        if found is not False:
            return found
    return False


def _term(pairs: list[tuple[str | None, Word]]) -> bool | None:
    """A comparison in `[[`, whose right side is a pattern."""
    negated = False
    while len(pairs) > 1 and pairs[0][1].text == "!":
        pairs, negated = pairs[1:], not negated
    texts, written = [text for text, _ in pairs], [word for _, word in pairs]
    if None in texts or any(re.search(r"[()&|<>]", word.text) for word in written):
        return None
    words = [text or "" for text in texts]
    if len(words) == 3 and words[1] in ("=", "==", "!="):
        pattern = pattern_of(written[2])
        if pattern is None and GLOB.search(words[2]):  # what a variable holds may be a pattern, too
            return None
        pattern = re.escape(words[2]) if pattern is None else pattern
        matches = re.fullmatch(pattern, words[0], re.DOTALL) is not None
        return matches ^ (words[1] == "!=") ^ negated
    found = _holds(words)
    return None if found is None else found != negated


def pattern_of(word: Word) -> str | None:
    """A pattern without variables as a regular expression, if its only special character is `*`."""
    found = ""
    for part in word.parts:
        pieces = [part.text] if part.quoted else part.text.split("*")
        if part.kind != "text" or not (part.quoted or all(map(PLAIN.fullmatch, pieces))):
            return None
        found += ".*".join(map(re.escape, pieces))
    return found


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
    for words, body in case.clauses:
        patterns = [pattern_of(word) for word in words]
        always = ".*" in patterns
        if value is not None and None not in patterns:
            if any(re.fullmatch(pattern or "", value, re.DOTALL) for pattern in patterns):
                return [*found, (body, True)]
            continue
        found.append((body, always))
        if always:
            break
    if value is not None and not found:
        return [((), True)]
    return found
