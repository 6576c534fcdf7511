"""Cluster profiles: what a network needs to be told, as data, each variable with its reason.

A user's or a site's defaults (`~/.config/ingot/launch.yaml`, `/etc/ingot/launch.yaml`, or the file that
INGOT_LAUNCH_DEFAULTS names) fill in whatever the command line leaves out, so that the daily command stays short.
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


class ProfileVariable(Section):
    """One variable of a profile."""

    value: str
    """What it is set to."""
    reason: str
    """Why."""


class Profile(Section):
    """What is known about a kind of cluster."""

    description: str
    """Hardware."""
    gpus_per_node: int
    """GPUs of a node."""
    transport: str
    """What NCCL must be seen to choose: efa, ib or socket; gloo on CPUs."""
    nics: int | None = None
    """Network devices that a healthy node has; unknown if left out."""
    allreduce_gb_s: float | None = None
    """Bus bandwidth of an all-reduce over two healthy nodes, where it is known."""
    env: dict[str, ProfileVariable] = Field(default_factory=dict)
    """Variables to set."""
    mounts: list[str] = Field(default_factory=list)
    """What a container must see of the host."""
    kubernetes_resources: dict[str, int] = Field(default_factory=dict)
    """Devices that a pod asks for besides GPUs."""

    @property
    def variables(self) -> dict[str, str]:
        return {name: variable.value for name, variable in self.env.items()}


def profile_names() -> list[str]:
    return sorted(p.stem for p in _folder().glob("*.yaml"))


def find_profile(name: str) -> Profile:
    """A profile that ships with ingot, by name."""
    path = _folder() / f"{name}.yaml"
    if "/" in name or not path.is_file():
        close = difflib.get_close_matches(name, profile_names(), n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(profile_names())}"
        raise ConfigError(f"there is no profile {name!r}; {hint}")
    return validate(Profile, yaml.safe_load(path.read_text(encoding="utf-8")))


def launch_defaults() -> tuple[dict[str, Any], str]:
    """Fields of a launch spec that the user's file fills in, or else the site's; and which file that is."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    named = os.environ.get(DEFAULTS_VARIABLE)
    for path in [Path(named)] if named else [home / "ingot" / "launch.yaml", Path("/etc/ingot/launch.yaml")]:
        if not path.is_file():
            if named:
                raise ConfigError(f"{DEFAULTS_VARIABLE} names {path}, which is not there")
            continue
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        if not isinstance(values, dict):
            raise ConfigError(f"{path} must hold options of `ingot launch`, one per line, such as `partition: gpu`")
        for key in values:
            if key not in LaunchSpec.model_fields or key in ("arguments", "run_folder", "name", "verb"):
                close = difflib.get_close_matches(str(key), LaunchSpec.model_fields, n=1)
                raise ConfigError(
                    f"{path}: {key!r} is no option of a launch" + (f"; did you mean {close[0]}?" if close else "")
                )
        return values, str(path)
    return {}, ""


def _folder() -> Path:
    return Path(str(resources.files("ingot") / "launch" / "profiles"))
