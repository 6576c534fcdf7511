"""Scores as tables for a terminal of 80 columns."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from ingot.errors import ConfigError
from ingot.evaluation.tasks.offline import ModelReport

_BARS = "▁▂▃▄▅▆▇█"


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
    """How the accuracies and losses change from model to model: one column for each, and a curve."""
    labels = [str(report.path.name if report.step is None else report.step)[-10:] for report in reports]
    yield f"\n{'metric':48}" + "".join(f" {label:>10}" for label in labels) + "  curve"
    for name, values in curves(reports).items():
        shown = name.removeprefix("metrics/").replace("InContextLearning", "")
        yield f"{shown[:48]:48}" + "".join(f" {value:>10.4f}" for value in values) + f"  {sparkline(values)}"


def curves(reports: Sequence[ModelReport]) -> dict[str, list[float]]:
    """Accuracies, bits per byte of right answers, composites and losses over the models, by name."""
    kinds = ("Accuracy", "GoldBitsPerByte", "CrossEntropy")
    names = [name for name in reports[0].metrics() if name.endswith(kinds) or name.startswith("icl/")]
    return {name: [report.metrics().get(name, float("nan")) for report in reports] for name in names}


def sparkline(values: Sequence[float]) -> str:
    """Values as bars of one character, from the lowest to the highest of them."""
    low, high = min(values), max(values)
    if not math.isfinite(low + high):
        return ""
    return "".join(_BARS[round((value - low) / ((high - low) or 1) * (len(_BARS) - 1))] for value in values)


def draw_curves(reports: Sequence[ModelReport], picture: Path) -> None:
    """Accuracies above, bits per byte and losses below, over the steps, as PNG."""
    import matplotlib

    matplotlib.use("Agg")  # works without a display
    from matplotlib import pyplot

    steps = [index if report.step is None else report.step for index, report in enumerate(reports)]
    figure, axes = pyplot.subplots(2, 1, figsize=(7.5, 7), dpi=120, sharex=True)
    for name, values in curves(reports).items():
        is_share = name.endswith("Accuracy") or name.startswith("icl/")
        label = name.removeprefix("metrics/").removeprefix("icl/metrics/").replace("InContextLearning", "")
        axes[0 if is_share else 1].plot(steps, values, "o-", label=label, linewidth=1.2, markersize=4)
    for axis, title in zip(axes, ("accuracy", "bits per byte of right answers; loss"), strict=True):
        axis.set(ylabel=title)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=7)
    axes[1].set(xlabel="step")
    figure.tight_layout()
    try:
        figure.savefig(picture)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {picture}: cannot be written: {error}") from None
    finally:
        pyplot.close(figure)
