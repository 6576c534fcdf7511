"""What ranks of a launched run find around them: variables of the profile and the user, secrets, limits, the working
directory."""

import os
import resource
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ingot.errors import ConfigError
from ingot.launch.profiles import find_profile
from ingot.launch.spec import LaunchSpec


def enter_environment(spec: LaunchSpec, env: Mapping[str, str]) -> dict[str, str]:
    """Change to the working directory and raise this process's limits; returns the environment of the ranks."""
    found = {**env, **launch_variables(spec)}
    os.chdir(spec.workdir)
    _raise_limits()
    return found


def launch_variables(spec: LaunchSpec) -> dict[str, str]:
    """What the profile, the user and the secrets add to the environment."""
    values = find_profile(spec.profile).variables | spec.env
    values |= {"PYTHONUNBUFFERED": "1"}
    return values | {name: read_secret(name) for name in spec.secrets}


def read_secret(name: str) -> str:
    """A secret, from the environment or a file that only its owner can read."""
    if name in os.environ:
        return os.environ[name]
    path = Path.home() / ".config" / "ingot" / "secrets" / name
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigError(f"{path} can be read by others; run chmod 600 on it")
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise ConfigError(f"the secret {name} is neither in the environment nor in {path}") from None


def _raise_limits() -> None:
    """Allow as many open files and as much locked memory (for RDMA) as this user may have."""
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK):
        with suppress(ValueError, OSError):
            resource.setrlimit(limit, (resource.getrlimit(limit)[1],) * 2)
