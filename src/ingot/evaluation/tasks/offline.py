"""`ingot eval --tasks`: one or several finished models on tasks and texts, on one device."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ingot.checkpoint.hf.transfer import tokenizer_of
from ingot.checkpoint.load import load_model
from ingot.checkpoint.store import find_checkpoint
from ingot.config.evaluation import FOLDER, GauntletConfig, TaskConfig
from ingot.data.document_sample import DocumentSample
from ingot.data.tokenizer import Tokenizer
from ingot.errors import ConfigError, disk_error
from ingot.evaluation.processes import SharedScorer
from ingot.evaluation.tasks.gauntlet import check_gauntlet, composite_scores, named_composites
from ingot.evaluation.tasks.run import QuestionScorer, TaskScore, check_names, prepare_tasks, score_task
from ingot.evaluation.tasks.scoring import Scorer
from ingot.evaluation.tasks.task_files import is_text, load_gauntlet, load_tasks
from ingot.evaluation.tasks.text import TextScore, score_text
from ingot.parallel.rank_env import find_rank_env
from ingot.storage.atomic import write_whole
from ingot.storage.names import plain_name_from
from ingot.version import __version__

_MOST_TEXT = 1 << 40  # texts are scored whole


@dataclass
class TaskRequest:
    """What to evaluate on."""

    tasks: list[TaskConfig]
    texts: list[str]
    gauntlet: GauntletConfig | None = None
    limit: int | None = None
    """Only the first questions of each task."""

    @classmethod
    def of(
        cls, names: Sequence[str], gauntlet: str | None = None, shots: int | None = None, limit: int | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> "TaskRequest":  # fmt: skip
        """What some names mean; every file is looked at before a model is loaded."""
        texts = [name for name in names if is_text(name)]
        tasks = load_tasks([name for name in names if name not in texts], shots)
        check_names(tasks)
        combined = None
        if gauntlet:
            combined, origins = load_gauntlet(gauntlet)
            check_gauntlet(combined, origins, tasks, say)
        return cls(tasks, texts, combined, limit)


@dataclass
class ModelReport:
    """All scores of one model."""

    path: Path
    step: int | None  # of the checkpoint; None for a Hugging Face folder
    run: Path | None
    scores: list[TaskScore] = field(default_factory=list)
    texts: list[TextScore] = field(default_factory=list)
    composites: dict[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Every metric under the name that dashboards use."""
        found: dict[str, float] = {}
        for named in [s.named_metrics() for s in self.scores] + [t.named_metrics() for t in self.texts]:
            found |= named
        return found | named_composites(self.composites)

    def to_json(self, with_questions: bool = False) -> dict[str, Any]:
        """What is written to RUN/evaluations/STEP.json."""
        tasks = [
            {"name": "/".join(filter(None, (s.label, f"{s.shots}-shot", s.category))), "metrics": s.metrics,
             "standard_error": s.standard_error, "questions": s.questions, "cut_rows": s.cut_rows,
             "seconds": round(s.seconds, 2), "sha256": s.sha256, "settings": s.settings}
            | ({"judged": s.judged} if with_questions else {})
            for s in self.scores
        ]  # fmt: skip
        versions = {"ingot": __version__, "torch": torch.__version__}
        return {
            "model": str(self.path),
            "step": self.step,
            "metrics": self.metrics(),
            "tasks": tasks,
            "versions": versions,
        }


def evaluate_model(
    path: Path, request: TaskRequest, device: str, say: Callable[[str], None],
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> ModelReport:  # fmt: skip
    """Load a model and score it. `progress` receives what is done, and tokens done and in all."""
    env = find_rank_env()
    on, precision = pick_device(device, env.local_rank)
    tokenizer = tokenizer_of(path)
    report = open_report(path)
    model = load_model(report.path, on)
    length = model.config.context
    longest = length if model.config.positions == "learned" else None
    prepared = prepare_tasks(request.tasks, tokenizer, length, longest, lambda task, rows: request.limit)
    for line in filter(None, (task.describe_cut() for task in prepared)):
        say(line)
    say(f"{report.path}: {model.config.parameters:,} parameters on {on.type} in {precision}, rows of {length:,} tokens")
    scorer: QuestionScorer = Scorer(model, on, precision)
    if env.world > 1:
        scorer = SharedScorer(scorer, env)
    total, done = sum(p.tokens for p in prepared), 0
    for task in prepared:
        before = done

        def advance(tokens: int, name: str = task.name, start: int = before, most: int = task.tokens) -> None:
            nonlocal done
            done = min(done + tokens, start + most)
            progress(name, done, total)

        report.scores.append(score_task(task, scorer, tokenizer, advance))
        done = before + task.tokens
        progress(task.name, done, total)
    for name in request.texts:
        report.texts.append(_score_text(name, scorer, tokenizer, length, say))
    if request.gauntlet:
        report.composites = composite_scores(request.gauntlet, report.scores, say)
    return report


def write_report(report: ModelReport, out: Path | None, with_questions: bool) -> Path | None:
    """Write the scores to `out`, or into the run folder. A Hugging Face folder is left as it is."""
    return write_scores(report.to_json(with_questions), report.run, f"{report.step}.json", out)


def write_scores(scores: dict[str, Any], run: Path | None, name: str, out: Path | None) -> Path | None:
    """Write scores to `out`, or to a name among a run's evaluations."""
    target = out or (run / FOLDER / name if run else None)
    if target is None:
        return None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, json.dumps(scores, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise disk_error("write", target, error) from None
    return target


def pick_device(name: str, local_rank: int = 0) -> tuple[torch.device, str]:
    """The device that is meant by auto, cpu or cuda, and the precision there."""
    if name == "cpu" or not torch.cuda.is_available():
        if name == "cuda":
            raise ConfigError("--device cuda: this machine has no GPU that torch can use")
        return torch.device("cpu"), "fp32"
    return torch.device("cuda", local_rank % torch.cuda.device_count()), "bf16"


def open_report(path: Path) -> ModelReport:
    """An empty report on the model in a run folder, checkpoint or Hugging Face folder."""
    if (path / "config.json").is_file():
        return ModelReport(path, None, None)
    manifest = find_checkpoint(path)
    return ModelReport(manifest.folder, manifest.step, manifest.folder.parent.parent)


def _score_text(
    name: str, scorer: QuestionScorer, tokenizer: Tokenizer, length: int, say: Callable[[str], None]
) -> TextScore:
    documents = DocumentSample.of([name], _MOST_TEXT, say=say)
    documents.what = f"scoring {name}"
    scored = score_text(plain_name_from(Path(name).stem), documents, scorer, tokenizer, length)
    if documents.bad:
        say(f"{name}: {len(documents.bad):,} bad records were skipped, such as {documents.bad[0]}")
    return scored
