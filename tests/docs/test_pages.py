"""What the pages say about themselves and the results of benchmarks holds."""

import json
import re
import tomllib
from pathlib import Path

import benchmark_pages

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUESTIONS = (ROOT / "docs" / "how-do-i.md").read_text(encoding="utf-8")


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower()).replace(" ", "-")


def test_fifty_questions_have_an_answer_that_exists() -> None:
    links = re.findall(r"^- \[.+?\]\((.+?)\)", QUESTIONS, re.MULTILINE)
    assert len(links) >= 50
    made = {"config.md", "metrics.md", "exit-codes.md"}  # when the documentation is built, which checks these links
    for link in links:
        page, _, anchor = link.partition("#")
        assert anchor, f"{link} must name a paragraph"
        if Path(page).name in made:
            continue
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert anchor in {slug(h) for h in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}, link


def test_the_readme_is_one_page() -> None:
    assert len(README.splitlines()) <= 150


def test_the_speed_table_of_the_readme_has_the_measured_numbers() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text())["rows"]
    rows = [r for r in rows if r["positions"] == "learned" and r.get("optimizer", "adamw") == "adamw"]
    measured = {(r["model"], r["precision"], r["system"]): r for r in rows}
    table = re.findall(r"^\| (125m|1b|3b|7b)(, fp8)? \| ([\d,]+) \| ([\d.]+)% \| ([\d,]*) ?\|$", README, re.MULTILINE)
    assert len(table) == 5
    for model, fp8, tokens, mfu, peer in table:
        precision = "fp8" if fp8 else "bf16"
        own = measured[model, precision, "ingot"]
        assert (tokens, mfu) == (f"{own['tokens_per_second']:,}", f"{100 * own['mfu_full']:.1f}")
        other = measured.get((model, precision, "nanogpt"))
        assert peer == (f"{other['tokens_per_second']:,}" if other else "")


def test_every_question_of_the_performance_page_has_a_table_and_a_chart_from_the_results() -> None:
    made = benchmark_pages.pages(ROOT / "benchmarks" / "results")
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    questions = re.findall(r"^## (\w+ [^\n]*\?)\n(.*?)(?=^## )", page, re.DOTALL | re.MULTILINE)
    assert len(questions) > 7
    for question, answer in questions:
        assert len(re.findall(r"\]\(generated/[\w-]+\.svg\)", answer)) == 1, question
        assert re.search(r"\{include\} generated/[\w-]+\.md", answer), question
    notes = (ROOT / "docs" / "explanation" / "gpu-step.md").read_text(encoding="utf-8")
    used = set(re.findall(r"generated/[\w-]+\.\w+", page + notes))
    assert {f"docs/{name}" for name in used} == set(made)
    apart = re.search(r"machines by up to ([\d.]+)%", made["docs/generated/gpu-again.md"])
    stated = re.search(r"Machines differ by up to (\d+)%", README)
    assert apart and stated and round(float(apart[1])) == int(stated[1])


def test_the_torch_that_the_install_page_names_is_the_pinned_one() -> None:
    pinned = re.search(r"^torch==[\d.]+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned and f"install {pinned[0]} --index-url" in (ROOT / "docs" / "get-started" / "install.md").read_text()


def test_every_extra_is_on_the_install_page() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "get-started" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+?) \|", page, re.MULTILINE)
    assert set(extras) == {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_every_row_of_the_comparison_says_how_it_was_established() -> None:
    table = README.partition("## How it compares")[2].partition("## Speed")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "---" not in line]
    page = (ROOT / "docs" / "reference" / "comparison.md").read_text(encoding="utf-8")
    assert len(rows) > 10 and all(row.count("|") == 8 for row in rows)
    for project in ("LLM Foundry", "Megatron-LM", "GPT-NeoX", "torchtitan", "litgpt"):
        assert project in rows[0] and page.count(project) >= 5


def test_the_architecture_page_is_in_the_menu_and_generated_pages_are_not_committed() -> None:
    assert "architecture" in (ROOT / "docs" / "index.md").read_text()
    for name in ("verbs", "config", "recipes", "metrics", "exit-codes"):
        assert not (ROOT / "docs" / "reference" / f"{name}.md").exists()
