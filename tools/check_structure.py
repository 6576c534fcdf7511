"""Checks the size and naming rules of src/: run `python tools/check_structure.py`; exits with 1 on any violation."""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "src"
FILE_LINES, FUNCTION_LINES, PARAMETERS, FILES_PER_FOLDER, TOTAL_LINES = 400, 60, 8, 14, 21_000
FREE_FOLDERS = {"cli"}  # one file per command
KERNEL_WRAPPERS: set[str] = set()  # functions whose parameters are those of a Triton kernel

Function = ast.FunctionDef | ast.AsyncFunctionDef


def main(root: Path) -> int:
    files = {path: path.read_text(encoding="utf-8") for path in sorted(root.rglob("*.py"))}
    found: list[str] = []
    classes: dict[str, list[str]] = defaultdict(list)
    folders: dict[Path, int] = defaultdict(int)
    for path, text in files.items():
        where = path.relative_to(root.parent)
        folders[where.parent] += path.name != "__init__.py"
        if (lines := len(text.splitlines())) > FILE_LINES:
            found.append(f"{where}:1: {lines} lines (at most {FILE_LINES})")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(f"{where}:{node.lineno}")
            elif isinstance(node, Function):
                found += [f"{where}:{node.lineno}: {text}" for text in function_violations(node)]
            elif assigns_class(node):
                found.append(f"{where}:{node.lineno}: assigns __class__")
    for name, places in classes.items():
        found += [f"{place}: class {name} is also at {', '.join(x for x in places if x != place)}"
                  for place in places if len(places) > 1]  # fmt: skip
    for folder, count in folders.items():
        if count > FILES_PER_FOLDER and folder.name not in FREE_FOLDERS:
            found.append(f"{folder}:1: {count} Python files (at most {FILES_PER_FOLDER})")
    print("\n".join(sorted(found)) or "no violations")
    print(f"{sum(len(text.splitlines()) for text in files.values()):,} lines (goal: at most {TOTAL_LINES:,})")
    return bool(found)


def function_violations(node: Function) -> Iterator[str]:
    if (lines := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES:
        yield f"{node.name} has {lines} lines (at most {FUNCTION_LINES})"
    is_kernel = any("jit" in ast.unparse(decorator).split(".") for decorator in node.decorator_list)
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    count = sum(argument.arg not in ("self", "cls") for argument in arguments)
    if count > PARAMETERS and not is_kernel and node.name not in KERNEL_WRAPPERS:
        yield f"{node.name} has {count} parameters (at most {PARAMETERS})"


def assigns_class(node: ast.AST) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(isinstance(target, ast.Attribute) and target.attr == "__class__" for target in targets)


if __name__ == "__main__":
    sys.exit(main(ROOT))
