"""Scores as tables for a terminal of 80 columns."""

from collections.abc import Iterator, Sequence

from ingot.evaluation.tasks.offline import ModelReport


def model_tables(report: ModelReport) -> Iterator[str]:
    """Composites, tasks and texts of one model, and then every metric by name."""
    step = "" if report.step is None else f", step {report.step}"
    yield f"\n{report.path}{step}"
    if report.composites:
        yield f"\n{'composite':48} {'score':>8}"
        yield from (f"{name[:48]:48} {value:>8.4f}" for name, value in report.composites.items())
    if report.scores:
        yield f"\n{'task':34} {'accuracy':>8} {'+-':>6} {'bits/byte':>9} {'questions':>9} {'cut':>4} {'s':>5}"
        for score in report.scores:
            name = "/".join(filter(None, (score.label, f"{score.shots}-shot", score.category)))
            bits = score.metrics.get("GoldBitsPerByte")
            shown = f"{bits:9.3f}" if bits is not None else f"{'':9}"
            row = f"{name[:34]:34} {score.accuracy:>8.4f} {score.standard_error:>6.4f} {shown}"
            yield f"{row} {score.questions:>9,} {score.cut_rows:>4} {score.seconds:>5.1f}"
    if report.texts:
        yield f"\n{'text':34} {'loss':>8} {'perplexity':>12} {'bits/byte':>9} {'tokens':>12}"
        for text in report.texts:
            loss, perplexity, bits = text.named_metrics().values()
            yield f"{text.label[:34]:34} {loss:>8.4f} {perplexity:>12.4g} {bits:>9.3f} {text.tokens:>12,}"
    yield ""
    yield from (f"{name}: {value:.4f}" for name, value in report.metrics().items())


def progress_table(reports: Sequence[ModelReport]) -> Iterator[str]:
    """How the accuracies and losses change from model to model, one column for each."""
    names = [
        name for name in reports[0].metrics() if "Accuracy" in name or name.startswith("icl/") or "CrossEntropy" in name
    ]
    labels = [str(report.path.name if report.step is None else report.step)[-10:] for report in reports]
    yield f"\n{'metric':48}" + "".join(f" {label:>10}" for label in labels)
    for name in names:
        shown = name.removeprefix("metrics/").replace("InContextLearning", "")
        values = [report.metrics().get(name, float("nan")) for report in reports]
        yield f"{shown[:48]:48}" + "".join(f" {value:>10.4f}" for value in values)
