"""Cluster profiles: the settings that a cluster's network needs, as data, each variable with its reason.

A user's or a site's defaults (`~/.config/ingot/launch.yaml`, `/etc/ingot/launch.yaml`, or the file that
INGOT_LAUNCH_DEFAULTS names) set the options that a command line does not, so that daily commands stay short.
"""

import difflib
import os
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from ingot.config.base import Section
from ingot.config.load import validate
from ingot.errors import ConfigError
from ingot.launch.spec import LaunchSpec

DEFAULTS_VARIABLE = "INGOT_LAUNCH_DEFAULTS"
OF_ONE_RUN = ("arguments", "run_folder", "name", "verb")  # fields that have no default for all runs


class ProfileVariable(Section):
    """An environment variable of a profile."""

    value: str
    """Its value."""
    reason: str
    """Why it has this value."""


class Profile(Section):
    """A kind of cluster."""

    description: str
    """Hardware."""
    gpus_per_node: int
    """GPUs per node."""
    transport: str
    """The transport that NCCL must choose: efa, ib or socket; gloo on CPUs."""
    nics: int | None = None
    """Network devices of a healthy node, if known."""
    allreduce_gb_s: float | None = None
    """Bus bandwidth of an all-reduce over two healthy nodes, if known."""
    env: dict[str, ProfileVariable] = Field(default_factory=dict)
    """Environment variables to set."""
    mounts: list[str] = Field(default_factory=list)
    """Host folders that a container must mount."""
    kubernetes_resources: dict[str, int] = Field(default_factory=dict)
    """Devices that a pod requests in addition to GPUs."""

    @property
    def variables(self) -> dict[str, str]:
        return {name: variable.value for name, variable in self.env.items()}


def profile_names() -> list[str]:
    return sorted(p.stem for p in _folder().glob("*.yaml"))


def find_profile(name: str) -> Profile:
    """A profile that comes with ingot."""
    path = _folder() / f"{name}.yaml"
    if "/" in name or not path.is_file():
        close = difflib.get_close_matches(name, profile_names(), n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(profile_names())}"
        raise ConfigError(f"there is no profile {name!r}; {hint}")
    return validate(Profile, yaml.safe_load(path.read_text(encoding="utf-8")))


def launch_defaults() -> tuple[dict[str, Any], str]:
    """The launch spec fields that the user's defaults file sets, or else the site's; and the path of that file."""
    named = os.environ.get(DEFAULTS_VARIABLE)
    if named and not Path(named).is_file():
        raise ConfigError(f"{DEFAULTS_VARIABLE} names {named}, which does not exist")
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    files = [Path(named)] if named else [home / "ingot" / "launch.yaml", Path("/etc/ingot/launch.yaml")]
    path = next((path for path in files if path.is_file()), None)
    return (_read_defaults(path), str(path)) if path else ({}, "")


def _read_defaults(path: Path) -> dict[str, Any]:
    values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold options of `ingot launch`, one per line, such as `partition: gpu`")
    for key in values:
        if key not in LaunchSpec.model_fields or key in OF_ONE_RUN:
            close = difflib.get_close_matches(str(key), LaunchSpec.model_fields, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{path}: {key!r} is not an option of `ingot launch`{hint}")
    return values


def _folder() -> Path:
    return Path(str(resources.files("ingot") / "launch" / "profiles"))
