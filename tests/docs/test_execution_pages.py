"""What the pages say of a card follows from the rows that it left, and what has no row is called not measured."""

from typing import Any

import execution_pages
from execution_pages import Executions


def timed(section: str, variant: str, speed: int, **more: Any) -> dict[str, Any]:
    return {"section": section, "variant": variant, "model": f"mpt-{section}", "seq_len": 2048, "precision": "bf16",
            "tokens_per_second": speed, "memory_gib": 10.0, "microbatch": 2, "recompute": None, "command": "call",
            "at": 1000, "host_syncs": 0, "causal_rate": 0.7, "full_rate": 0.8, "matmul_tflops": 690.0, **more}  # fmt: skip


def goals(*rows: dict[str, Any]) -> dict[str, tuple[str, str]]:
    lines = execution_pages.goal_table(Executions({"executions": list(rows)})).splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {goal: (result, verdict) for goal, result, verdict in cells}


def test_without_rows_no_goal_is_met_or_missed() -> None:
    failed = {"section": "7b", "variant": "wrapped", "error": "out of time", "at": 1, "command": "call"}
    found = goals(failed)
    assert len(found) > 12 and {verdict for _, verdict in found.values()} == {"not measured"}


def test_a_goal_is_judged_by_the_ratio_within_one_call() -> None:
    plain, goal = timed("7b", "plain", 1000), "7b wrapped by FSDP2 at 0.99 of the plain process"
    assert goals(plain, timed("7b", "wrapped", 991))[goal] == ("0.991", "met")
    assert goals(plain, timed("7b", "wrapped", 980))[goal] == ("0.980", "missed")
    assert goals(plain, timed("7b", "wrapped", 991, command="another"))[goal] == ("", "not measured")
    assert goals(plain, timed("7b", "wrapped", 991, at=9000))[goal] == ("", "not measured")
    in_turn = timed("7b", "wrapped", 700, base="plain", ratio=0.995)  # the median of three turns
    assert goals(plain, in_turn)[goal] == ("0.995", "met")


def test_fp8_is_judged_by_bf16_of_the_same_call_and_by_its_loss_at_the_end() -> None:
    goal = "7b in fp8, wrapped, at 1.35 of bf16, wrapped"
    base = timed("7b", "wrapped", 1000)
    assert goals(base, timed("7b", "wrapped fp8", 1004, precision="fp8"))[goal] == ("1.004", "missed")
    assert goals(base, timed("7b", "wrapped fp8", 1400, precision="fp8"))[goal] == ("1.400", "met")
    for end, outcome in ((0.0099, "met"), (0.0121, "missed")):
        curve = {
            "section": "fp8-300",
            "variant": "losses, fp8 and bf16",
            "of_the_last_tenth": end,
            "largest_difference": 0.025,
        }
        found = goals(curve)["loss of wrapped fp8 within 1% of bf16 after 300 steps"]
        assert found == (f"{end:.2%} in the last tenth of the steps, at most 2.5% in one", outcome)


def test_a_wait_or_a_slow_load_misses_its_goal() -> None:
    load = {"section": "checkpoint", "variant": "load, warm", "ratio": 1.25, "seconds": 5.0, "dcp_seconds": 4.0}
    found = goals(load, timed("1b", "plain", 5, host_syncs=2))
    assert found["loading a checkpoint no slower than DCP"] == ("5.00 s, DCP 4.00 s", "missed")
    assert found["no step waits for the device"] == ("2 waits in 1 variants", "missed")


def test_rates_count_attention_in_both_ways_and_name_what_is_missing() -> None:
    text = execution_pages.rate_table(Executions({"executions": [timed("1b", "plain", 5, full_rate=0.94)]}))
    assert "| 1b, plain | 690 | 0.700 | 0.940 | 0.93 | met |" in text
    assert "Not measured with the current tree: 125m, 350m, 760m, 3b, 7b, llama-1b, pythia-1b, pythia-2.8b." in text
