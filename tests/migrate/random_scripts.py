"""Random bash scripts that train, and what bash passes to the training program when it runs them."""

import random
import shutil
import subprocess
from pathlib import Path

NAMES = ("TP", "PP", "GBS", "SEED", "LR")
STRINGS = ("ARGS", "OPTS", "EXTRA")
LISTS = ("MODEL", "DATA", "MORE")
# Writes each run with one call, as several may run at a time: its arguments, with marks that no script has between them.
RECORDER = """#!/bin/sh
while [ $# -gt 0 ]; do
  case $1 in
    pretrain_gpt.py|*/pretrain_gpt.py)
      shift
      [ $# = 0 ] || words=$(printf '%s\\037' "$@")
      printf 'run\\037%s\\036' "$words" >> "$RECORD"
      exit ;;
  esac
  shift
done
"""
# srun, ssh and sbatch: what follows their options and the name of the host.
LAUNCHER = """#!/bin/bash
name=${0##*/}
while :; do
  case $1 in
    --*=*|-l) shift ;;
    -n|-p|-A|--jobid|--container-image|--container-mounts) shift 2 ;;
    *) break ;;
  esac
done
[ $name = ssh ] && shift && exec bash -c "$*"
[ $name = sbatch ] && exec bash "$@"
exec "$@"
"""


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
            "$1" if self.chance(0.2) else "6", "`echo 3`" if self.chance(0.3) else '"7"', self.odd_value(name),
        )  # fmt: skip

    def odd_value(self, name: str) -> str:
        """What few scripts have, and a reader may get wrong."""
        array, string = self.pick(*LISTS), self.pick(*STRINGS)
        return self.pick(
            f"${{{name}%?}}", f"${{{name}/1/2}}", f"${{{name}:0:1}}", f"${{#{array}[@]}}", f"${{{array}[0]}}", f"${{{array}[1]}}",
            f"${{{array}}}", "$#", "$?", "$RANDOM", f"$(( {name} > 3 ? 1 : 2 ))", f"$(( {name} << 1 ))", f"$(( {name} ** 2 ))",
            f"$(({name}++))", f"$((-{name}))", f"$(( 7 / ({name} - {name} + 2) ))", f"$(( 010 + {name} ))", f"$(( {name}%3*2 ))",
            f"${{{name}:?}}", f'"${{{name}}}"\'4\'', f"{self.number()}$'\\n'" if self.chance(0.2) else f"$'{self.number()}'",
            f'"$(cat <<< {self.number()})"', "{1..2}", "~", f"${{!{name}}}" if self.chance(0.3) else f'"${name} "', f'"`echo ${name}`"',
            f'"${{UNSET:-"{self.number()}"}}"', f"${{UNSET:-${{{name}:-3}}}}", f"${{{string}:+${name}}}", '${UNSET-"a b"}', "*.none",
            f"$(( {name} == 4 && {self.number()} ))", f"${{{name}^^}}", f"${{{name}@Q}}" if self.chance(0.3) else "$((1+1))", "$[2+3]",
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
            self.odd_assignment(name, string, array, other),
        )  # fmt: skip

    def odd_assignment(self, name: str, string: str, array: str, other: str) -> str:
        number = self.number()
        return self.pick(
            f"(( {name}++ ))", f"(( {name} += 2 ))", f"printf -v {name} %d {number}", f"declare -i {name}={number}+1", f"{name}+=1",
            f"declare -x {name}={number}", f"export {name}", f'export {name}="{number}" {string}="--seed {number}"', f'{array}[1]="--seed"',
            f'{array}+=("${{{other}[@]:1}}")', f'{array}=("${{{other}[@]/--lr/--min-lr}}")', f'{array}=( $(echo --seed {number}) )',
            f'{array}=("$@")', f'{string}="$*"', f'{string}="${{{string}// / }}"', f'{string}="{name}=${name}"', f"{string}=${{{array}[@]}}",
            f"mapfile -t {array} <<< --bf16", f"declare -A MAP=( [a]={number} )\n{name}=${{MAP[a]}}", f"alias {name}=x", f"{name}= ",
            f"local {name}={number}", f"readonly {name}", f"declare -r {name}={number}", f"typeset -i {name}", f"export -n {name}",
            f"{string}=$'--seed {number}\\n--bf16'", f'{string}="--split \'9,1\' --seed {number}"', f'{array}=( "--seed {number}" --bf16 )',
            f"{string}=--seed\\ {number}", f'{string}="${{{string}:-}}"', f'{string}="${{{string}}}--x{number}"', f'{array}=( [1]=--bf16 )',
            f"{string}=`echo --seed {number}`", f"unset '{array}[0]'", f'{string}="$(printf %s --bf16)"', f'{array}=( ${{{string}:---bf16}} )',
            f'{array}=( "${string}" )', f'{array}=( --save "a  b" "" --load \'c d\' )', f'{array}+=( --name="x ${name}" )', "set -u", "set -e",
            "set -o pipefail", "shopt -s nullglob", "trap 'echo bye' EXIT", f"{name}={number} true", f"{name}={number} : ${{{name}}}",
            f"IFS=, read -r {name} PP <<< '3,4'", f"getopts a: {name}", "source ./settings.sh", ". ./settings.sh", "source ./nowhere.sh",
            '. "$(dirname "$0")"/settings.sh', f"source settings.sh; {name}={number}", "exec 2>&1", "cd /tmp && cd - >/dev/null", ": comment #",
            f'eval "{string}=\\"--seed {number} ${{{string}}}\\""', f"eval {name}=${{{name}}}", f'eval "{array}+=( --bf16 )"', f"set -- {number} a",
        )  # fmt: skip

    def test(self) -> str:
        name, other = self.pick(*NAMES), self.pick(*NAMES)
        return self.pick(
            f'[ "${name}" = 4 ]', f"[[ ${name} == {self.number()} ]]", f"[ ${name} -gt 20 ]", f'[ -z "${name}" ]', '[ -n "$FLAG" ]',
            "true", "false", f"(( {name} > {other} ))", f'[[ -n ${name} && ${other} -lt 9 ]]', "test -e /nowhere", f'! [ "${name}" -eq 3 ]',
            '[ "${NEVER_SET:-a}" = a ]', "grep -q x /dev/null", f'[[ "${name}" != "${other}" ]]', f'[ ${name} -le ${other} ]',
            self.odd_test(name, other),
        )  # fmt: skip

    def odd_test(self, name: str, other: str) -> str:
        number = self.number()
        return self.pick(
            f'[[ ${name} == {number[0]}* ]]', f'[[ ${name} =~ ^{number[0]} ]]', f'[ "${name}" = 4 -o "${other}" = 5 ]', "[ -d /tmp ]", f"[ ${name} ]",
            f'[ ! -z "${name}" ]', f'[ "x${name}" != "x{number}" ]', f'[[ ${name} -eq {number} ]]', f'[[ ! ${name} == ${other} ]]', "! false",
            '[[ -z ${FLAG+x} ]]', f'[ -z ${{{name}+x}} ]', '[ $# -gt 0 ]', '[ "$1" = a ]', f'[[ (${name} == 4) ]]', f'[[ ${name} < ${other} ]]',
            f'test ${name} = {number}', f'test "${name}" -lt 30 && true', "type torchrun >/dev/null", f'[ ${name} \\> 3 ]', f'[[ -v {name} ]]',
            f"(( {name} == {number} ))", f'[[ "${name}" == "$UNSET" ]]', f'[ "${{{name}:-}}" ]', f"let '{name} > 3'", f'[[ ${name} == @(4|5) ]]', ": ",
            f'[[ ${name} == 4 || ${other} == *"{number[0]}"* ]]', f'[[ -n $UNSET && ${{{name}:=3}} ]]', f'[[ ! ${name} == *{number[0]} && -n $UNSET ]]',
            '[ -n "${MODEL[*]}" ]', '[ "${#MODEL[@]}" -gt 1 ]', '[[ $OPTS == *seed* ]]', '[ "$OPTS" == "" ]', f'{{ [ "${name}" = 4 ]; }}', "( false )",
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
            self.odd_statement(name, body, other, function),
            f"set -- {self.options()}", f"if {self.test()}; then\n{body}\nexit 1\nfi" if self.chance(0.3) else "shift 2>/dev/null",
        )  # fmt: skip

    def odd_statement(self, name: str, body: str, other: str, function: str) -> str:
        number = self.number()
        return self.pick(
            f"until {self.test()}; do\n{body}\nbreak\ndone", f"for (( i=0; i<2; i++ )); do\n{body}\ndone", f"for {name} in $(seq 2); do {other}; done",
            f"i=0\nwhile [ $i -lt 2 ]; do\n{body}\ni=$((i+1))\ndone", f"for i in 1 2 3; do\n[ $i = 2 ] && continue\n{body}\ndone", f"{{\n{body}\n}} > /dev/null",
            f"for i in 1 2 3; do\nif {self.test()}; then break; fi\n{body}\ndone", f"{self.test()} && {{ {other}; }} || {{ {self.assignment()}; }}", f"{other} && true",
            "while [[ $# -gt 0 ]]; do\ncase $1 in\n--tp) TP=$2; shift 2;;\n*) shift;;\nesac\ndone", f"case ${name} in 1*) {other};; [2-5]*) {self.assignment()};; esac",
            f"case a in a) {other} ;;& *) {self.assignment()} ;; esac", f"case \"${name}\" in '4'|\"5\") {other} ;; {number}) {self.assignment()} ;; esac", f"( {other} ) || true",
            f"{function}() {{ {name}=$1; shift; OPTS=\"$*\"; }}\n{function} {number} --seed {number}", f"{function}() {{ return 1; }}\n{function} && {other}", f"wait; {other}",
            f"{function}() {{\nif {self.test()}; then return 0; fi\n{body}\n}}\n{function} || {other}", f"{function}() (\n{body}\n)\n{function}", f"{other} &\nwait",
            f"{function}() {{ local OPTS; {other}; }}\n{function}\n{function}", f"if ! {self.test()}; then {other}; fi", f"echo 1 | while read {name}; do {other}; done", f"! {other}",
            f"while read -r {name}; do\n{body}\ndone < <(echo 3)", f"{name}=$( {other}; echo {number} )", f"for {name}; do {other}; done", f"cat <<-EOF | cat\n\t${name}\n\tEOF",
            'if [ -n "$FLAG" ]; then EXTRA="$EXTRA --log-throughput"; fi', '[ -n "$FLAG" ] && OPTS="--wandb-project x"',
            f"bash -c '{name}=3'",  f"{name}={number} bash -c 'echo ${name}'", "if [ -f ./settings.sh ]; then source ./settings.sh; fi", f"time {other}", f"[ 1 = 1 ] && {other}",
            "for f in ./settings*.sh; do . $f; done", f"if {self.test()} && {self.test()}; then\n{body}\nfi", f"if {self.test()} || {self.test()}; then {other}; fi", f"exec 3>&1; {other}",
            f"if [ {number} -eq {number} ]; then\n{body}\nelse\n{other}\nfi", f"if false; then\n{body}\nelif true; then {other}\nfi", f"{function}() {{ exit 3; }}\n{self.test()} || {function}",
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
            self.odd_use(array, string),
        )

    def odd_use(self, array: str, string: str) -> str:
        name = self.pick(*NAMES)
        return self.pick(
            f'"${{{array}[*]}}"', f"${{{array}[*]}}", f"${{{array}[0]}} ", f'${{{array}[@]+"${{{array}[@]}}"}}', f'${{{array}:+"${{{array}[@]}}"}}', f"${{{string}:-}}",
            f"${{{string}:+${string} --seed 5}}", f'"${string}"', f"${{{string}[@]}}", f"--seed=${name}", '--save "$PWD/x"', f'--save "a ${name} b"', "$@",
            f"--lr ${{{name}:-1}}e-4", "$(echo --bf16)", f"--seed $((${name}*2))", "--save x{1,2}", "--data-path a b c", '--save ~/x', "--save 'it''s'", '--save "\\$x"',
            "{--a,--b}", f"--seed $(( {name} + ${{#{array}[@]}} ))", f"${{{array}[@]:0:2}}", "--load $'a b'", "# comment", "--save a#b", '--save "$(pwd)"', "--x *",
        )  # fmt: skip

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
            f"CMD=( {launch} {words} )\n\"${{CMD[@]}}\"", f"bash <<EOF\n{launch} {quoted}\nEOF", self.odd_run(launch, words, quoted),
        )  # fmt: skip

    def odd_run(self, launch: str, words: str, quoted: str) -> str:
        """Runs in other shells, in functions, several at once."""
        name = self.pick(*NAMES)
        return self.pick(
            f"sh -c '{launch} $0 $1' --seed 3" if self.chance(0.5) else f"bash -c 'exec {launch} \"$@\"' x {words}", f"bash <<'EOF'\n{launch} {quoted}\nEOF",
            f'export OPTS ARGS {name}\nbash -c \'{launch} $OPTS --seed ${name}\'', f'OPTS="--seed 4" bash -c "{launch} \\$OPTS $ARGS"', f"env {name}=3 {launch} {words}",
            f"{name}=3 {launch} {words}", f"nohup {launch} {words} > /dev/null 2>&1 &\nwait $!", f"( cd . ; {launch} {words} )", f"{{ {launch} {words}; }} 2>&1 | tee /dev/null",
            f"{launch} {words} || {launch} --seed 9", f"{launch} {words}; {launch} {words}", f"for {name} in 1 2; do {launch} {words}; done", f"if {launch} {words}; then echo done; fi",
            f"run() {{ {launch} \"$@\" {words}; }}\nrun --seed 6", f'CMD="{launch}"\n$CMD {words}', f'L="{launch}"; CMD="$L {quoted}"\nbash -c "$CMD"', f'eval "{launch} {quoted}"',
            f'cmd() {{ echo "$@"; "$@"; }}\ncmd {launch} {words}', f"while true; do {launch} {words}; break; done", f"time {launch} {words}", f'P=pretrain_gpt.py\npython $P {words}',
            f"set -x\n{launch} {words}\nset +x", f"exec > >(cat)\n{launch} {words}", f"echo {launch} {words} && {launch} {words}", f"! {launch} {words}", f"sudo {launch} {words}",
            f"case $MODE in a) {launch} --seed 8;; *) {launch} {words};; esac", f"{launch} \\\n  {words} \\\n", f"srun -n 1 bash -c '{launch} '\"$OPTS\"", f"OUT=`{launch} {quoted}`",
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


def write_tools(folder: Path) -> Path:
    """Programs that record how they are called, and launchers that call them."""
    folder.mkdir()
    for name in ("torchrun", "python", "python3", "deepspeed"):
        (folder / name).write_text(RECORDER)
    for name in ("srun", "ssh", "sbatch"):
        (folder / name).write_text(LAUNCHER)
    for tool in folder.iterdir():
        tool.chmod(0o755)
    return folder


def run_with_bash(folder: Path, scripts: list[str]) -> list[list[list[str]]]:
    """The arguments of each run of each script."""
    tools, record = write_tools(folder / "tools"), folder / "record"
    for i, script in enumerate(scripts):
        (folder / f"s{i}.sh").write_text(script)
    (folder / "settings.sh").write_text('TP=3\nOPTS="$OPTS --log-interval $PP"\n[ -n "$FLAG" ] && return\nPP=2\n')
    loop = f"for i in {{0..{len(scripts) - 1}}}; do printf '\\035' >> $RECORD; bash s$i.sh; done </dev/null >/dev/null 2>&1"
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "RECORD": str(record), "LC_ALL": "C"}
    subprocess.run([shutil.which("bash") or "bash", "-c", loop], cwd=folder, env=environment, check=False)
    return [
        [run.split("\037")[1:-1] for run in part.split("\036")[:-1]] for part in record.read_text().split("\035")[1:]
    ]
