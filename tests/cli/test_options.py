"""Options made of a section's fields."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import BeforeValidator, Field
from typer.testing import CliRunner

from ingot.cli.commands import OptionCommand
from ingot.cli.options import options_from
from ingot.config.base import Section

Size = Annotated[int, BeforeValidator(lambda text: len(str(text)))]


class Placement(Section):
    nodes: int = Field(3, json_schema_extra={"flags": ["--nodes", "-N"]})
    """How many nodes."""
    out_root: Path | None = Field(None, json_schema_extra={"flags": ["--out_root", "--output_folder"]})
    """Where to write."""
    kind: Literal["mds", "indexed"] = "mds"
    """Which format."""
    preflight: bool = True
    """Whether to check."""
    dry: bool = False
    """Whether to do nothing."""
    names: list[str] = Field(default_factory=list)
    """Some names."""
    size: Size = 7
    """A size."""
    secret: str = Field("", json_schema_extra={"hidden": True})
    """Not in the help."""
    other: str = "unused"
    """Not an option of this command."""


@pytest.fixture
def run() -> Any:
    app = typer.Typer()
    given: list[dict[str, Any]] = []

    @app.command("place", cls=OptionCommand)
    @options_from(Placement, fields=[name for name in Placement.model_fields if name != "other"])
    def place(what: Annotated[str, typer.Argument()] = "x", **options: Any) -> None:
        """Place it."""
        given.append({"what": what, **options})

    @app.command("second")
    def second() -> None: ...

    def invoke(*arguments: str) -> Any:
        done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
        return given.pop() if given else done

    return invoke


def test_the_command_receives_what_was_given_and_nothing_else(run: Any) -> None:
    assert run("place") == {"what": "x"}
    given = run("place", "y", "-N", "5", "--out_root", "a", "--names", "b", "--names=c", "--kind", "indexed", "--dry")
    expected = {"what": "y", "nodes": 5, "out_root": Path("a"), "names": ["b", "c"], "kind": "indexed", "dry": True}
    assert given == expected
    assert run("place", "--nodes", "3", "--no-preflight") == {"what": "x", "nodes": 3, "preflight": False}
    assert run("place", "--size", "12gb", "--secret", "s") == {"what": "x", "size": "12gb", "secret": "s"}


def test_hyphens_and_underscores_are_the_same_but_not_after_two_hyphens(run: Any) -> None:
    assert run("place", "--output-folder=a_b") == {"what": "x", "out_root": Path("a_b")}
    assert run("place", "--no_preflight", "--", "--out-root") == {"what": "--out-root", "preflight": False}


def test_a_field_that_is_not_an_option_of_the_command_is_refused(run: Any) -> None:
    done = run("place", "--other", "a")
    assert done.exit_code == 2 and "--other" in done.output


def test_the_help_has_docstrings_spellings_choices_and_defaults(run: Any) -> None:
    text = " ".join(run("place", "--help").output.split())
    for part in (
        "--nodes",
        "-N",
        "How many nodes.",
        "[default: 3]",
        "--out_root",
        "Also --output_folder",
        "mds, indexed",
    ):
        assert part in text, part
    assert "--no-preflight" in text and "--no-dry" not in text
    assert "--secret" not in text and "--other" not in text
    assert "Place it." in run("--help").output
