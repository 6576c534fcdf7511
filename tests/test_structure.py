"""The structure check finds what it forbids."""

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent.parent / "tools" / "check_structure.py"
RUN = "import runpy, sys, pathlib; sys.exit(runpy.run_path(sys.argv[1])['main'](pathlib.Path(sys.argv[2])))"


def check(root: Path, **files: str) -> tuple[int, list[str]]:
    (root / "src").mkdir(exist_ok=True)
    for name, text in files.items():
        (root / "src" / f"{name}.py").write_text(text)
    done = subprocess.run([sys.executable, "-c", RUN, str(PROGRAM), str(root / "src")], capture_output=True, text=True)
    assert not done.stderr
    *violations, total = done.stdout.splitlines()
    assert "goal: at most 21,000" in total
    return done.returncode, violations


def test_code_within_the_limits_passes(tmp_path: Path) -> None:
    fine = "class A:\n    def f(self, a, b, c, d, e, f, g, h):\n        pass\n"
    kernel = "@triton.jit\ndef k(a, b, c, d, e, f, g, h, i):\n    pass\n"
    assert check(tmp_path, fine=fine, kernel=kernel, full="x = 1\n" * 400) == (0, ["no violations"])


def test_each_violation_is_printed_with_its_file_and_line(tmp_path: Path) -> None:
    code, found = check(
        tmp_path,
        long="x = 1\n" * 401,
        function="def f():\n" + "    pass\n" * 60,
        parameters="\ndef f(a, b, c, d, e, *, f, g, h, i):\n    pass\n",
        swap="x.__class__ = int\n",
        one="class A: ...\n",
        two="\nclass A: ...\n",
        **{f"file{n}": "" for n in range(10)},
    )
    assert code == 1
    assert found == [
        "src/function.py:1: f has 61 lines (at most 60)",
        "src/long.py:1: 401 lines (at most 400)",
        "src/one.py:1: class A is also at src/two.py:2",
        "src/parameters.py:2: f has 9 parameters (at most 8)",
        "src/swap.py:1: assigns __class__",
        "src/two.py:2: class A is also at src/one.py:1",
        "src:1: 16 Python files (at most 14)",
    ]
