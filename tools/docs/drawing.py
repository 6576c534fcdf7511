"""Tables in Markdown and charts in SVG, as the pages of benchmarks have them."""

import io

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

INGOT, PEER = "#2962a5", "#b3b9c2"


def table(head: list[str], rows: list[list[object]]) -> str:
    """A Markdown table; every column but the first is aligned to the right."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)]) + "\n"


def bars(labels: list[str], values: list[float], unit: str, log: bool = False, peers: bool = True) -> str:
    """A chart of horizontal bars as SVG; with `peers`, only bars whose label begins with ingot have its color."""
    figure, axes = plt.subplots(figsize=(7.5, 0.4 * len(labels) + 0.8))
    colors = [PEER if peers and not label.startswith("ingot") else INGOT for label in labels]
    drawn = axes.barh(labels, values, color=colors)
    axes.bar_label(drawn, [f" {value:,.3g}" if value < 1000 else f" {value:,.0f}" for value in values])
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    if log:
        axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight", transparent=False, metadata={"Date": None})
    plt.close(figure)
    return text.getvalue()
