"""Experiment trackers in the peers' keys, as `loggers` here.

What they share: a tracker is on or off, and a few fields have other names. A value that a script takes from elsewhere
cannot be known here, so the tracker stays off and its row says how to turn it on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.migrate.translation import Translation

# by tracker: our field, and the peers' keys for it below `loggers.NAME`; tags of MLflow are a table
FOUNDRY_FIELDS: dict[str, tuple[str, dict[str, str]]] = {
    "wandb": ("wandb", {"project": "project", "entity": "entity", "name": "name", "group": "group", "tags": "tags",
                        "mode": "init_kwargs.mode", "id": "init_kwargs.id"}),
    "mlflow": ("mlflow", {"experiment_name": "experiment_name", "name": "run_name", "tracking_uri": "tracking_uri"}),
    "comet_ml": ("comet", {"workspace": "workspace", "project": "project_name", "name": "name"}),
    "cometml": ("comet", {"workspace": "workspace", "project": "project_name", "name": "name"}),
}  # fmt: skip
NEOX_WANDB = {"project": ("wandb_project", "wandb.project"), "entity": ("wandb_team", "wandb.team"),
              "name": ("wandb_run_name",), "group": ("wandb_group", "wandb.group")}  # fmt: skip
NEOX_COMET = {"workspace": ("comet_workspace",), "project": ("comet_project",), "name": ("comet_experiment_name",),
              "tags": ("comet_tags",)}  # fmt: skip
MEGATRON_WANDB = {"project": ("wandb_project",), "entity": ("wandb_entity", "wandb_team"),
                  "name": ("wandb_exp_name", "wandb_run_name"), "group": ("wandb_group",),
                  "id": ("wandb_id",)}  # fmt: skip
WANDB_HOST = "https://api.wandb.ai"


def put_foundry_trackers(t: Translation) -> None:
    """`loggers:` of LLM Foundry, by the names of Composer's arguments."""
    for theirs, (ours, fields) in FOUNDRY_FIELDS.items():
        section = f"loggers.{theirs}"
        given = [key for key in t.given if f"{key}.".startswith(f"{section}.") and t.given[key] is not None]
        if not given:
            continue
        if t.get(f"{section}.init_kwargs.mode") == "disabled":
            t.skip("the tracker is off", *given)
            continue
        _put(t, ours, given[:1], {field: (f"{section}.{key}",) for field, key in fields.items()})
        for key in given:
            if key.startswith(f"{section}.tags.") and ours == "mlflow":
                t.put(f"loggers.mlflow.tags.{key.removeprefix(f'{section}.tags.')}", str(t.given[key]), key)


def native_override_of(key: str, value: str) -> list[str] | None:
    """An override of a tracker in LLM Foundry's words as one of a native recipe; None if it is something else, or has
    no counterpart."""
    section, _, rest = key.removeprefix("loggers.").partition(".")
    if not key.startswith("loggers.") or section not in FOUNDRY_FIELDS:
        return None
    ours, fields = FOUNDRY_FIELDS[section]
    return [f"loggers.{ours}.{field}={value}" for field, theirs in fields.items() if theirs == rest] or None


def put_neox_trackers(t: Translation) -> None:
    """NeoX's keys, and DeepSpeed's section for W&B."""
    switches = ("use_wandb", "wandb.enabled")
    if t.get("use_wandb", t.get("wandb.enabled")) is True:
        t.put("loggers.wandb.project", "neox", "use_wandb")
        _put(t, "wandb", switches, NEOX_WANDB)
        _name_host(t)
    t.skip("use_wandb is not true", *switches, *(key for keys in NEOX_WANDB.values() for key in keys))
    if t.get("use_comet") is True:
        _put(t, "comet", ("use_comet",), NEOX_COMET)
    t.skip("use_comet is not true", "use_comet", *(key for keys in NEOX_COMET.values() for key in keys))


def put_megatron_trackers(t: Translation) -> None:
    """W&B is on if it has a project; forks also have a switch."""
    if t.get("wandb_project") or t.get("use_wandb") is True:
        _put(t, "wandb", ("use_wandb", "wandb_project"), MEGATRON_WANDB)
        _name_host(t)
    t.skip("W&B is off without wandb_project", *t.dialect.table["trackers"])


def _put(t: Translation, tracker: str, switches: Sequence[str], fields: Mapping[str, Sequence[str]]) -> None:
    """Turn a tracker on and set what is given of its fields, each by the first of its keys."""
    known = [key for keys in fields.values() for key in keys]
    if unknown := [key for key in (*switches, *known) if "$" in str(t.given.get(key))]:
        t.skip(f"not known here; turn the tracker on with loggers.{tracker}.project=...", *unknown, *switches, *known)
        return
    before = t.values.get("loggers", {}).get(tracker, {})
    t.put(f"loggers.{tracker}", before, *switches)
    for field, keys in fields.items():
        key = t.first_given(*keys)
        if (value := t.get(key)) not in (None, ""):
            t.put(f"loggers.{tracker}.{field}", _as_list(value) if field == "tags" else value, key)


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [str(value)]


def _name_host(t: Translation) -> None:
    host = str(t.get("wandb_host", WANDB_HOST)).rstrip("/")
    if host != WANDB_HOST and "$" not in host:
        t.warnings.append(f"wandb_host: W&B's own variable says where its server is; set WANDB_BASE_URL={host}")
    t.skip("W&B's default server, or the variable WANDB_BASE_URL", "wandb_host")
