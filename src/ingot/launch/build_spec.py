"""From a command line to a launch spec: options override the defaults of a file, which override the profile's; and the
config is checked here, on the login node, before anything is queued.
"""

import os
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from ingot.config.recipes import check_recipe
from ingot.launch.agent.failure import NODE_KINDS
from ingot.launch.measured_times import read_times
from ingot.launch.profiles import find_profile, launch_defaults
from ingot.launch.protocol import LOCAL, LaunchFolder
from ingot.launch.spec import LaunchSpec, make_spec
from ingot.launch.submit_checks import check_data
from ingot.launch.supervisor.failure_log import read_all_failures
from ingot.launch.supervisor.judge import strikes as struck_nodes
from ingot.launch.supervisor.records import Opened
from ingot.launch.supervisor.state_file import STATE, StateError, read_state
from ingot.migrate import load_run_config
from ingot.parallel.memory_estimate import StepShape, choose_layout
from ingot.plurals import count_of
from ingot.report.trackers.registry import check_logins

MAX_STRIKES = 2  # a node is excluded after this many failures of its own


def training_spec(
    arguments: list[str], options: dict[str, Any], dialect: str | None = None, is_here: bool = False
) -> tuple[LaunchSpec, list[str]]:
    """The spec of a training run, and notes on what was decided. is_here: it runs on this machine, with this process's
    variables."""
    check_recipe(arguments)
    config = load_run_config(arguments, dialect)
    run = Path(config.run_folder).absolute()
    values, notes = with_defaults(options)
    values |= {"verb": "train", "run_folder": str(run), "workdir": os.getcwd(),
               "arguments": [*(["--dialect", dialect] if dialect else []), "--", *arguments]}  # fmt: skip
    values.setdefault("name", _job_name(config.name))
    if "signal_seconds" not in values:
        times = read_times(run)
        values["signal_seconds"] = times.signal_seconds
        if not is_here:
            notes.append(f"the job saves {times.signal_seconds} s before its time limit ({times.why})")
    notes += _exclude_bad_nodes(values, run)
    spec = make_spec(values)
    check_logins(config.loggers, [*spec.secrets, *(os.environ if is_here else ())], has_home=not spec.image)
    world = spec.processes * spec.nodes
    batch = config.global_train_batch_size
    layout, why = choose_layout(config.parallel, world, config.model, batch, StepShape.of(config), node=spec.processes)
    nodes = f"{count_of(spec.nodes, 'node')} x {count_of(spec.processes, 'process', 'es')}"
    notes.append(f"layout: {nodes}, {layout} ({why})")
    notes += check_data(config, spec, is_here)
    if config.max_wall_time is not None and spec.chain > 1:
        notes.append(f"max_wall_time={config.max_wall_time} ends the whole launch, not one job of the chain")
    return spec, notes


def preparation_spec(
    arguments: list[str], folder: Path, label: str, options: dict[str, Any]
) -> tuple[LaunchSpec, list[str]]:
    """The spec of a preparation whose output goes to `folder`, and notes on what was decided."""
    values, notes = with_defaults(options | {"gpus_per_node": 0})
    run = folder.absolute() / f".prepare-{label}"
    values |= {"verb": "prepare", "run_folder": str(run), "workdir": os.getcwd(), "arguments": arguments, "chain": 1,
               "spares": 0}  # fmt: skip
    values.setdefault("name", _job_name(f"prepare-{label}"))
    notes += _exclude_bad_nodes(values, run)
    spec = make_spec(values)
    notes.append(f"{count_of(spec.nodes, 'job')} share the work, and a last one combines the parts")
    return spec, notes


def with_defaults(options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Options over the defaults of a file over the profile's, and a note on the file."""
    defaults, source = launch_defaults()
    notes = [f"defaults from {source}: {', '.join(sorted(defaults))}"] if source else []
    values = defaults | {key: value for key, value in options.items() if value not in (None, [], {})}
    values.setdefault("profile", "tcp")
    profile = find_profile(values["profile"])
    values.setdefault("gpus_per_node", profile.gpus_per_node)
    return values, notes


def strikes(run: Path, least: int = MAX_STRIKES) -> dict[str, int]:
    """Nodes with at least this many faults of their own, over all jobs of a run. For attempts that version 0.1 made,
    there are no records of a supervisor but lines of `failures.jsonl`; those without a job in their name are of a run
    on one machine, which strikes nobody."""
    launch = LaunchFolder(run)
    counts: Counter[str] = Counter(launch.lost_nodes())
    recorded: set[str] = set()
    for path in [launch.path / STATE, *launch.path.glob(f"shares/*/{STATE}")]:
        with suppress(StateError):  # a launch refuses that, with the reason
            records = read_state(path)
            counts.update(struck_nodes(records))
            recorded |= {record.attempt for record in records if isinstance(record, Opened)}
    earlier = [line for line in read_all_failures(run) if line["attempt"] not in recorded and _is_jobs(line["attempt"])]
    hosts = [line["host"] for line in earlier if line["kind"] in NODE_KINDS]
    counts.update(host for host in hosts if host and isinstance(host, str))
    return {host: count for host, count in counts.items() if count >= least}


def _is_jobs(attempt: str) -> bool:
    """Whether an attempt was one of a job on a cluster, by its name."""
    return "." in attempt and not attempt.startswith(f"{LOCAL}.")


def _exclude_bad_nodes(values: dict[str, Any], run: Path) -> list[str]:
    bad = strikes(run)
    if not bad:
        return []
    values["exclude"] = sorted({*values.get("exclude", []), *bad})
    return [f"excludes {', '.join(f'{node} ({failures} failures)' for node, failures in bad.items())}"]


def _job_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text)[:63]
