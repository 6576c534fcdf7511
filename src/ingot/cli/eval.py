"""`ingot eval`"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ingot.checkpoint.location import model_folder
from ingot.cli.commands import OptionCommand
from ingot.cli.eval_suites import evaluate_core, evaluate_with_harness
from ingot.cli.eval_tasks import evaluate_tasks
from ingot.cli.options import options_from
from ingot.config.evaluation import EvalOptions
from ingot.config.load import validate
from ingot.errors import ConfigError
from ingot.evaluation.eval_config import load_eval_config

app = typer.Typer(add_completion=False)


class EvalCommand(OptionCommand):
    """Takes several values after one `--tasks` or `--harness`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        out: list[str] = []
        option = ""  # that the values belong to
        for argument in args:
            if argument.startswith("-") or "=" in argument:
                option = argument if argument in ("--tasks", "--harness") else ""
                out += [] if option else [argument]
            else:
                out += [option, argument] if option else [argument]
        return super().parse_args(ctx, out)


@app.command(cls=EvalCommand)
@options_from(EvalOptions, panels={"Downstream tasks": set(EvalOptions.model_fields)})
def evaluate(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL... [KEY=VALUE]...", help="Run folders, checkpoints or Hugging Face folders."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint of a run. Default: the newest.")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the tasks that ship with ingot.")] = False,
    **options: Any,
) -> None:
    """Measure the loss of a model, or its scores on tasks.

    Without --tasks: loss, perplexity and bits per byte on the validation data
    of the run, unless overrides name other data. With --tasks: downstream
    tasks, and the perplexity of any text. With --harness: tasks of
    lm-evaluation-harness. With --core: the CORE metric of DCLM.

    Examples:
      ingot eval runs/first data.eval.path=./my-data data.eval.split=val
      ingot eval runs/first --tasks arithmetic copy piqa.jsonl tasks_light.yaml
      ingot eval runs/first --step 1000
      ingot eval runs/first/checkpoints/* --tasks lambada.jsonl --limit 500
      ingot eval runs/first --harness arc_easy my-task.yaml
      ingot eval runs/first --tasks tasks.yaml --gauntlet gauntlet.yaml --nproc 8
      ingot eval runs/first --core eval_bundle --limit 500
    """
    if show_list:
        _list_tasks(as_json)
        return
    overrides = [given for given in models or [] if "=" in given and not Path(given).exists()]
    paths = [Path(given) for given in models or [] if given not in overrides]
    if not paths:
        raise ConfigError("name what to evaluate: a run folder, a checkpoint or a Hugging Face folder")
    kind = _kind(options, overrides)
    paths = [model_folder(path, step) for path in paths]
    if kind:
        given = validate(EvalOptions, options)
        if given.out and len(paths) > 1:
            raise ConfigError("--out names one file; leave it out, and each run keeps its own scores")
        _check_options(kind, options)
        {"tasks": evaluate_tasks, "harness": evaluate_with_harness, "core": evaluate_core}[kind](paths, given, as_json)
        return
    if options:
        raise ConfigError(f"--{next(iter(options)).replace('_', '-')} is about tasks; add --tasks, --harness or --core")
    if len(paths) > 1:
        raise ConfigError("several models are compared on tasks; add --tasks, or evaluate one at a time")
    load_eval_config(paths[0], overrides)  # what is wrong is said before torch loads
    from ingot.evaluation.run import evaluate_run

    results = evaluate_run(paths[0], overrides)
    metrics = {name: v for label, (found, _) in results.items() for name, v in found.metrics(label).items()}
    if as_json:
        print(json.dumps(metrics))
        return
    for label, (_, data) in results.items():
        print(f"evaluated {label} on {data}" if label else f"evaluated on {data}")
    for name, value in metrics.items():
        print(f"{name}: {value:.4f}")


def _list_tasks(as_json: bool) -> None:
    from ingot.evaluation.tasks.task_files import shipped_tasks

    if as_json:
        print(json.dumps([{"task": name, "about": about} for name, about in shipped_tasks().items()], indent=1))
        return
    for name, description in shipped_tasks().items():
        print(f"{name:16} {description}")


def _kind(options: dict[str, Any], overrides: Sequence[str]) -> str | None:
    """Which tasks are asked for, if any."""
    kinds = [kind for kind in ("tasks", "harness", "core") if options.get(kind)]
    if len(kinds) > 1:
        raise ConfigError(f"--{' and --'.join(kinds)} are separate evaluations; run them one after the other")
    if kinds and overrides:
        raise ConfigError(f"{overrides[0]}: with --{kinds[0]} the data come from the task files; leave it out")
    if "harness" in kinds:
        from ingot.evaluation.lm_eval import require_lm_eval

        require_lm_eval("--harness")
    return kinds[0] if kinds else None


def _check_options(kind: str, options: dict[str, Any]) -> None:
    """Refuse what has no effect."""
    apply = {
        "tasks": {"gauntlet", "num_fewshot", "nproc", "plot"},
        "harness": {"include_path", "num_fewshot"},
        "core": {"core_prompts"},
    }
    for name in options.keys() & (set.union(*apply.values()) - apply[kind]):
        owners = " and ".join(f"--{owner}" for owner, names in apply.items() if name in names)
        raise ConfigError(f"--{name.replace('_', '-')} has no effect with --{kind}; it is an option of {owners}")
