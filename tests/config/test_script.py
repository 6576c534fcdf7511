"""A Megatron shell script converts to what the training program would get, or not at all."""

from pathlib import Path

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


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def convert(tmp_path: Path, lines: list[str], *more: str) -> RunConfig:
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/bash\n" + "\n".join(lines) + "\n")
    return load_run_config([str(script), *more])


@pytest.mark.parametrize(
    ("lines", "key", "expected"),
    [
        ([f'ARGS=" {B} "', 'ARGS="$ARGS --swiglu --seed 7"', f"{RUN} $ARGS"], "seed", 7),
        ([f'ARGS=" {B} "', 'ARGS="${ARGS} \\', '  --seed 7"', f"{RUN} $ARGS"], "seed", 7),
        ([f'ARGS="{B}"', 'ARGS+=" --seed 7"', f"{RUN} ${{ARGS}}"], "seed", 7),
        ([ARRAY, "ARGS+=(--seed 7)", f'{RUN} "${{ARGS[@]}}"'], "seed", 7),
        ([f"SMALL=( {B} )", "LARGE=( --num-layers 96 --hidden-size 12288 )", f'{RUN} "${{SMALL[@]}}"'], "layers", 12),
        ([f"M=( {B} )", "X=( --lr 1e-3 )", f'{RUN} "${{X[@]}}" "${{M[@]}}"'], "lr", 3e-4),
        (['OPT="--lr 1e-4"', f'ARGS="{B}"', f"{RUN} $ARGS --lr 3e-4 $OPT"], "lr", 1e-4),
        (["declare -a G=( --group-query-attention --num-query-groups 4 )", ARRAY,
          f'{RUN} "${{ARGS[@]}}" "${{G[@]}}"'], "groups", 4),
        (["readonly G=( --group-query-attention --num-query-groups 4 )", ARRAY,
          f'{RUN} "${{ARGS[@]}}" "${{G[@]}}"'], "groups", 4),
        (['D="0.3 /a/x 0.7 /b/y"', f"ARGS=( {NO_DATA} --data-path $D )", f'{RUN} "${{ARGS[@]}}"'], "sets", 2),
        ([ARRAY, "python train_tokenizer.py --vocab-size 777 --seed 88", f'{RUN} "${{ARGS[@]}}"'], "seed", 1234),
        (["cat <<EOF > o.sh", "ARGS=( --seed 4242 )", "EOF", ARRAY, f'{RUN} "${{ARGS[@]}}"'], "seed", 1234),
        ([f"ARGS=( {B} --seed 5 )", ARRAY, f'{RUN} "${{ARGS[@]}}"'], "seed", 1234),
        (["SEED=7 # don't", "export A=1 SEED=8", f"{RUN} {B} \\", "  --seed $SEED 2>&1 | tee log"], "seed", 8),
        ([f"cd x && nohup {RUN} {B} --seed 7 > log 2>&1 &"], "seed", 7),
        (["SCRIPT=/x/pretrain_gpt.py", f'CMD="torchrun $SCRIPT {B} --seed 7"', "echo $CMD", "eval $CMD"], "seed", 7),
        (["f() {", "  echo x", "}", "source venv/bin/activate", f"{RUN} {B} --seed 7"], "seed", 7),
        (["N=4", f"torchrun --nproc_per_node 8 --nnodes=$N pretrain_gpt.py {NO_BATCH}"], "batch", 64),
        ([f"torchrun --nproc-per-node=8 pretrain_gpt.py {NO_BATCH}"], "batch", 16),
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
USE = f'{RUN} "${{ARGS[@]}}"'


@pytest.mark.parametrize(
    "before",
    [
        ["TP=1", "TP=$2"], ["TP=1", "TP=$(nproc)"], ["TP=1", "TP=${2:-8}"], ["TP=1", "TP=$((4 * 2))"],
        ["TP=1", 'if [ "$SIZE" = big ]; then', "  TP=8", "fi"], ["TP=1", "[ -n $X ] && TP=8"],
        ["TP=1", "while getopts t: o; do case $o in t) TP=$OPTARG;; esac; done"], ["TP=1", "read TP"],
        ["f() {", "  TP=8", "}", "TP=1", "f"], ["TP=1", "source settings.sh"], ["TP=1", "((TP = 8))"],
        ["TP=1", "for TP in 1 2; do echo; done"], ["TP=1", "unset TP"], ["TP=1", 'eval "TP=8"'],
        ["TP=1", "declare -i TP", "false || TP=8"], ["TP=1", "function f {", "TP=8", "}", "f"],
        ["TP=1", "echo $((TP = 8))"], ["TP=1", "declare -n R=TP", "R=8"], ["declare -i TP=3+4"],
        ["readonly TP=1", "TP=8"], ["TP=1", "trap 'TP=8' DEBUG"],
    ],
)  # fmt: skip
def test_a_value_that_may_change_is_refused_by_its_option_until_it_is_given(tmp_path: Path, before: list[str]) -> None:
    lines = [*before, TENSOR, USE]
    with pytest.raises(ConfigError) as caught:
        convert(tmp_path, lines)
    assert f"run.sh:{len(before) + 2}: tensor_model_parallel_size = $TP: " in str(caught.value)
    assert "give tensor_model_parallel_size=... after the file" in str(caught.value)
    assert convert(tmp_path, lines, "tensor_model_parallel_size=4").parallel.tensor == 4


@pytest.mark.parametrize(
    ("lines", "line", "words"),
    [
        ([f'ARGS=" {B} "', '[ "$M" = x ] && ARGS+=" --swiglu"', f"{RUN} $ARGS"], 4, "takes arguments from $ARGS"),
        ([f'ARGS=" {B} "', 'if c; then ARGS+=" --swiglu"; fi', f"{RUN} $ARGS"], 4, "condition, loop or function of line 3"),
        ([f'ARGS=" {B} "', "while c; do", 'ARGS="$ARGS --swiglu"', "done", f"{RUN} $ARGS"], 6, "of line 3"),
        ([ARRAY, "for n in a b; do", f'  ssh $n {RUN} "${{ARGS[@]}}" --seed 7', "done"], 4, "of line 3"),
        (["source common.sh", ARRAY, f'{RUN} "${{ARGS[@]}}" "${{COMMON_ARGS[@]}}"'], 4, "from $COMMON_ARGS[@]"),
        ([ARRAY, f'{RUN} "${{ARGS[@]}}" --swiglu $EXTRA'], 3, "takes arguments from $EXTRA"),
        ([ARRAY, f'{RUN} "${{ARGS[@]}}" "$@"'], 3, "takes arguments from $@"),
        ([ARRAY, f'{RUN} "${{ARGS[@]}}" --lr 1e-3', f'{RUN} "${{ARGS[@]}}" --lr 1e-5'], 3, "in lines 3, 4"),
        ([ARRAY, "if c; then", USE, "else", f"{USE} --seed 7", "fi"], 4, "in lines 4, 6"),
        ([ARRAY, f"srun bash -c \"{RUN} ${{ARGS[*]}}\""], 3, "in a string"),
        ([ARRAY, "bash <<EOF", USE, "EOF"], 4, "another script"),
        ([ARRAY, f'OUT=$({RUN} "${{ARGS[@]}}")'], 3, "a substitution"),
        ([ARRAY, 'torchrun $SCRIPT "${ARGS[@]}"'], 3, "which command trains"),
        ([f"A=( {B} )", "C=( --num-layers 96 )"], 3, "no command says which is used"),
        ([ARRAY, 'torchrun pretrain_bert.py "${ARGS[@]}"'], 3, "another kind of model"),
        (['D="0.3 /a/x 0.7 /b/y"', f"ARGS=( {NO_DATA} --data-path \"$D\" )", USE], 3, "leave out its quotes"),
        ([f"ARGS=( {NO_DATA} --data-path /data/* )", USE], 2, "give data_path=..."),
        ([f"{RUN} {B} --swiglu false"], 2, "--swiglu takes no value"),
        ([f"torchrun --nproc_per_node 8 --nnodes $N pretrain_gpt.py {NO_BATCH}"], 2, "give global_batch_size=..."),
        ([f"srun python pretrain_gpt.py {NO_BATCH}"], 2, "give global_batch_size=..."),
        ([f"torchrun $LAUNCH --nproc_per_node 8 pretrain_gpt.py {NO_BATCH}"], 2, "give global_batch_size=..."),
        (["IFS=,", ARRAY, USE], 2, "IFS changes"),
        ([ARRAY, "torchrun() {", "  true", "}", f'{RUN} "${{ARGS[@]}}" ${{EXTRA[0]}}'], 6, "takes arguments from"),
    ],
)  # fmt: skip
def test_what_is_not_certain_is_refused_with_its_line_and_a_remedy(
    tmp_path: Path, lines: list[str], line: int, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(tmp_path, lines)
    message = str(caught.value)
    assert f"run.sh:{line}: " in message and words in message
    assert "give " in message or "leave " in message or "only pretrain_gpt.py" in message
