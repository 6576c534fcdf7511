"""Task files in an object store."""

import json

import obstore
import pytest

from ingot.config.evaluation import TaskConfig
from ingot.errors import IngotError
from ingot.evaluation.tasks.records import read_records


def test_a_task_file_is_read_from_an_object_store(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    store = obstore.store.from_url("s3://test", client_options={"allow_http": True})
    rows = [
        {"query": "1 + 1 =", "choices": ["2", "3"], "gold": 0},
        {"query": "2 + 2 =", "choices": ["5", "4"], "gold": 1},
    ]
    obstore.put(store, "tasks/sums.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())

    def task(name: str) -> TaskConfig:
        return TaskConfig.model_validate(
            {
                "label": "sums",
                "dataset_uri": f"s3://test/tasks/{name}",
                "icl_task_type": "multiple_choice",
                "num_fewshot": [0],
            }
        )

    records = read_records(task("sums.jsonl")).records
    assert [record.gold for record in records] == [0, 1]
    with pytest.raises(IngotError, match=r"absent\.jsonl"):
        read_records(task("absent.jsonl"))
