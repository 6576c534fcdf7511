"""Write the examples of v0.1's file formats in `frozen/`. Run once, at commit 6a238e8, with an empty `frozen/`:

    OMP_NUM_THREADS=1 PYTHONPATH=src python tests/v0_1/make.py

No test runs this file, and later code does not need to: `test_frozen.py` checks that later code still reads what it
wrote. Everything goes through the command line, except for three kinds of files that only a cluster or a full memory
produces: failures, the notes of a job script, and a microbatch that did not fit.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

HERE = Path(__file__).parent
FROZEN = HERE / "frozen"
CWD = "/proc/self/cwd"  # an absolute path that means the same on every machine, since a preparation records it
PAD = 5 << 20  # bytes that make each line a piece of its own: a piece is 8 MiB of input
MTIME = 1_700_000_000
BATCHES = 40

SENTENCES = [
    f"{who} {what} {where}.\n"
    for who in ("The miller", "A young smith", "Nobody", "My aunt")
    for what in ("poured the brass", "counted the ingots", "kept the ledger", "sang")
    for where in ("by the river", "under the arch", "in the long hall", "before dawn")
]
SMALL = ["model.d_model=8", "model.n_heads=2", "model.n_layers=2", "model.expansion_ratio=2", "model.vocab_size=264",
         "max_seq_len=32", "global_train_batch_size=4", f"max_duration={BATCHES}ba", "precision=fp32", "device=cpu",
         "data=data", "eval_interval=5ba", "save_interval=4ba", "save_num_checkpoints_to_keep=1",
         "scheduler.t_warmup=2ba", "optimizer.lr=0.01"]  # fmt: skip
RUNS: dict[str, list[str]] = {
    # learned positions, decoupled AdamW, two checkpoints, an anomaly guard with a history, sample lists; SIGTERM
    "stopped": ["guards.spike=stop", "guards.spike_threshold=1000", "guards.spike_window=16", "loggers.samples=true",
                "save_num_checkpoints_to_keep=2", "optimizer.weight_decay=0.1"],
    # dropout, Lion, WSD; SIGUSR2
    "dropout": ["model.qk_ln=true", "model.resid_pdrop=0.1", "model.emb_pdrop=0.1", "model.attn_pdrop=0.1", "optimizer.name=lion",
                "optimizer.lr=0.001", "scheduler.name=wsd"],
    # llama in two processes: sharded chunks; SIGTERM
    "sharded": ["model.family=llama", "model.vocab_size=264", "model.n_kv_heads=1", "optimizer.name=adamw",
                "optimizer.weight_decay=0.1", "scheduler.name=inv_sqrt_with_warmup"],
    # Muon, ALiBi, batches left out by the guard, a microbatch that did not fit; SIGKILL
    "skipped": ["model.positions=alibi", "model.expansion_ratio=4", "model.clip_qkv=4", "model.no_bias=true",
                "optimizer.name=muon", "optimizer.lr=0.001", "guards.spike=skip", "guards.spike_threshold=0.5",
                "guards.spike_window=8"],
    # finished, weights only, NeoX's block
    "weights": ["model.family=neox", "model.vocab_size=264", "model.rotary_pct=0.5", "save_weights_only=true",
                "max_duration=6ba"],
}  # fmt: skip
STILL = [f"model.{kind}_pdrop=0" for kind in ("resid", "emb", "attn")]
PROCESSES = {"sharded": ["--nproc", "2"]}
PLACED = ["--gpus-per-node", "0", "--profile", "cpu"]
FAILURES = [
    ("n1", 0, 3, "machine", "n1: the process was killed by signal 9", False),
    ("n1", 0, 3, "hang", "rank 0 has made no progress for 120 s", True),
    ("n2", 3, 7, "transport", "n2: NCCL talks through a socket", False),
    ("n2", 2, 9, "memory", "a microbatch of 8 sequences does not fit", True),
    ("n3", 1, 11, "program", "internal error: RuntimeError: boom", False),
    ("n3", 1, -1, "data", "data/train: shard.00000.mds is damaged", False),
    ("n4", 0, 12, "numeric", "the loss is nan at batch 12", False),
    ("n4", 0, -1, "user", "unknown key model.d_modle", False),
]


def ingot(root: Path, *arguments: str, code: int = 0, path: Path | None = None) -> str:
    """Run a command in `root`; returns its standard output."""
    env = os.environ | ({"PATH": f"{path}:{os.environ['PATH']}"} if path else {})
    command = [sys.executable, "-m", "ingot.cli.main", *arguments]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
    return done.stdout


def rows(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def interrupt(root: Path, name: str, command: list[str]) -> None:
    """Run until a few batches after the first checkpoints, then end it by a signal."""
    run = root / name
    number = {"skipped": signal.SIGKILL, "dropout": signal.SIGUSR2}.get(name, signal.SIGTERM)
    ingot_train = [sys.executable, "-m", "ingot.cli.main", *command]
    process = subprocess.Popen(ingot_train, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    batch = 20 if name == "skipped" else 8
    while len(rows(run)) <= batch or newest(run) < batch:
        assert process.poll() is None, f"{name} ended by itself"
        time.sleep(0.001)
    process.send_signal(number)
    code = process.wait()
    assert code == (-number if number == signal.SIGKILL else 75), code


def newest(run: Path) -> int:
    return max((int(path.parent.name) for path in run.glob("checkpoints/[0-9]*/manifest.json")), default=0)


def digest(folder: Path, pattern: str = "*") -> dict[str, str]:
    files = sorted(path for path in folder.glob(pattern) if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def make_data(root: Path) -> dict:
    """Datasets of three kinds, from the same text."""
    from ingot.data.tokenizer_training import train_tokenizer

    (root / "text").mkdir()
    train_tokenizer(SENTENCES, 264, root / "tokenizer")
    (root / "text" / "train.txt").write_text("".join(SENTENCES))
    (root / "text" / "val.txt").write_text("".join(SENTENCES[::7]))
    common = ["--tokenizer", "tokenizer", "--concat_tokens", "32"]
    for split in ("train", "val"):
        text = f"{CWD}/text/{split}.txt"
        ingot(root, "prepare", "--path", text, "--out_root", "data", "--split", split, "--size_limit", "2048", *common)
    text = f"{CWD}/text/train.txt"
    ingot(root, "prepare", "--path", text, "--out_root", "data-zstd", "--compression", "zstd", *common)
    ingot(
        root, "prepare", "--path", text, "--output_prefix", "data-indexed/c", "--append_eod", "--tokenizer", "tokenizer"
    )
    batches = {}
    for name, given in {
        "mds": "data.train.path=data-zstd",
        "indexed": "data.train.path=data-indexed/c_text_document",
    }.items():
        split = ["data.train.split=train"] if name == "mds" else []
        run = [*SMALL, given, *split, "data.eval=null", "max_duration=3ba", f"save_folder=ref/{name}"]
        ingot(root, "train", *[a for a in run if a != "data=data"])
        batches[name] = [row["loss/train/total"] for row in rows(root / "ref" / name)]
    return {"losses": batches, "train": digest(root / "data" / "train")}


def make_partial(root: Path) -> dict:
    """Preparations that a damaged line interrupted, and one of which half the shares are done."""
    lines = [json.dumps({"text": "".join(SENTENCES[k::4])}) for k in range(4)]
    (root / "partial").mkdir()
    (root / "partial" / "lines.json").write_text(json.dumps({"lines": lines, "pad": PAD, "mtime": MTIME}, indent=1))
    common = ["--path", f"{CWD}/partial/in/*.jsonl", "--tokenizer", "tokenizer", "--num_workers", "0"]
    mds = [*common, "--concat_tokens", "32", "--size_limit", "1024", "--out_root", "partial"]
    indexed = [*common, "--append_eod", "--output_prefix", "partial/c"]
    expand(root, lines)
    ingot(root, "prepare", *mds, "--split", "whole")
    ingot(root, "prepare", *indexed[:-1], "partial/whole")
    expected = {
        "mds": digest(root / "partial" / "whole", "*.mds"),
        "indexed": {
            n.replace("whole", "c"): h for n, h in digest(root / "partial", "whole_*").items() if "meta" not in n
        },
    }
    expand(root, [*lines[:2], "!" * len(lines[2]), lines[3]])  # of the same size: what is wrong with it is fixed later
    ingot(root, "prepare", *mds, code=2)
    expand(root, lines)
    ingot(root, "prepare", *indexed, "--share", "0/2")
    shutil.rmtree(root / "partial" / "in")
    shutil.rmtree(root / "partial" / "whole")
    for path in (root / "partial").glob("whole_*"):
        path.unlink()
    journal = (root / "partial" / ".train.partial" / "journal.jsonl").read_text()
    assert '"shard"' in journal and journal.count('"tokenize"') == 2, journal
    return {"mds": mds, "indexed": indexed, "expected": expected}


def expand(root: Path, lines: list[str]) -> None:
    """Input files of one line each, padded to pieces of their own."""
    folder = root / "partial" / "in"
    folder.mkdir(exist_ok=True)
    for number, line in enumerate(lines):
        path = folder / f"{number}.jsonl"
        pad = json.dumps({"pad": "x" * PAD})[1:]
        path.write_text(f"{line[:-1]}, {pad}\n" if line.startswith("{") else "!" * (len(line) + 1 + len(pad)) + "\n")
        os.utime(path, (MTIME, MTIME))


def make_runs(root: Path) -> dict:
    from ingot.parallel.layout import Layout
    from ingot.training.microbatch_search import remember_too_much

    expected = {}
    for name, changes in RUNS.items():
        command = ["train", *SMALL, *changes, *PROCESSES.get(name, [])]
        if name == "skipped":
            for run in (root / name, root / "ref" / name):
                remember_too_much(run, 4, Layout())
        ingot(root, *command, f"save_folder=ref/{name}")
        if name == "weights":
            ingot(root, *command, f"save_folder={name}")
        else:
            interrupt(root, name, [*command, f"save_folder={name}"])
        reference = rows(root / "ref" / name)
        step = newest(root / name)
        ours = [row["loss/train/total"] for row in rows(root / name) if row["time/batch"] <= step]
        assert ours == [row["loss/train/total"] for row in reference[: len(ours)]], name
        assert name == "weights" or 8 <= step < BATCHES - 5, (name, step)
        expected[name] = {
            "step": step,
            "losses": {row["time/batch"]: row["loss/train/total"] for row in reference},
            "eval": reference[-1]["metrics/eval/LanguageCrossEntropy"],
            "logits": logits(root / name),
        }
        if name == "dropout":
            shutil.copytree(root / name, root / "ref" / "still")
            ingot(root, "train", f"{name}/config.yaml", "save_folder=ref/still", *STILL)
            expected[name]["still"] = {
                row["time/batch"]: row["loss/train/total"] for row in rows(root / "ref" / "still")
            }
        print(name, step, ours[0], reference[-1]["loss/train/total"])
    guards = [json.loads(line)["batch"] for line in (root / "skipped" / "guards.jsonl").read_text().splitlines()]
    whole = [json.loads(line)["batch"] for line in (root / "ref/skipped/guards.jsonl").read_text().splitlines()]
    manifest = json.loads(
        (root / "skipped/checkpoints" / str(expected["skipped"]["step"]) / "manifest.json").read_text()
    )
    assert manifest["state"]["left_out"] and (root / "skipped/owner.json").exists()
    expected["skipped"]["left_out"] = whole
    print("left out", guards, whole)
    return expected


def logits(path: Path) -> list[float]:
    """Of a model for tokens 1 to 8: the last position's."""
    import torch

    import ingot as package

    with torch.no_grad():
        return package.load(path)(torch.arange(1, 9)[None])[0, -1].tolist()


def make_hf(root: Path) -> dict:
    expected = {}
    for run in ("skipped", "sharded"):
        ingot(root, "export", run, f"hf-{run}")
        expected[run] = logits(root / f"hf-{run}")
    return expected


def make_launched(root: Path) -> dict:
    """Launch folders as a login node, job scripts and nodes leave them, on stand-ins for sbatch and kubectl."""
    from ingot.launch.supervisor.failure_log import mark_start, record

    programs = root / "ref" / "bin"
    programs.mkdir()
    for name, body in {"sbatch": "echo 101", "kubectl": "echo applied"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    base = root / "launched"
    base.mkdir()
    tiny = ["config/tiny.yaml", "max_duration=6ba"]

    run = base / "slurm"  # halted, after failures of every kind
    ingot(root, "launch", "slurm", *tiny, f"save_folder={run}", "-N", "2", "--chain", "3", "--spares", "1", "-p", "gpu",
          "-A", "team", "--qos", "high", "-C", "a|b", "-x", "n9", "--reservation", "night", "--time", "2:00:00",
          "--cpus-per-task", "4", "--env", "A=1", "--image", "registry.example/ingot:0.1.0", "--mounts", "/fsx:/fsx",
          *PLACED, path=programs)  # fmt: skip
    for attempt, (host, rank, batch, kind, message, progress) in enumerate(FAILURES, 1):
        record(run, attempt=f"101.0.{attempt}", rank=rank, batch=batch, kind=kind, message=message, progress=progress,
               host=host)  # fmt: skip
    mark_start(run)
    record(run, attempt="101.1.1", rank=0, batch=12, kind="program", message="internal error: the end", progress=False,
           host="n5")  # fmt: skip
    for name, text in {
        "launch/down": "101 n1\n101 n6\n102 n6\n", "launch/bad.101": "n2\n", "launch/code.101.0.1": "1\n",
        "launch/code.101.1.1": "3\n", "launch/HALT": "the same error twice: trying again would not help\n",
        "launch/slurm-101.out": "attempt 101.0.1 on n1,n2\n", "logs/101.1.1/rank-0.log": "batch 11\ninternal error: the end\n",
        "logs/train.log": "batch 10\nbatch 11\n",
        "metrics.jsonl": json.dumps({"time/batch": 11, "loss/train/total": 2.5, "throughput/tokens_per_sec": 1000.0,
                                     "time/remaining_estimate": 1.5, "checkpoint/write_seconds": 4.0}) + "\n",
    }.items():  # fmt: skip
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)

    # one node, not yet started: its job script is in the queue while ingot is upgraded
    ingot(
        root,
        "launch",
        "slurm",
        *tiny,
        f"save_folder={base / 'queued'}",
        "-N",
        "1",
        "--no-preflight",
        *PLACED,
        path=programs,
    )

    (base / "kubernetes").mkdir()
    ingot(root, "launch", "kubernetes", *tiny, f"save_folder={base / 'kubernetes'}", "-N", "2", "--apply", "--queue", "research",
          "--namespace", "team", "--image", "registry.example/ingot:0.1.0", "--mounts", f"shared:{base}", *PLACED,
          path=programs)  # fmt: skip

    ingot(root, "launch", "local", *tiny, f"save_folder={base / 'local'}", "save_weights_only=true", *PLACED)
    (programs / "squeue").write_text("#!/bin/sh\necho slurm_load_jobs error: Invalid job id specified >&2\nexit 1\n")
    (programs / "kubectl").write_text("#!/bin/sh\n")  # the cluster has forgotten the object
    (programs / "squeue").chmod(0o755)
    expected = {}
    for run in sorted(base.iterdir()):
        name = f"launched/{run.name}"
        expected[run.name] = {
            "status": json.loads(ingot(root, "status", name, "--json", path=programs)),
            "resume": ingot(root, "launch", "resume", name, "--dry-run", path=programs),
        }
    expected["slurm"]["logs"] = ingot(root, "logs", "launched/slurm", path=programs)
    expected["slurm"]["errors"] = ingot(root, "logs", "launched/slurm", "--errors", path=programs)
    expected["local"]["losses"] = [row["loss/train/total"] for row in rows(base / "local")]
    for path in base.rglob("*"):
        if path.is_file() and path.suffix in (".json", ".jsonl", ".sh", ".yaml", ".log", ".out"):
            path.write_text(path.read_text().replace(str(root), "@ROOT@").replace(sys.executable, "@PYTHON@"))
    return json.loads(json.dumps(expected).replace(str(root), "@ROOT@").replace(sys.executable, "@PYTHON@"))


def make_configs(root: Path) -> dict:
    """What config files resolve to; together they set every key of the schema."""
    shutil.copytree(HERE / "config", root / "config")
    expected, given = {}, set()
    for path in sorted((root / "config").glob("*.yaml")):
        overrides = ["seed=23", "scheduler.alpha_f=0.25", "data.train.shuffle=false"] if path.stem == "all" else []
        expected[path.stem] = {
            "overrides": overrides,
            "resolved": yaml.safe_load(ingot(root, "config", "show", f"config/{path.name}", *overrides)),
        }
        given |= set(keys(yaml.safe_load(path.read_text())))
    schema = json.loads(ingot(root, "config", "schema"))
    known = set(schema_keys(schema, schema))
    missing = {key for key in known if key not in given}
    assert not missing, f"keys that no config file sets: {sorted(missing)}"
    return {"resolved": expected, "keys": sorted(known)}


def keys(values: object, prefix: str = "") -> list[str]:
    if not isinstance(values, dict) or not values:
        return [prefix]
    names = [(("*" if prefix.endswith(".mix") else key), value) for key, value in values.items()]
    return [k for name, value in names for k in keys(value, f"{prefix}.{name}" if prefix else name)]


def schema_keys(schema: dict, node: dict, prefix: str = "") -> list[str]:
    """Dotted keys of a JSON Schema; names of a user's own are `*`."""
    for option in [node, *node.get("anyOf", [])]:
        target = schema["$defs"][option["$ref"].rpartition("/")[2]] if "$ref" in option else option
        if "properties" in target:
            return [
                k
                for name, child in target["properties"].items()
                for k in schema_keys(schema, child, f"{prefix}.{name}" if prefix else name)
            ]
        if isinstance(target.get("additionalProperties"), dict):
            return schema_keys(schema, target["additionalProperties"], f"{prefix}.*")
    return [prefix]


def main() -> None:
    if FROZEN.exists():
        raise SystemExit(f"{FROZEN} is there; remove it first, at commit 6a238e8 only")
    with tempfile.TemporaryDirectory(prefix="v0_1-") as name:
        root = Path(name)
        (root / "ref").mkdir()
        expected = {"configs": make_configs(root), "data": make_data(root), "partial": make_partial(root),
                    "runs": make_runs(root), "hf": make_hf(root), "launched": make_launched(root)}  # fmt: skip
        shutil.rmtree(root / "ref")
        shutil.rmtree(root / "config")
        (root / "expected.json").write_text(json.dumps(expected) + "\n")
        for path in root.rglob("*"):
            if path.is_file() and path.suffix in (".json", ".jsonl", ".yaml", ".log") and name in path.read_text():
                raise SystemExit(
                    f"{path} names this machine's temporary folder: {re.findall(name + '[^,]*', path.read_text())[0]}"
                )
        shutil.copytree(root, FROZEN)


if __name__ == "__main__":
    main()
