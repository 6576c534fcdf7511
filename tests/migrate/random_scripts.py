"""Random bash scripts that train, and what bash passes to the training program when it runs them."""

import random
import shutil
import subprocess
from pathlib import Path

NAMES = ("TP", "PP", "GBS", "SEED", "LR")
STRINGS = ("ARGS", "OPTS", "EXTRA")
LISTS = ("MODEL", "DATA", "MORE")
# Writes each run as a line: script, then its arguments, with marks that no script has between them.
RECORDER = """#!/bin/sh
while [ $# -gt 0 ]; do
  case $1 in pretrain_gpt.py|*/pretrain_gpt.py) shift; { printf 'run\\037'; [ $# = 0 ] || printf '%s\\037' "$@"; printf '\\036'; } >> "$RECORD"; exit ;; esac
  shift
done
"""
LAUNCHER = '#!/bin/bash\n[ $1 = -n ] || [ $1 = h1 ] && [ $1 = h1 ] && shift && exec bash -c "$*"\n[ $1 = -n ] && shift 2\nexec "$@"\n'


class Writer:
    """Writes one script; every choice comes from `seed`."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.depth = 0

    def pick(self, *choices: str) -> str:
        return self.random.choice(choices)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def number(self) -> str:
        return str(self.random.randint(1, 64))

    def value(self) -> str:
        """The right side of a number's assignment."""
        name = self.pick(*NAMES)
        return self.pick(
            self.number(), self.number(), self.number(), f'"{self.number()}"', f"'{self.number()}'", f"${name}", f"${{{name}}}",
            f"$(({name} * {self.number()}))", f"$((${name} + {self.number()}))", f"$(( ({self.number()} + {name}) / 2 ))",
            f"$(({name} % 5 - 2))", f"${{{name}:-{self.number()}}}", f"${{UNSET_{self.number()}:-{self.number()}}}",
            f"${{{name}:+{self.number()}}}", f"${{{name}-3}}", f'"${{NEVER:={self.number()}}}"', f"$(echo {self.number()})",
            "$1" if self.chance(0.2) else "6", "`echo 3`" if self.chance(0.3) else '"7"',
        )  # fmt: skip

    def option(self) -> str:
        name = self.pick(*NAMES)
        number = self.pick(
            self.number(), self.number(), f"${name}", f'"${name}"', f"${{{name}}}", f"$(({name}+1))", f"${{{name}:-9}}"
        )
        return self.pick(
            f"--seed {number}", f"--num-layers {number}", f"--lr 0.{self.number()}", "--bf16", "--swiglu", f"--train-iters={number}",
            "--split 90,8,2", "--data-path 0.3 a 0.7 b", f"--tensor-model-parallel-size {number}", f"--save 'a b'\\ c{number}",
            "--data-path my\\ data", f"--log-interval {number}", f"--wandb-project p{number}", "--log-throughput",
        )  # fmt: skip

    def options(self) -> str:
        return " ".join(self.option() for _ in range(self.random.randint(0, 3)))

    def string(self) -> str:
        """Options for a string between double quotes."""
        plain = self.options().replace("\\ ", "_").replace("'", "").replace('"', "")
        broken = plain.replace(" --", " \\\n  --") if self.chance(0.3) else plain
        name = self.pick(*STRINGS)
        return self.pick(
            broken, broken, f"\n  {broken}\n", f"${name} {broken}", f"${{{name}}} {broken}", f"{broken} ${name}"
        )

    def assignment(self) -> str:
        name, string, array = self.pick(*NAMES), self.pick(*STRINGS), self.pick(*LISTS)
        other = self.pick(*LISTS)
        items = self.options().replace(" --", self.pick(" --", "\n  --", " # a comment\n  --"))
        close = "\n" if "\n" in items or self.chance(0.3) else " "
        return self.pick(
            f"{name}={self.value()}", f"{name}={self.value()}", f"export {name}={self.value()}", f"declare {name}={self.value()}",
            f"{name}={self.value()} {self.pick(*NAMES)}={self.value()}", f': "${{{name}:={self.number()}}}"', f": ${{{name}:=5}}",
            f'{string}="{self.string()}"', f'{string}="{self.string()}"', f'{string}+=" {self.string()}"',
            f'{string}="${string} {self.string()}"', f"{string}='--seed 3 --bf16'", f'{string}=""', f"{string}=${string}",
            f"{array}=( {items}{close})", f"{array}=( {items}{close})", f"{array}+=( {self.options()} )",
            f'{array}=( "${{{other}[@]}}" {self.options()} )', f"{array}=( ${{{other}[@]}} ${string} )", f"declare -a {array}=( {items}{close})",
            f'{array}+=( ${string} "${name}x" )', f"typeset {name}={self.number()}", f'{string}="${{{array}[*]}} --lr 2"',
            f"{array}=( )", f"readonly R{self.number()}={self.number()}", f'{string}="${{{array}[@]}}"', f"{array}[0]=--bf16",
            f"unset {self.pick(name, string, array)}", f"read {name} <<< 5", f"(( {name} = 3 ))", f"let {name}=4",
        )  # fmt: skip

    def test(self) -> str:
        name, other = self.pick(*NAMES), self.pick(*NAMES)
        return self.pick(
            f'[ "${name}" = 4 ]', f"[[ ${name} == {self.number()} ]]", f"[ ${name} -gt 20 ]", f'[ -z "${name}" ]', '[ -n "$FLAG" ]',
            "true", "false", f"(( {name} > {other} ))", f'[[ -n ${name} && ${other} -lt 9 ]]', "test -e /nowhere", f'! [ "${name}" -eq 3 ]',
            '[ "${NEVER_SET:-a}" = a ]', "grep -q x /dev/null", f'[[ "${name}" != "${other}" ]]', f'[ ${name} -le ${other} ]',
        )  # fmt: skip

    def statement(self) -> str:
        if self.depth > 2 or self.chance(0.72):
            return self.assignment()
        self.depth += 1
        body = "\n".join(self.statement() for _ in range(self.random.randint(1, 2)))
        other = self.statement()
        name = self.pick(*NAMES)
        self.depth -= 1
        function = f"f{self.number()}"
        return self.pick(
            f"if {self.test()}; then\n{body}\nfi", f"if {self.test()}; then {other}; fi", f"if {self.test()}; then\n{body}\nelse\n{other}\nfi",
            f"if {self.test()}\nthen\n{body}\nelif {self.test()}; then\n{other}\nfi", f"{self.test()} && {self.assignment()}",
            f"{self.test()} || {self.assignment()}", f"for {name} in {self.number()} {self.number()}; do\n{body}\ndone",
            f"for i in $(echo 1 2); do\n{body}\ndone", f"case ${name} in\n 4|5) {other} ;;\n *) {self.assignment()} ;;\nesac",
            f"{function}() {{\n{body}\n}}\n{function}", f"{function}() {{\n local {name}={self.number()}\n{body}\n}}\n{function} --swiglu",
            f"( {other} )", f"{{ {other}; }}", f"{other} | cat", f'eval "{name}={self.number()}"', f"cat <<EOF > /dev/null\n{body}\nEOF",
            f"if {self.test()}; then {self.pick(*LISTS)}+=( --wandb-project x --log-throughput ); fi", f"cat <<'EOF' >/dev/null\n{name}=3\nEOF",
            f"while {self.test()}; do\n{body}\nbreak\ndone", f"function {function} {{\n[ \"$1\" = 1 ] && return\n{body}\n}}\n{function} {self.number()}",
            f"set -- {self.options()}", f"if {self.test()}; then\n{body}\nexit 1\nfi" if self.chance(0.3) else "shift 2>/dev/null",
        )  # fmt: skip

    def use(self) -> str:
        array, string = self.pick(*LISTS), self.pick(*STRINGS)
        return self.pick(
            f'"${{{array}[@]}}"',
            f'"${{{array}[@]}}"',
            f"${{{array}[@]}}",
            f"${string}",
            f"${{{string}}}",
            self.option(),
        )

    def run(self) -> str:
        words = " ".join(self.use() for _ in range(self.random.randint(1, 4)))
        words = (
            words.replace(" ", " \\\n  ", 1) if self.chance(0.3) and "'" not in words and "\\ " not in words else words
        )
        words += ' "$@"' if self.chance(0.1) else ""
        launch = self.pick(
            "torchrun --nproc_per_node 8 pretrain_gpt.py", "python pretrain_gpt.py", "python3 -u megatron/pretrain_gpt.py",
            "A=1 srun -n 1 torchrun pretrain_gpt.py", "python -m torch.distributed.launch $LAUNCH pretrain_gpt.py",
        )  # fmt: skip
        quoted = words.replace('"', "").replace("'", "").replace("\\", "").replace("[@]", "[*]")
        return self.pick(
            f"{launch} {words}", f"{launch} {words}", f"{launch} {words} 2>&1 | cat", f"{launch} {words} &\nwait", f"exec {launch} {words}",
            f'CMD="{launch} {quoted}"\n$CMD', f'CMD="{launch} {quoted}"\neval $CMD', f'bash -c "{launch} {quoted}"', f'srun -n 1 bash -c "{launch} {quoted}"',
            f"OUT=$({launch} {words})", f"cd . && {launch} {words}", f"if {self.test()}; then {launch} {words}; fi",
            f'for n in h1; do ssh $n "{launch} {quoted}"; done', f"main() {{\n{launch} {words}\n}}\nmain --seed 4",
            f"bash -c '{launch} {quoted}'" if self.chance(0.3) else f"{launch} {words}",
            f"CMD=( {launch} {words} )\n\"${{CMD[@]}}\"", f"bash <<EOF\n{launch} {quoted}\nEOF",
        )  # fmt: skip

    def script(self) -> str:
        start = (
            [f"{name}={self.number()}" for name in NAMES]
            + [f'{name}=""' for name in STRINGS]
            + [f"{name}=()" for name in LISTS]
        )
        start = [line for line in start if self.chance(0.95)]
        body = [self.statement() for _ in range(self.random.randint(1, 7))]
        lines = [*start, *body, self.run(), *([self.assignment()] if self.chance(0.3) else [])]
        return "\n".join(lines) + "\n"


def run_with_bash(folder: Path, scripts: list[str]) -> list[list[list[str]] | None]:
    """The arguments of each run of each script; None where bash itself stops at an error of syntax."""
    tools = folder / "tools"
    tools.mkdir()
    for name in ("torchrun", "python", "python3"):
        (tools / name).write_text(RECORDER)
    for name in ("srun", "ssh"):
        (tools / name).write_text(LAUNCHER)
    for tool in tools.iterdir():
        tool.chmod(0o755)
    record = folder / "record"
    for i, script in enumerate(scripts):
        (folder / f"s{i}.sh").write_text(script)
    loop = f"for i in {{0..{len(scripts) - 1}}}; do printf '\\035' >> $RECORD; bash s$i.sh; done </dev/null >/dev/null 2>&1"
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "RECORD": str(record), "LC_ALL": "C"}
    subprocess.run([shutil.which("bash") or "bash", "-c", loop], cwd=folder, env=environment, check=False)
    found: list[list[list[str]] | None] = []
    for part in record.read_text().split("\035")[1:]:
        runs = [run.split("\037")[1:-1] for run in part.split("\036")[:-1]]
        found.append(runs)
    return found
