"""Recipes that ship with the package, by name."""

import difflib
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from ingot.errors import ConfigError


def recipe_folder() -> Path:
    return Path(str(resources.files("ingot") / "config" / "recipes"))


def recipe_names() -> list[str]:
    """All recipes, families together and small before large."""
    return sorted((p.stem for p in recipe_folder().glob("*.yaml")), key=_family_then_size)


def find_recipe(name: str) -> Path:
    """A path to a YAML file, or the name of a recipe."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = recipe_folder() / f"{name}.yaml"
    if "/" not in name and shipped.is_file():
        return shipped
    if path.suffix in (".yaml", ".yml", ".json") or "/" in name:
        raise ConfigError(f"no such config file: {name}")
    raise ConfigError(f"'{name}' is neither a file nor a recipe; {_closest_recipes(name)}")


def _closest_recipes(name: str) -> str:
    """The recipe of nearly this name; or those of the family, such as gpt3 for gpt2; or where all are."""
    names = recipe_names()
    if close := difflib.get_close_matches(name, names, n=1, cutoff=0.75):
        return f"did you mean {close[0]}?"
    families = sorted({found.rpartition("-")[0] or found for found in names})
    for family in difflib.get_close_matches(name.rpartition("-")[0] or name, families, n=1, cutoff=0.6):
        members = [found for found in names if found.rpartition("-")[0] == family]
        return f"did you mean one of {', '.join(members[:4])}?"
    return "see `ingot recipes list`"


def check_recipe(arguments: Sequence[str]) -> None:
    """Refuse overrides alone: without a recipe, a file or a key of the model, the defaults are a model of 1.3 billion
    parameters that nobody asked for."""
    for argument in arguments:
        if "=" not in argument or argument.startswith(("--", "model.", "model=")) or os.path.isfile(argument):
            return
    raise ConfigError(
        "the command names no recipe, so the model is unknown; add a recipe such as demo, pythia-14m or mpt-125m "
        f"(`ingot recipes list` shows all), a config file or model.* keys: `ingot train mpt-125m {arguments[0]}`"
    )


def _family_then_size(name: str) -> tuple[str, float]:
    family, _, size = name.rpartition("-")
    try:
        return family, float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    except (KeyError, ValueError, IndexError):
        return name, 0.0
