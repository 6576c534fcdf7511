"""`$(( ... ))` of known whole numbers."""

import ast
import operator
import re
from collections.abc import Callable

NAME = re.compile(r"\$\{(\w+)\}|(\$?)((?<!\w)[A-Za-z_]\w*|(?<=\$)\d)")
ASSIGNED = re.compile(
    r"([A-Za-z_]\w*)\s*(?:\[[^\]]*\]\s*)?(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
NUMBER = re.compile(r"-?(?:0|[1-9]\d*)")
OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),  # towards zero, as in C
    ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
}  # fmt: skip


def assigned_names(text: str) -> list[str]:
    """The variables that an arithmetic expression may set."""
    return [before or after for before, after in ASSIGNED.findall(text)]


def evaluate(text: str, known: Callable[[str], str | None]) -> tuple[int | None, str]:
    """The value of an expression, or None and the name that is missing."""
    missing = ""

    def number(match: re.Match[str]) -> str:
        nonlocal missing
        name = match[1] or match[3]
        value = known(name)
        if value is None or not NUMBER.fullmatch(value):
            missing = missing or name
            return "0"
        return f"({value})" if not match[1] and not match[2] else f"{value}"

    plain = NAME.sub(number, text).strip()
    if missing or not re.fullmatch(r"[\d\s()+*/%-]+", plain) or re.search(r"\*\*|//|\+\s*\+|-\s*-|\b0\d", plain):
        return None, missing
    try:
        value = _value(ast.parse(re.sub(r"\s", " ", plain), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, KeyError, ValueError):
        return None, ""
    return (value if abs(value) < 2**63 else None), ""


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
    raise ValueError(ast.dump(node))
