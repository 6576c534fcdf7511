"""Arguments that cannot go together, or mean nothing alone, are refused in one sentence before anything is read."""

from pathlib import Path

import pytest
from conftest import Ingot

PREPARE = "prepare --path a --out_root o"
MEGATRON = "prepare --path a --output_prefix o --tokenizer t"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("export a b -o c", "both b and -o c say where to write; give one"),
        ("export a", "nothing says where to write; add -o FOLDER"),
        ("doctor --profile mine", "a run folder or a profile needs --cluster"),
        ("doctor run --cluster --profile mine", "a launched run has its own profile"),
        ("eval", "name what to evaluate"),
        ("generate a --prompt", "ingot generate: option '--prompt' requires an argument; see `ingot generate -h`"),
        ("doctor --json=3", "ingot doctor: option '--json' does not take a value; see `ingot doctor -h`"),
        ("export", "missing argument 'run'; see `ingot export -h`"),
        ("eval a --tasks copy data.eval.path=b", "with --tasks the data come from the task files; leave it out"),
        ("eval a --tasks copy --core b", "--tasks and --core are separate evaluations"),
        ("tokenizer compare a b", "give the text to compare on, as --text my-texts"),
        ("quickstart a --minutes 0", "--minutes 0: must be above 0"),
        ("compare a", "needs two runs or more"),
        (f"{PREPARE} --tokenizer t --vocab_file v", "--tokenizer and --vocab_file contradict each other"),
        (f"{PREPARE} --tokenizer_type GPT2BPETokenizer --vocab_file v", "needs --vocab_file and --merge_file"),
        ("prepare --dataset enwik8 --splits train val --out_root o", "has no splits or subsets"),
        (f"{PREPARE} --json_keys a b", "several need format=indexed"),
        (f"{PREPARE} --documents Lines", "did you mean line?"),
        (f"{PREPARE} --documents {'x' * 5000}", "a separator has from 1 to"),
        (f"{PREPARE} --compression zstd:23", "use zstd or zstd:LEVEL with a level from 1 to 22"),
        (f"{PREPARE} --share 0/2 --reprocess", "each share would remove what the others did"),
        (f"{PREPARE} --share 2/2", "must be K/N with K from 0 to N-1"),
        (f"{PREPARE} --val_fraction 0.1 --val_documents 3", "contradicts val_fraction; give one"),
        (f"{PREPARE} --val_fraction 0.1 --split val", "what it holds out becomes the split val"),
        ("prepare --path a --output_prefix o", "is missing; the indexed format holds tokens"),
        ("prepare --path a --output_prefix o --format mds", "names Megatron's files; use out_root"),
        (f"{MEGATRON} --no_wrap", "the indexed format keeps whole documents"),
        (f"{MEGATRON} --compression zstd", "is read in place and cannot be compressed"),
        (f"{MEGATRON} --token_type uint32", "uint32 does not exist in the indexed format"),
        (f"{MEGATRON} --val_fraction 0.1", "needs out_root; Megatron's files are divided when they are read"),
        (f"{MEGATRON} --val_fraction 0.1 --json_keys a b", "works with one of json_keys"),
        (f"{MEGATRON} --splits train val", "once per split, with that split's files"),
        ("train demo data=x max_duration=3min", "is wall-clock time; use ba, ep, sp or tok here"),
        ("train demo data=x scheduler.t_warmup=3min", "is wall-clock time; use ba, ep, sp, tok or dur here"),
        ("train demo data=x max_wall_time=3ba", "is not wall-clock time; use for example 90min"),
        ("train demo data=x eval.intervals.x=3min", "x: 3min is wall-clock time; use ba, ep, sp or tok here"),
        ("train demo data=x eval.gauntlet=g.yaml", "combines tasks, and there are none"),
    ],
)
def test_it_is_one_sentence_and_nothing_is_written(ingot_here: Ingot, tmp_path: Path, command: str, words: str) -> None:
    done = ingot_here(*command.split(), check=False)
    assert done.returncode == 2 and done.stdout == "", (done.returncode, done.stdout, done.stderr)
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and words in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())
