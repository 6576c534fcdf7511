"""Plots the losses of a run."""

from pathlib import Path

from ingot.report.metrics_file import read_rows

TRAIN, EVAL = "loss/train/total", "metrics/eval/LanguageCrossEntropy"


def draw_loss_curve(run: Path, picture: Path, title: str) -> None:
    """Training and validation loss over tokens, as PNG."""
    import matplotlib

    matplotlib.use("Agg")  # works without a display
    from matplotlib import pyplot

    rows = read_rows(run)
    figure, axes = pyplot.subplots(figsize=(7.5, 4.2), dpi=120)
    for key, label, style in ((TRAIN, "train", "-"), (EVAL, "validation", "o-")):
        points = [(row["time/token"], row[key]) for row in rows if key in row]
        if points:  # a run that was stopped early has no validation loss
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1.2, markersize=4)
    axes.set(xlabel="tokens", ylabel="cross-entropy loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture)
    pyplot.close(figure)
