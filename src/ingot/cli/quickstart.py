"""`ingot quickstart`: text to a trained and exported model, sized to the text, the machine and the time."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ingot.cli.commands import OptionCommand
from ingot.cli.walkthrough import as_typed, commands_of_model, run_verb, show_model
from ingot.errors import EXIT_CONTINUE, ConfigError, DataError, IngotError, disk_error
from ingot.launch.agent.local_ranks import count_gpus
from ingot.quickstart.data_plan import plan_data
from ingot.quickstart.model_plan import TRIAL_STEPS, Corpus, plan_model
from ingot.report.metrics_file import read_rows
from ingot.storage.atomic import write_json

app = typer.Typer(add_completion=False)
PLAN = "quickstart.json"
TRIAL = ".trial"
# Of the time for everything: what evaluation, a sample, the export and a slower moment of the machine may take.
_RESERVE_SHARE, _RESERVE_SECONDS = 0.2, 15
_LIMITED_SECONDS = 120  # with less time in all, training takes the time it needs


@app.command(cls=OptionCommand)
def quickstart(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Text: files, folders or globs.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Output folder.")] = Path("quickstart"),
    minutes: Annotated[float, typer.Option(help="About how long all of it may take.")] = 6.0,
    key: Annotated[
        str, typer.Option(help="Field or column of JSON, Parquet and CSV files that holds the text.")
    ] = "text",
) -> None:
    """Train a model on your own text in minutes.

    Prepares the text, trains a tokenizer and a model, evaluates, samples and
    exports it. Model and batch follow from the text, the time and this
    machine; each decision is printed with its reason, and each step as the
    command that does it. Interrupted, the same command continues.

    Examples:
      ingot quickstart my-texts
      ingot quickstart book.txt 'notes/**/*.md' --minutes 30 -o my-first
    """
    clock = Budget(minutes)
    plan = _open_plan(out, {"paths": paths, "minutes": minutes, "key": key}, paths)
    data, run = f"{out}/data", f"{out}/run"
    if "prepare" not in plan:
        decided = plan_data(paths, key, 1024 if count_gpus() else 256, lambda line: print(line, file=sys.stderr))
        _print_reasons(decided.reasons)
        plan |= {"prepare": ["prepare", *map(_as_path, paths), "--out", data, *decided.arguments],
                 "sequence": decided.sequence, "prompt": decided.prompt}  # fmt: skip
        _save(out, plan)
    run_verb(*plan["prepare"])
    if "train" not in plan:
        fixed = ["train", "demo", f"data={data}", *(["precision=bf16"] if count_gpus() else [])]
        print("\nchoosing the model: a trial of a few steps", flush=True)
        corpus = _corpus(out, plan["sequence"])
        chosen = plan_model(corpus, clock.for_training, lambda given: _measure(out, [*fixed, *given]))
        _print_reasons([*chosen.reasons, clock.limit_reason])
        plan["train"] = [*fixed, f"save_folder={run}", *chosen.arguments]
        _save(out, plan)
    if not Path(run, "FINISHED").exists():
        shutil.rmtree(out / "hf", ignore_errors=True)  # of a run that ran out of time
    stopped = _train([*plan["train"], *clock.limit], clock)
    show_model(out, plan["prompt"], "ingot quickstart")
    commands = [plan["prepare"], plan["train"], *commands_of_model(out, plan["prompt"])]
    print(f"""
Done in {clock.elapsed / 60:.1f} minutes. The loss curve is in {out}/loss.png, the metrics in
{run}/metrics.jsonl, the model for transformers in {out}/hf. The same by hand:
  {_lines(commands)}""")
    if stopped:
        print("The time was over before the end of the training; the same quickstart continues it.")


class Budget:
    """The time for everything."""

    def __init__(self, minutes: float):
        if not 0 < minutes <= 60 * 24 * 365:
            raise ConfigError(f"--minutes {minutes:g}: must be above 0 and at most a year")
        self.began, self.seconds = time.monotonic(), 60 * minutes

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @property
    def for_training(self) -> float:
        """Seconds to plan with: evaluation, a sample and the export need time too."""
        return max(1.0, (self.seconds - self.elapsed) * (1 - _RESERVE_SHARE) - _RESERVE_SECONDS)

    @property
    def limit(self) -> list[str]:
        """Ends a training that is slower than planned; not where the time is too short for that."""
        left = self.seconds - self.elapsed - _RESERVE_SECONDS / 2
        return [f"max_wall_time={max(left, 30) / 60:.1f}min"] if self.seconds >= _LIMITED_SECONDS else []

    @property
    def limit_reason(self) -> str:
        limit = "".join(self.limit)
        return f"limit: {limit} (if the machine becomes slower)" if limit else "limit: none (little time was given)"


def _train(command: list[str], clock: Budget) -> bool:
    """Run a training command; returns whether it ended because the time was over."""
    try:
        run_verb(*command)
    except SystemExit as end:
        is_over = clock.elapsed > clock.seconds - _RESERVE_SECONDS and clock.seconds >= _LIMITED_SECONDS
        if end.code != EXIT_CONTINUE or not is_over:
            raise
        return True
    return False


def _open_plan(out: Path, request: dict[str, Any], paths: list[str]) -> dict[str, Any]:
    """What was decided for this request so far."""
    for path in paths:
        if Path(path).is_dir() and Path(path).resolve() in (out.resolve(), *out.resolve().parents):
            raise ConfigError(f"--out {out} is in {path}, so its files would be read as text; choose one elsewhere")
    try:
        plan: dict[str, Any] = json.loads((out / PLAN).read_text(encoding="utf-8"))
        old = plan["request"]
    except FileNotFoundError:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"--out {out}: already there, and not from quickstart; choose another --out") from None
        return {"request": request}
    except OSError as error:
        raise disk_error("write to", out, error) from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{out / PLAN}: damaged; choose another --out, or remove the folder") from None
    if old != request:
        changed = ", ".join(f"{name} was {old.get(name)}" for name in request if old.get(name) != request[name])
        raise ConfigError(f"{out}: holds a quickstart with other options ({changed}); choose another --out")
    print(f"continuing with what was decided before, in {out / PLAN}")
    return plan


def _save(out: Path, plan: dict[str, Any]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / PLAN, plan)
    except OSError as error:
        raise disk_error("write to", out, error) from None


def _as_path(text: str) -> str:
    """A path that cannot be taken for an option."""
    return f"./{text}" if text.startswith("-") else text


def _corpus(out: Path, sequence: int) -> Corpus:
    meta = {s: json.loads((out / "data" / s / "meta.json").read_text(encoding="utf-8")) for s in ("train", "val")}
    return Corpus(meta["train"]["tokens"], meta["train"]["vocab_size"], sequence, meta["val"]["tokens"])


def _measure(out: Path, arguments: list[str]) -> float:
    """Tokens per second of a trial run in a process of its own."""
    folder = out / TRIAL
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "ingot.cli.main", *arguments, f"save_folder={folder}", "data.eval=null",
               f"max_duration={TRIAL_STEPS}ba", "scheduler.t_warmup=0ba", "save_interval=0ba"]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise DataError(done.stderr.strip().rpartition("\n")[2].removeprefix("error: ") or "the trial was killed")
        speeds = sorted(row["throughput/tokens_per_sec"] for row in read_rows(folder)[TRIAL_STEPS // 4 :])
        return float(speeds[len(speeds) // 2])
    except (OSError, LookupError) as error:
        raise IngotError(f"{folder}: the trial left no metrics: {error}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _print_reasons(reasons: list[str]) -> None:
    print("\n".join(f"- {reason}" for reason in reasons), flush=True)


def _lines(commands: list[list[str]]) -> str:
    return "\n  ".join(map(as_typed, commands))
