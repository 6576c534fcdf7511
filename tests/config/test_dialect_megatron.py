"""Arguments of Megatron's pretrain_gpt.py mean here what they mean there. Numbers are the references'."""

import math
import shlex
from pathlib import Path

import pytest
from decay import decayed

from ingot.config.durations import BatchClock
from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.migrate import load_run_config, translate
from ingot.model.shapes import parameter_shapes
from ingot.training.schedule import lr_multiplier

FILES = Path(__file__).parent / "megatron"
GPT3_175B = [str(FILES / "gpt3-175b.sh"), "save=ckpt", "load=ckpt", "tensorboard-dir=tb"]
# file: layers, width, heads, peak lr, global batch, tensor parallel, padded vocabulary, duration
GPT3 = {
    "gpt3-125m.sh": (12, 768, 12, 6e-4, 256, 1, 50304, "572204ba"),
    "gpt3-350m.yaml": (24, 1024, 16, 3e-4, 256, 1, 50304, "500000ba"),
    "gpt3-760m.yaml": (24, 1536, 16, 2.5e-4, 256, 1, 50304, "500000ba"),
    "gpt3-1.3b.sh": (24, 2048, 16, 2e-4, 512, 1, 50304, "286102ba"),
    "gpt3-2.7b.yaml": (32, 2560, 32, 1.6e-4, 512, 1, 50304, "500000ba"),
    "gpt3-6.7b.sh": (32, 4096, 32, 1.2e-4, 1024, 2, 50432, "143051ba"),
    "gpt3-13b.yaml": (40, 5120, 40, 1e-4, 1024, 8, 51200, "500000ba"),
    "gpt3-175b.sh": (96, 12288, 96, 6e-5, 1536, 8, 51200, "500000ba"),
}
SMALL = shlex.split(
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 4 --global-batch-size 64 --train-iters 1000 --lr 1e-4 --tensor-model-parallel-size 2 --bf16 "
    "--train-data-path 0.3 A 0.7 B --valid-data-path V"
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def load(name: str, *more: str) -> RunConfig:
    return load_run_config([*arguments_of(name), *more])


def arguments_of(name: str) -> list[str]:
    """What is needed to convert a file: some leave open where to save, or how large the batch is."""
    return GPT3_175B if "175b" in name else [str(FILES / name), *["global-batch-size=8"] * name.startswith("linear")]


def error_of(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run_config(arguments)
    return str(caught.value)


@pytest.mark.parametrize("name", GPT3)
def test_gpt3_scripts_mean_what_they_mean_there(name: str) -> None:
    config = load(name)
    layers, width, heads, lr, batch, tensor, rows, duration = GPT3[name]
    model = config.model
    assert (model.n_layers, model.d_model, model.n_heads, model.vocab_size, model.vocab_rows) == (
        layers,
        width,
        heads,
        rows,
        rows,
    )
    assert model.parameters == rows * width + 2048 * width + layers * (12 * width**2 + 13 * width) + 2 * width
    assert (model.init, model.residual_init, model.init_std) == ("normal", "scaled", 0.006 if "175b" in name else 0.02)
    assert (model.positions, model.activation, model.tie_word_embeddings) == ("learned", "gelu_tanh", True)
    assert (model.emb_pdrop, model.resid_pdrop, model.attn_pdrop, model.norm_eps) == (0.1, 0.1, 0.1, 1e-5)
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.betas) == ("adamw", lr, (0.9, 0.95))
    assert (config.optimizer.weight_decay, config.optimizer.eps, config.gradient_clipping) == (0.1, 1e-8, 1.0)
    assert (config.global_train_batch_size, config.parallel.tensor, str(config.max_duration)) == (
        batch,
        tensor,
        duration,
    )
    assert (config.seed, config.max_seq_len, config.scheduler.name) == (1234, 2048, "cosine_with_warmup")
    assert config.eval_subset_num_batches * (config.device_eval_batch_size or 0) == 10 * batch


def megatron_lr(
    step: float, warmup: float, end: float, lr: float, min_lr: float, style: str, anneal: float = 0, init: float = 0
) -> float:
    """Steps are samples there; iterations do for a constant batch."""
    if warmup and step <= warmup:
        return init + (lr - init) * step / warmup
    if style == "inverse-square-root":
        return max(min_lr, lr * math.sqrt(warmup / step))
    if step > end:
        return min_lr
    ratio = (step - warmup) / (end - warmup)
    coefficient = {"linear": 1 - ratio, "cosine": 0.5 * (math.cos(math.pi * ratio) + 1)}.get(style, 1.0)
    if style.startswith("WSD") and step > end - anneal:
        done = (step - (end - anneal)) / anneal
        coefficient = {
            "minus_sqrt": 1 - math.sqrt(done),
            "exponential": 2 * 0.5**done - 1,
            "linear": 1 - done,
            "cosine": 0.5 * (math.cos(math.pi * done) + 1),
        }[style.split()[1]]
    return min_lr + coefficient * (lr - min_lr)


@pytest.mark.parametrize(
    ("name", "style", "warmup", "end", "lr", "min_lr", "total"),
    [
        ("gpt3-175b.sh", "cosine", 430, 430000, 6e-5, 6e-6, 500000),
        ("gpt3-350m.yaml", "cosine", 430, 430000, 3e-4, 3e-5, 500000),
        ("gpt3-125m.sh", "cosine", 183105 / 256, 126953125 / 256, 6e-4, 6e-5, 572204),
        ("llama-8b.sh", "cosine", 500, 100000, 1.5e-4, 1e-5, 100000),
        ("linear-untied.yaml", "linear", 100, 1000, 1e-3, 0.0, 1000),
        ("wsd.yaml", "WSD minus_sqrt", 200, 20000, 4e-4, 4e-5, 20000),
        ("documents.sh", "WSD exponential", 60, 6000, 8e-4, 1e-5, 6000),
        ("wsd-linear.yaml", "WSD linear", 200, 9000, 6e-4, 6e-5, 10000),
        ("wsd-cosine.yaml", "WSD cosine", 200, 9000, 6e-4, 6e-5, 10000),
        ("inverse-sqrt.yaml", "inverse-square-root", 400, 10000, 1e-3, 0.0, 10000),
    ],
)
def test_the_learning_rate_is_megatrons_at_every_step(
    name: str, style: str, warmup: float, end: float, lr: float, min_lr: float, total: int
) -> None:
    config = load(name)
    clock = BatchClock(config.global_train_batch_size, config.max_seq_len, 10**12, config.max_duration)
    assert clock.total_batches == total
    anneal = {"wsd.yaml": 2000, "documents.sh": 600}.get(name, 1000)
    init = 1e-7 if name == "documents.sh" else 0.0
    for step in range(0, total + 1, max(1, total // 25_000)):
        mine = config.optimizer.lr * lr_multiplier(config.scheduler, clock, step)
        theirs = megatron_lr(step, warmup, end, lr, min_lr, style, anneal, init)
        assert math.isclose(mine, theirs, rel_tol=1e-9, abs_tol=1e-15), step


def test_typed_learning_rates_of_gpt3_175b() -> None:
    config = load("gpt3-175b.sh")
    clock = BatchClock(1536, 2048, 10**12, config.max_duration)
    rates = {step: 6e-5 * lr_multiplier(config.scheduler, clock, step) for step in (0, 43, 430, 215215, 430000, 500000)}
    assert rates == pytest.approx({0: 0, 43: 6e-6, 430: 6e-5, 215215: 3.3e-5, 430000: 6e-6, 500000: 6e-6})


def test_defaults_that_scripts_leave_unsaid_are_megatrons() -> None:
    config = load("linear-untied.yaml")
    assert (config.optimizer.betas, config.optimizer.weight_decay, config.precision) == ((0.9, 0.999), 0.01, "fp32")
    assert (config.global_train_batch_size, config.gradient_clipping, str(config.log_interval)) == (8, 1.0, "100ba")
    model = config.model
    assert (model.tie_word_embeddings, model.activation, model.max_seq_len, model.vocab_size) == (
        False,
        "gelu",
        1024,
        50304,  # only NullTokenizer reads vocab_size
    )
    assert config.data.eval is None and [s.weight for s in config.data.train.mix.values()] == [None, None]


def test_the_batch_follows_from_the_processes_if_it_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(FILES / "linear-untied.yaml")
    assert "linear-untied.yaml:7: micro_batch_size = 8: " in error_of(path)
    assert "give global_batch_size=..." in error_of(path)
    assert load_run_config([path, "nproc-per-node=8", "nnodes=4"]).global_train_batch_size == 8 * 32
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert load_run_config([path]).global_train_batch_size == 8 * 16
    assert load_run_config([path, "tensor-model-parallel-size=4"]).global_train_batch_size == 8 * 4
    assert "16 are not a multiple of 3" in error_of(path, "tensor-model-parallel-size=3")


def test_llama_arguments() -> None:
    config = load("llama-8b.sh")
    assert config.model.parameters == 8_030_261_248
    model = config.model
    assert (model.norm, model.no_bias, model.activation, model.kv_heads, model.head_width) == (
        "rmsnorm",
        True,
        "swiglu",
        8,
        128,
    )
    assert (config.parallel.context, config.parallel.tensor, config.seed, model.init_std) == (2, 2, 7, 0.0134)
    assert config.data.train.path == "/data/all_text_document" and config.data.eval is None


def test_gated_widths_without_a_size_are_megatrons() -> None:
    config = load("wsd.yaml")
    assert config.model.ffn_width == 2624  # 4 x 1000 x 2/3, down to a multiple of 64
    assert (config.gradient_clipping, config.eval_subset_num_batches, config.model.vocab_size) == (None, -1, 50432)


def test_an_argument_list_is_read_as_words() -> None:
    config = load_run_config(SMALL)
    assert (config.model.n_layers, config.parallel.tensor, config.precision) == (24, 2, "bf16")
    assert {n: (s.path, s.weight) for n, s in config.data.train.mix.items()} == {"A": ("A", 0.3), "B": ("B", 0.7)}
    assert load_run_config([*SMALL, "--lr", "3e-4", "--lr=5e-4"]).optimizer.lr == 5e-4  # the last counts


@pytest.mark.parametrize(
    ("argument", "expected"),
    [("", False), ("--recompute-granularity full", True), ("--recompute-activations", "selective"),
     ("--recompute-granularity selective", "selective"), ("--checkpoint-activations", True)],
)  # fmt: skip
def test_recomputation_keeps_its_granularity(argument: str, expected: bool | str) -> None:
    assert load_run_config([*SMALL, *argument.split()]).activation_checkpointing == expected


def test_arguments_after_a_script_override_it() -> None:
    assert load("gpt3-125m.sh", "lr=1e-3").optimizer.lr == 1e-3
    assert load("gpt3-125m.sh", "--num-layers", "6").model.n_layers == 6


def test_a_restart_with_less_memory_may_add_its_microbatch_to_any_vocabulary() -> None:
    assert load_run_config([*SMALL, "device_train_microbatch_size=2"]).device_train_microbatch_size == 2


SCRIPTS = {
    "arrays": """
        if [ -z "$D" ]; then D=other; fi
        D=data
        ARGS=( --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --lr 1e-4 --bf16
               --seq-length 2048 --max-position-embeddings 2048 )
        MORE=(
            --micro-batch-size 4 --global-batch-size 64 --train-iters 1000
            --train-data-path ${D}/A
        )
        torchrun pretrain_gpt.py ${ARGS[@]} "${MORE[@]}"
    """,
    "strings": """
        D=data
        python tools/preprocess_data.py --input x.jsonl --workers 8
        LAUNCH="--nproc_per_node 8 --nnodes 1"
        ARGS="--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --lr 1e-4 --bf16 \\
              --seq-length 2048 --max-position-embeddings 2048"
        MORE="
            --micro-batch-size 4 --global-batch-size 64 --train-iters 1000 \\
            --train-data-path $D/A
        "
        torchrun $LAUNCH pretrain_gpt.py $ARGS ${MORE}
    """,
    "a command": """
        D=data
        python -m torch.distributed.launch --nnodes 1 pretrain_gpt.py \\
            --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --lr 1e-4 --bf16 \\
            --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 4 --global-batch-size 64 \\
            --train-iters 1000 --train-data-path $D/A 2>&1 | tee log.txt
    """,
}


@pytest.mark.parametrize("form", SCRIPTS)
def test_scripts_are_read_in_every_form_that_megatron_ships(tmp_path: Path, form: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPTS[form])
    config = load_run_config([str(script)])
    assert (config.model.n_layers, config.max_seq_len, config.optimizer.lr, config.precision) == (
        24,
        2048,
        1e-4,
        "bf16",
    )
    assert (config.global_train_batch_size, str(config.max_duration)) == (64, "1000ba")
    assert config.data is not None and config.data.train.path == "data/A"


def test_a_test_case_of_megatrons_own_is_read(tmp_path: Path) -> None:
    case = tmp_path / "model_config.yaml"
    arguments = "\n".join(f"  {SMALL[i]}: {SMALL[i + 1]}" for i in range(0, 18, 2))
    case.write_text(
        f"ENV_VARS:\n  NCCL_ALGO: Ring\nMODEL_ARGS:\n{arguments}\n  --train-data-path: ${{D}}/A\nTEST_TYPE: x\n"
    )
    assert load_run_config([str(case), "train-data-path=data/A"]).model.n_layers == 24
    assert load_run_config([str(case), "D=data"]).sources.train.path == "data/A"
    assert "model_config.yaml:13: train_data_path = ${D}/A: the file does not set D; give D=..." in error_of(str(case))
    case.write_text(case.read_text().replace("--hidden-size", "--hidden-sise"))
    assert "model_config.yaml:5: unknown key hidden_sise" in error_of(str(case), "train-data-path=data/A")


def test_scripts_are_never_run(tmp_path: Path) -> None:
    script, mark = tmp_path / "run.sh", tmp_path / "ran"
    script.write_text(f'touch {mark}\nX=$(touch {mark})\nARGS=(\n  --num-layers "$(touch {mark})"\n  --lr $X\n)\n')
    message = error_of(str(script))
    assert f"run.sh:4: num_layers = $(touch {mark}): the script takes it from elsewhere"[:40] in message
    assert "run.sh:5: lr = $X: X is $(touch" in message and not mark.exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "ARGS=(\n --save $OUT\n)\n",
            "run.sh:2: save = $OUT: OUT is not set in the script; pass --set OUT=... or give save=",
        ),
        (
            "OUT=$1\nARGS=(\n --save ${OUT}/x\n)\n",
            "run.sh:3: save = $OUT/x: OUT is $1 in line 1, which comes from the caller",
        ),
        ("if [ $A = 1 ]; then\n ARGS=(\n --bf16\n )\nfi\n", "ARGS depends on the condition `[ $A = 1 ]` in line 1"),
        ("ARGS=(\n --save 'x\n)\n", "run.sh:2: cannot be read as a shell script: ' is never closed"),
        ("echo hello\n", "no complete list of arguments"),
        ("ARGS=(\n --bf16\n", "run.sh:1: cannot be read as a shell script: ( is never closed"),
        ('ARGS="--bf16\n', 'run.sh:1: cannot be read as a shell script: " is never closed'),
        ("ARGS=(\n --num-layrs 3\n)\n", "run.sh:2: unknown key num_layrs of Megatron; did you mean num_layers?"),
        ("ARGS=(\n --lr 1 2\n)\n", "run.sh:2: --lr takes one value"),
        ("ARGS=(\n 3 --lr 1\n)\n", "run.sh:2: '3' belongs to no option"),
    ],
)
def test_scripts_that_cannot_be_read_as_data_are_refused_with_their_line(tmp_path: Path, text: str, words: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(text)
    assert words in error_of(str(script))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--rampup-batch-size 16 8 1000", "rampup_batch_size = [16, 8, 1000]: the batch is the same at every step"),
        ("--step-batch-size-schedule '0:16 2.4B:320'", "the batch is the same at every step"),
        ("--num-experts 8", "mixtures of experts are not supported"),
        ("--hybrid-override-pattern M-M", "Mamba and hybrid models are not supported"),
        ("--squared-relu", "not supported by the model here"),
        ("--quick-geglu", "not supported by the model here"),
        ("--use-rope-scaling", "not supported by the model here"),
        ("--window-size 128 128", "a token cannot see what comes after it"),
        ("--multi-latent-attention", "not supported by the model here"),
        ("--encoder-num-layers 12", "T5 and BERT are not supported, only GPT"),
        ("--decoder-seq-length 128", "T5 and BERT are not supported, only GPT"),
        ("--split 0,1,1 --train-data-path --valid-data-path --data-path C", "such as 969,30,1"),
        (
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model x --vocab-size 9 --eod-mask-loss",
            "the token that ends",
        ),
        ("--fp8-format hybrid", "use bf16"),
        ("--fp16 --loss-scale 1024", "a fixed loss scale"),
        ("--loss-scale-window 500", "only the default window"),
        ("--optimizer sgd", "optimizer = sgd: not supported; possible here: adam"),
        ("--lr-decay-style WSD", "lr_wsd_decay_iters = (default): is missing"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 2000", "longer than what the warmup leaves"),
        ("--lr-decay-style inverse-square-root --lr-warmup-iters 9 --lr-decay-iters 500", "drops to min_lr there"),
        ("--lr-warmup-samples 100", "does not go with train_iters; use lr_warmup_iters"),
        ("--train-samples 100", "with train_iters, or else with train_samples"),
        ("--fp16-lm-cross-entropy", "the loss is computed in fp32"),
        ("--data-path C", "name the data once"),
        ("--mock-data", "ingot demo"),
        ("--global-batch-size 63", "contradicts micro_batch_size 4"),
        ("--load other", "with finetune"),
        ("--start-weight-decay 0.1", "one learning rate and weight decay"),
        ("--hidden-sise 3", "unknown key hidden_sise of Megatron; did you mean hidden_size?"),
        ("--pipe-parallel-size 2", "it is a key of GPT-NeoX"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model nowhere/model", "set padded_vocab_size"),
        ("--position-embedding-type mrope", "possible here: learned_absolute, rope, none, alibi"),
    ],
)
def test_what_cannot_be_honored_is_refused_by_name(arguments: str, words: str) -> None:
    message = error_of(*SMALL, *shlex.split(arguments))
    assert words in message and "Traceback" not in message


@pytest.mark.parametrize(
    ("tokenizer", "size"), [("GPT2BPETokenizer", 50257), ("HFGPT2Tokenizer", 50257), ("CharLevelTokenizer", 512)]
)
def test_a_known_tokenizer_has_its_published_size(tokenizer: str, size: int) -> None:
    one = ["--make-vocab-size-divisible-by", "1", "--tensor-model-parallel-size", "1"]
    assert load_run_config([*SMALL, *one, "--tokenizer-type", tokenizer]).model.vocab_size == size


def test_with_finetune_load_is_where_the_weights_come_from() -> None:
    assert load_run_config([*SMALL, "--load", "other", "--finetune"]).load_path == "other"


def test_each_dataset_is_split_and_all_are_blended_by_megatrons_rules() -> None:
    config = load("documents.sh")
    assert config.data is not None and config.data.eval is not None
    for source, part in ((config.data.train, "train"), (config.data.eval, "valid")):
        assert source.mix_order == "greedy" and list(source.mix) == ["web_text_document", "books_text_document"]
        assert [(s.path, s.weight) for s in source.mix.values()] == [
            ("/data/web_text_document", 0.3),
            ("/data/books_text_document", 0.7),
        ]
        cuts = [s.documents.model_dump() for s in source.mix.values() if s.documents]
        assert cuts == [{"split": "949,50,1", "part": part, "rule": "megatron"}] * 2
    whole = load("wsd-linear.yaml", "split=100,0,0").data
    assert whole is not None and whole.eval is None and whole.train.documents is None
    usual = load("wsd-linear.yaml").data
    assert usual is not None and usual.train.documents is not None and usual.train.documents.split == "969,30,1"
    none = load("wsd-linear.yaml", "eval-iters=0").data
    assert none is not None and none.eval is None


def test_documents_restart_after_the_tokenizers_last_token() -> None:
    config = load("documents.sh")
    assert (config.model.document_mask, config.model.document_positions, config.mask_eos_loss) == (True, True, True)
    assert config.model.eos_token_id == config.no_loss_after_token == 50256
    arguments = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "32000"]
    assert load("documents.sh", *arguments).model.eos_token_id == 31999
    assert load("documents.sh", *arguments, "--null-tokenizer-eod-id", "5").model.eos_token_id == 5


def test_heads_are_normalized_and_norms_keep_their_biases() -> None:
    config = load("documents.sh")
    assert (config.model.qk_ln, config.model.no_bias, config.model.norm_bias) == ("heads", True, True)
    layer = 12 * 384**2 + 2 * 2 * 384 + 2 * 2 * 64  # matrices; two norms; those of queries and keys
    assert config.model.parameters == 50304 * 384 + 1024 * 384 + 6 * layer + 2 * 384


@pytest.mark.parametrize("name", ["gpt3-350m.yaml", "documents.sh", "wsd.yaml", "linear-untied.yaml"])
def test_weight_decay_spares_vectors_as_in_megatron(name: str) -> None:
    config = load(name, "num-layers=2", "hidden-size=40", "num-attention-heads=2", "padded-vocab-size=128")
    expected = {n: config.optimizer.weight_decay * (len(s) > 1) for n, s in parameter_shapes(config.model).items()}
    assert decayed(config) == expected and set(expected.values()) == {config.optimizer.weight_decay, 0.0}


def test_every_argument_is_accounted_for() -> None:
    names = [*GPT3, "llama-8b.sh", "linear-untied.yaml", "wsd.yaml", "wsd-linear.yaml", "wsd-cosine.yaml",
             "inverse-sqrt.yaml", "documents.sh"]  # fmt: skip
    assert sorted(names) == sorted(path.name for path in FILES.iterdir()) and len(names) >= 12
    for name in names:
        translation = translate(arguments_of(name))
        assert translation.dialect.name == "megatron" and not translation.problems
        assert set(translation.given) <= set(translation.rows)
