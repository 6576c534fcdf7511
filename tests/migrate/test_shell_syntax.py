"""What is not bash, or not of the part that is read, is refused with the line where it begins."""

import pytest

from ingot.errors import ConfigError
from ingot.migrate.shell.parser import parse


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("if true; then\n  echo a\n", 2, "this if has no fi"),
        ("if true; then echo a; else\n  echo b\n", 2, "this if has no fi"),
        ("if true\necho a; fi", 2, "what begins here has no then"),
        ("while true\necho a; done", 2, "what begins here has no do"),
        ("for x in a b; do\n  echo $x\n", 2, "what begins here has no done"),
        ("for ((i = 0; i < 2; i++)) { echo $i; }", 2, "a loop with braces"),
        ("case $x in\n  a) echo a ;;\n", 2, "this case has no esac"),
        ("case $x\n  a) echo a ;; esac", 2, "what begins here has no in"),
        ("case $x in a echo b ;; esac", 2, "what begins here has no )"),
        ("run() {\n  echo a\n", 2, "what begins here has no }"),
        ("function\n", 2, "a function needs a name"),
        ("(echo a\n", 2, "what begins here has no )"),
        ("coproc echo a", 2, "coproc"),
        ("echo a | | echo b", 2, "a command is missing"),
        ("echo a &&", 2, "a command is missing"),
        ("ARGS=( a\n  b\n", 2, "( is never closed"),
        ("[[ -n $x\n", 2, "[[ is never closed"),
        ("echo a >", 2, "> names no file"),
        ("cat < | wc", 2, "< names no file"),
        ("cat <<EOF\ntext\n", 2, "the here-document has no EOF at its end"),
        ('echo "a\n', 2, '" is never closed'),
        ("echo 'a\n", 2, "' is never closed"),
        ("echo `date\n", 2, "` is never closed"),
        ("echo ${x\n", 2, "${ is never closed"),
        ("echo $((1 + 2\n", 2, "is never closed"),
        ("echo a\necho )", 3, "unexpected ')'"),
        ("echo a\nfi", 3, "unexpected 'f'"),
    ],
)
def test_broken_syntax_names_the_line_where_it_begins(text: str, line: int, message: str) -> None:
    with pytest.raises(ConfigError) as found:
        parse(f"echo first\n{text}", "run.sh")
    assert str(found.value).startswith(f"run.sh:{line}: "), str(found.value)
    assert message in str(found.value)
