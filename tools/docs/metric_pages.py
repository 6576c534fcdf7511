"""The page of metrics, from their one list."""

from ingot.report.metric_names import METRICS


def pages() -> dict[str, str]:
    rows = "\n".join(f"| `{name}` | {meaning} |" for name, meaning in METRICS.items())
    return {"docs/reference/metrics.md": METRICS_PAGE.format(rows=rows)}


METRICS_PAGE = """# Metrics

Made from `src/ingot/report/metric_names.py`. Each row of `metrics.jsonl` covers the batches since the row before it; the
names are Composer's where Composer has the metric. TensorBoard shows the same names.

```python
import json

rows = [json.loads(line) for line in open("demo/run/metrics.jsonl")]
print(rows[-1]["loss/train/total"], rows[-1]["throughput/tokens_per_sec"])
```

| metric | meaning |
|---|---|
{rows}
"""
