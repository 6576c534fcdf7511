"""Token ids of prompts against LLM Foundry's own, by hashes over whole task files."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from ingot.config.evaluation import TaskConfig
from ingot.data.tokenizer import load_tokenizer
from ingot.evaluation.tasks.prompts import build_questions, draw_examples
from ingot.evaluation.tasks.records import read_records

DATA = Path(__file__).parents[3] / "shared" / "data"
ANSWER = {"continuation_delimiter": "\nAnswer: "}
SVAMP = {"prelimiter": "Question: ", "continuation_delimiter": "\n\nA:", "cot_delimiter": "The answer is "}
LM, CHOICE, SCHEMA = "language_modeling", "multiple_choice", "schema"
GENERATION = "generation_task_with_answers"
# SHA-256 over the rows of a file: its own dataset classes and an independent implementation agree on them
EXPECTED: list[tuple[str, str, int, dict[str, str], str, str]] = [
    ("copa", CHOICE, 0, {}, "23ac9379518b680f", "1f8021d9d3a74695"),
    ("lambada_openai_small", LM, 0, {}, "b6e31491b65c1780", "6b5f4d0956797575"),
    ("lambada_openai", LM, 0, {}, "4e5e3f8863e12d49", "0ea0c90003dc7941"),
    ("winograd_wsc", SCHEMA, 0, {}, "d37b783c5657c7b4", "a76e1ac35439497d"),
    ("winograd_wsc", SCHEMA, 3, {}, "1999db05eff638af", "e21af38837c4e5bf"),
    ("winogrande", SCHEMA, 5, {}, "4d4f8e34d158527b", "7b9ba7921a6e2c88"),
    ("arc_challenge", CHOICE, 3, ANSWER, "f5e86808cba7ad84", "9966be556df1605b"),
    ("arc_easy", CHOICE, 3, ANSWER, "c96c3c8c77c4896b", "0d3ed3b2e1187d36"),
    ("openbook_qa", CHOICE, 10, {}, "8260e88a08087be1", "216a83bdaf0a72d4"),
    ("piqa", CHOICE, 10, ANSWER, "5f69eead02ce9497", "1f5110ecd305d681"),
    ("simple_arithmetic_nospaces", LM, 5, {}, "46f38ef6290b8797", "dc9d51cb20f62610"),
    ("svamp", GENERATION, 5, SVAMP, "e5e668768669f534", "5ffea2289710b740"),
    ("triviaqa_small", GENERATION, 3, {}, "5e3f48f7a156010e", "711ecbb6481bd61a"),
]
QUICK = {"copa", "lambada_openai_small", "winograd_wsc", "svamp", "triviaqa_small"}


def rows(name: str, kind: str, shots: int, more: dict[str, str], tokenizer_file: str) -> list[Any]:
    if not (DATA / "icl").is_dir():
        pytest.skip("the task files are not on this machine")
    config = TaskConfig.model_validate(
        {"label": name, "dataset_uri": str(DATA / "icl" / f"{name}.jsonl"), "icl_task_type": kind, "num_fewshot": shots}
        | more
    )
    records = read_records(config).records
    questions = build_questions(config, shots, records, load_tokenizer(DATA / tokenizer_file), 1024)
    return [row for question in questions for row in question.rows]


@pytest.mark.parametrize("tokenizer", ["gpt2_tokenizer.json", "20B_tokenizer.json"])
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=f"{c[0]}-{c[2]}", marks=[] if c[0] in QUICK else [pytest.mark.slow]) for c in EXPECTED],
)
def test_rows_have_the_token_ids_of_llm_foundry(case: tuple, tokenizer: str) -> None:
    name, kind, shots, more, gpt2, neox = case
    digest = hashlib.sha256()
    for row in rows(name, kind, shots, more, tokenizer):
        ids = (",".join(map(str, row.context)), ",".join(map(str, row.continuation)))
        digest.update(f"{ids[0]}|{ids[1]}\n".encode())
    assert digest.hexdigest()[:16] == (gpt2 if tokenizer.startswith("gpt2") else neox)


def test_generated_answers_get_the_room_of_the_longest_one() -> None:
    if not (DATA / "icl").is_dir():
        pytest.skip("the task files are not on this machine")
    for name, more, shots, tokenizer, most in [
        ("svamp", SVAMP, 5, "gpt2_tokenizer.json", 32),
        ("svamp", SVAMP, 5, "20B_tokenizer.json", 32),
        ("triviaqa_small", {}, 3, "gpt2_tokenizer.json", 57),
        ("triviaqa_small", {}, 3, "20B_tokenizer.json", 58),
    ]:
        config = TaskConfig.model_validate(
            {"label": name, "dataset_uri": str(DATA / "icl" / f"{name}.jsonl"), "icl_task_type": GENERATION,
             "num_fewshot": shots} | more
        )  # fmt: skip
        records = read_records(config).records
        questions = build_questions(config, shots, records, load_tokenizer(DATA / tokenizer), 1024)
        assert {question.max_new_tokens for question in questions} == {most}


@pytest.mark.parametrize(
    ("count", "shots", "first"),
    [(273, 3, [[3, 225, 59], [17, 42, 46]]), (1172, 3, [[15, 902, 239], [185, 171, 71]]),
     (1838, 10, [[185, 902, 71, 1192, 1419, 15, 239, 1652, 1593, 1375]])],
)  # fmt: skip
def test_examples_are_drawn_as_llm_foundry_draws_them(count: int, shots: int, first: list[list[int]]) -> None:
    assert draw_examples(count, shots, 1234)[: len(first)] == first
