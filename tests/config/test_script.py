"""A Megatron shell script converts to what the training program would get, or not at all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.migrate import load_run_config

B = ("--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 "
     "--micro-batch-size 2 --global-batch-size 16 --lr 3e-4 --train-iters 1000 --data-path d --eval-interval 100 "
     "--bf16")  # fmt: skip
RUN = "torchrun pretrain_gpt.py"
ARRAY = f"ARGS=( {B} )"
NO_BATCH = B.replace("--global-batch-size 16", "")
NO_DATA = B.replace("--data-path d", "")
USE = f'{RUN} "${{ARGS[@]}}"'


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def write(tmp_path: Path, lines: list[str], name: str = "run.sh") -> str:
    script = tmp_path / name
    script.write_text("#!/bin/bash\n" + "\n".join(lines) + "\n")
    return str(script)


def convert(tmp_path: Path, lines: list[str], *more: str) -> RunConfig:
    return load_run_config([write(tmp_path, lines), *more])


@pytest.mark.parametrize(
    ("lines", "key", "expected"),
    [
        ([f'ARGS=" {B} "', 'ARGS="$ARGS --swiglu --seed 7"', f"{RUN} $ARGS"], "seed", 7),
        ([f"SMALL=( {B} )", "LARGE=( --num-layers 96 --hidden-size 12288 )", f'{RUN} "${{SMALL[@]}}"'], "layers", 12),
        ([f"M=( {B} )", "X=( --lr 1e-3 )", f'{RUN} "${{X[@]}}" "${{M[@]}}"'], "lr", 3e-4),
        (["declare -a G=( --group-query-attention --num-query-groups 4 )", ARRAY,
          f'{RUN} "${{ARGS[@]}}" "${{G[@]}}"'], "groups", 4),
        (['D="0.3 /a/x 0.7 /b/y"', f"ARGS=( {NO_DATA} --data-path $D )", USE], "sets", 2),
        ([ARRAY, "python train_tokenizer.py --vocab-size 777 --seed 88", USE], "seed", 1234),
        ([f"cd x && nohup {RUN} {B} --seed 7 > log 2>&1 &"], "seed", 7),
        (["MODE=b", ARRAY, 'if [ "$MODE" = a ]; then ARGS+=( --seed 2 ); fi', f'{USE} --seed 7'], "seed", 7),
        (["S=$[3+4]", f"{RUN} {B} --seed $S"], "seed", 7),
        (["S=1", "! false && S=7", f"{RUN} {B} --seed $S"], "seed", 7),
        (["S=7", "! true && S=1", f"{RUN} {B} --seed $S"], "seed", 7),
        (["X=a", "case $X in b) S=1;; a) S=7;; *) S=3;; esac", f"{RUN} {B} --seed $S"], "seed", 7),
        (["N=4", f"torchrun --nproc_per_node 8 --nnodes=$N pretrain_gpt.py {NO_BATCH}"], "batch", 64),
        ([f"torchrun --nproc-per-node=8 pretrain_gpt.py {NO_BATCH}"], "batch", 16),
        ([f"deepspeed --num_gpus 8 --num_nodes 2 pretrain_gpt.py {NO_BATCH}"], "batch", 32),
        ([f"mpirun -np 16 python pretrain_gpt.py {NO_BATCH}"], "batch", 32),
        (["GPUS=8", "W=$((GPUS * 4))", f"{RUN} {NO_BATCH} --global-batch-size $((W * 2))"], "batch", 64),
    ],
)  # fmt: skip
def test_what_is_certain_converts_as_bash_runs_it(tmp_path: Path, lines: list[str], key: str, expected: object) -> None:
    config = convert(tmp_path, lines)
    values = {
        "seed": config.seed, "layers": config.model.n_layers, "lr": config.optimizer.lr,
        "groups": config.model.n_kv_heads, "sets": len(config.data.train.mix),
        "batch": config.global_train_batch_size,
    }  # fmt: skip
    assert values[key] == expected


TENSOR = f"ARGS=( {B} --tensor-model-parallel-size $TP )"


@pytest.mark.parametrize(
    "before",
    [
        ["TP=1", "TP=$2"], ["TP=1", "TP=$(nproc)"], ["TP=1", "TP=${2:-8}"], ["TP=1", "TP=$((NODES * 2))"],
        ["TP=1", 'if [ "$SIZE" = big ]; then', "  TP=8", "fi"], ["TP=1", "[ -n $X ] && TP=8"],
        ["TP=1", "while getopts t: o; do case $o in t) TP=$OPTARG;; esac; done"], ["TP=1", "read TP"],
        ["f() {", "  TP=$1", "}", "TP=1", "f $N"], ["TP=1", "source settings.sh"], ["TP=1", "((TP = 8))"],
        ["TP=1", "for TP in $SIZES; do echo; done"], ["TP=1", "unset TP"], ["TP=1", 'eval "$(settings)"'],
        ["TP=1", "declare -i TP", "false || TP=8"], ["TP=1", "echo $((TP = 8))"], ["declare -i TP=3+4"],
        ["TP=1", "case $SIZE in big) TP=8;; esac"], ["TP=1", "case a in a) ;;& *) TP=8;; esac"],
        ["TP=1", "local TP=8"], ["TP=1", "TP=$0"],
    ],
)  # fmt: skip
def test_a_value_that_may_change_is_refused_by_its_option_until_it_is_given(tmp_path: Path, before: list[str]) -> None:
    lines = [*before, TENSOR, USE]
    with pytest.raises(ConfigError) as caught:
        convert(tmp_path, lines)
    assert f"run.sh:{len(before) + 2}: tensor_model_parallel_size = $TP: TP " in str(caught.value)
    assert "pass --set TP=... or give tensor_model_parallel_size=... after the file" in str(caught.value)
    assert convert(tmp_path, lines, "tensor_model_parallel_size=4").parallel.tensor == 4
    assert convert(tmp_path, lines, "set.TP=2").parallel.tensor == 2
    assert convert(tmp_path, lines, "TP=2").parallel.tensor == 2


def test_a_bare_name_is_a_key_first_and_a_variable_of_the_script_only_if_no_key_has_it(tmp_path: Path) -> None:
    lines = ["lr=$1", f"{RUN} {B} --lr $lr --seed $SEED"]
    config = convert(tmp_path, lines, "lr=1e-3", "SEED=7")
    assert (config.optimizer.lr, config.seed) == (1e-3, 7)


def test_a_script_that_another_runs_gets_its_arguments(tmp_path: Path) -> None:
    write(tmp_path, [f"{RUN} {B} --seed $2 --lr $1"], "inner.sh")
    config = convert(tmp_path, ["bash inner.sh 1e-3 7"])
    assert (config.optimizer.lr, config.seed) == (1e-3, 7)


def test_pick_chooses_one_of_several_runs(tmp_path: Path) -> None:
    lines = [ARRAY, f"{USE} --seed 1", f"{USE} --seed 2 --lr $LR"]
    assert convert(tmp_path, lines, "pick=3").seed == 1
    with pytest.raises(ConfigError, match=r"lines of runs: 3, 4"):
        convert(tmp_path, lines, "pick=5")


def test_options_without_effect_may_depend_on_a_condition(tmp_path: Path) -> None:
    lines = [ARRAY, "if [ -n $KEY ]; then W+=( --wandb-project x ); fi", f'{USE} "${{W[@]}}" --seed 7']
    assert convert(tmp_path, lines).seed == 7


@pytest.mark.parametrize(
    ("lines", "line", "words"),
    [
        ([f'ARGS=" {B} "', '[ "$M" = x ] && ARGS+=" --swiglu"', f"{RUN} $ARGS"], 4, '`[ "$M" = x ]` in line 3'),
        ([f'ARGS=" {B} "', 'if c; then ARGS+=" --swiglu"; fi', f"{RUN} $ARGS"], 4, "the condition `c` in line 3"),
        ([f'ARGS=" {B} "', "while c; do", 'ARGS="$ARGS --swiglu"', "done", f"{RUN} $ARGS"], 6, "loop of line 3"),
        (["source common.sh", ARRAY, f'{USE} "${{COMMON_ARGS[@]}}"'], 4, "may be set by common.sh, the file of line 2"),
        ([ARRAY, f'{USE} --swiglu $EXTRA'], 3, "arguments from $EXTRA: EXTRA is not set in the script; pass --set EXTRA="),
        ([ARRAY, f'{USE} "$@"'], 3, "arguments from $@: @ comes from the caller of the script; pass --set @="),
        ([ARRAY, f"{USE} --lr 1e-3", f"{USE} --lr 1e-5"], 3, "in lines 3, 4; choose one with --pick 3"),
        ([ARRAY, "if c; then", USE, "else", f"{USE} --seed 7", "fi"], 4, "in lines 4, 6"),
        ([ARRAY, 'torchrun $SCRIPT "${ARGS[@]}"'], 3, "a program that is not known; name it, for example with --set SCRIPT="),
        ([f"A=( {B} )", "C=( --num-layers 96 )"], 3, "no command says which is used"),
        ([ARRAY, 'torchrun pretrain_bert.py "${ARGS[@]}"'], 3, "another kind of model"),
        (['D="0.3 /a/x 0.7 /b/y"', f'ARGS=( {NO_DATA} --data-path "$D" )', USE], 3, "remove its quotes"),
        ([f"ARGS=( {NO_DATA} --data-path /data/* )", USE], 2, "give data_path=..."),
        ([f"{RUN} {B} --swiglu false"], 2, "--swiglu takes no value"),
        ([f"torchrun --nproc_per_node 8 --nnodes $N pretrain_gpt.py {NO_BATCH}"], 2, "give global_batch_size=..."),
        ([f"srun python pretrain_gpt.py {NO_BATCH}"], 2, "give global_batch_size=..."),
        ([f"torchrun $LAUNCH --nproc_per_node 8 pretrain_gpt.py {NO_BATCH}"], 2, "give global_batch_size=..."),
        (["IFS=,", ARRAY, USE], 2, "IFS changes"),
        (["readonly TP=1", "TP=8", ARRAY, USE], 3, "TP is read-only and set again"),
        ([ARRAY, "torchrun() {", "  true", "}", USE], 6, "no command that is certain to be read runs it"),
        ([ARRAY, "declare -n R=TP", USE], 3, "makes one name stand for another"),
        ([ARRAY, "trap 'ARGS=' DEBUG", USE], 3, "a trap may change variables"),
        ([ARRAY, f'cat list | xargs {USE}'], 3, "takes arguments from its input"),
        ([ARRAY, f'echo "{RUN} {B}" | bash'], 3, "a text that is piped into a shell"),
        ([ARRAY, f"docker run image '{RUN} {B}' python"], 3, "the program inside a string"),
        ([ARRAY, f"mpirun -np 1 python pretrain_gpt.py {B} : -np 1 python x.py"], 3, "starts several programs"),
        (["for a in x; do for b in y; do break 2; done; done", ARRAY, USE], 2, "break with a number is not supported"),
        (["N=$(nproc)", ARRAY, f"{USE} --lr $((N + 1))"], 4, "N needs N, which is $(nproc) in line 2"),
        ([ARRAY, f"{USE} --seed $(({2**63 - 1} + 1))"], 3, "+ 1)) is not evaluated"),  # in bash it is negative
    ],
)  # fmt: skip
def test_what_is_not_certain_is_refused_with_its_line_and_a_remedy(
    tmp_path: Path, lines: list[str], line: int, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(tmp_path, lines)
    message = str(caught.value)
    assert f"run.sh:{line}: " in message and words in message
    assert any(remedy in message for remedy in ("give ", "remove ", "only pretrain_gpt.py", "--pick ", "--set "))


@pytest.mark.parametrize("name", ["run", "run.sb", "run.txt", "run.slurm", "run.sbatch", "train.job"])
def test_a_script_is_recognized_by_what_it_says_whatever_its_suffix(tmp_path: Path, name: str) -> None:
    assert load_run_config([write(tmp_path, ["#SBATCH -N 2", ARRAY, USE], name)]).seed == 1234


def test_the_dialect_makes_a_script_of_any_file_that_is_not_yaml(tmp_path: Path) -> None:
    (tmp_path / "arguments.txt").write_text(f"ARGS=( {B} --seed 7 )\n")
    assert load_run_config([str(tmp_path / "arguments.txt")], "megatron").seed == 7


def test_a_template_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.slurm\.j2:2: this is a template; render it first"):
        load_run_config([write(tmp_path, ["TP={{ tp }}", USE], "run.slurm.j2")])


def test_a_launch_command_may_be_given_in_place_of_a_file(tmp_path: Path) -> None:
    config = load_run_config(f"torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py {NO_BATCH} --seed 7".split())
    assert (config.seed, config.global_train_batch_size) == (7, 32)


JOB = """apiVersion: v1
kind: Service
metadata: {name: etcd}
---
apiVersion: kubeflow.org/v1
kind: PyTorchJob
spec:
  pytorchReplicaSpecs:
    Worker:
      template:
        spec:
          containers:
            - name: pytorch
              env:
                - {name: SEED, value: "7"}
                - {name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
"""


@pytest.mark.parametrize("shell", [False, True])
def test_the_command_of_a_kubernetes_job_converts(tmp_path: Path, shell: bool) -> None:
    words = ["torchrun", "--nproc_per_node=8", "--nnodes=2", "pretrain_gpt.py", *NO_BATCH.split(), "--seed"]
    command = ["bash", "-c", " ".join([*words, "$SEED"])] if shell else [*words, "7"]
    job = tmp_path / "job.yaml"
    job.write_text(JOB + "              command:\n" + "".join(f'                - "{word}"\n' for word in command))
    config = load_run_config([str(job)])
    assert (config.seed, config.global_train_batch_size) == (7, 32)


def test_what_the_cluster_fills_in_is_refused_by_its_key(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB + f'              command: [bash, -c]\n              args: ["{RUN} {B} --save $POD"]\n')
    with pytest.raises(
        ConfigError, match=r"save = \$POD: POD comes from elsewhere in the cluster; pass --set POD=... or"
    ):
        load_run_config([str(job)])


def test_an_unrendered_chart_says_so(tmp_path: Path) -> None:
    chart = tmp_path / "chart.yaml"
    chart.write_text("command:\n  - torchrun\n  - pretrain_gpt.py\n  - --num-layers={{ .Values.layers }}\n")
    with pytest.raises(ConfigError, match="render it first"):
        load_run_config([str(chart)])
    chart.write_text("{{ if x }}\ncommand:\n  - torchrun\n  - pretrain_gpt.py\n  - {{ .Values.layers }}\n{{ end }}\n")
    with pytest.raises(ConfigError, match="render it first"):
        load_run_config([str(chart)])


def test_a_value_that_changes_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--set TP=8: the script does not leave TP open"):
        convert(tmp_path, ["TP=1", TENSOR, USE], "set.TP=8")


def test_the_options_reach_every_command_and_a_refusal_prints_no_recipe(
    data: Path, tmp_path: Path, ingot_here: Callable[..., Any]
) -> None:
    (tmp_path / "d").symlink_to(data / "train")
    script = write(tmp_path, [ARRAY, f"{USE} --seed $SEED", f"{USE} --seed 2"])
    options = ["--set", "SEED=7", "--pick", "3"]
    assert "seed: 7" in ingot_here("config", "convert", script, *options).stdout
    assert "seed: 7" in ingot_here("config", "show", script, *options).stdout
    launched = ingot_here("launch", "local", script, *options, "--profile", "cpu", "--dry-run").stdout
    assert '"set.SEED=7"' in launched and '"pick=3"' in launched
    refused = ingot_here("config", "convert", script, "--pick", "3", check=False)
    assert refused.returncode == 2 and refused.stdout == "" and "pass --set SEED=..." in refused.stderr
    refused = ingot_here("config", "convert", script, "--set", "SEED", check=False)
    assert refused.returncode == 2 and "write --set NAME=value" in refused.stderr
