"""The plot of serving_load.py: grouped bars, readable without colour."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

Found = dict[str, dict[str, dict[str, float]]]  # trace -> engine -> medians


class Panel(NamedTuple):
    """What one panel shows."""

    label: str
    bar: str  # a metric
    to: str | None = None  # another, up to which a line is drawn
    factor: float = 1.0
    log: bool = True


PANELS = [
    Panel("new and prompt tokens/s", "all_per_second", log=False),
    Panel("arrival to first token (s); line: p95", "first_p50", "first_p95"),
    Panel("arrival to whole answer (s); line: p95", "whole_p50", "whole_p95"),
    Panel("gap between tokens (ms); line: max", "gap_p50", "gap_max", 1e3),
    Panel("peak memory (MiB)", "peak", log=False),
]
HATCHES = ["", "///", "...", "xx", "\\\\\\", "++"]
GREYS = ["0.35", "0.6", "0.75", "0.95"]


def plot(found: Found, engines: Sequence[str], file: Path) -> None:
    """Draw to file, .png or .svg; an engine without numbers leaves its place empty.

    Raises ImportError without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # the text as text, and the same file from the same numbers
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tiny_llm"})
    figure, axes = plt.subplots(1, len(PANELS), figsize=(18, 4.4), layout="constrained")
    width = 0.8 / len(engines)
    for axis, panel in zip(axes, PANELS, strict=True):
        for number, engine in enumerate(engines):
            here = [(n, m[engine]) for n, m in enumerate(found.values()) if engine in m]
            places = [n + (number - (len(engines) - 1) / 2) * width for n, _ in here]
            values = [m[panel.bar] * panel.factor for _, m in here]
            axis.bar(
                places,
                values,
                width,
                label=engine,
                color=GREYS[number % len(GREYS)],
                edgecolor="black",
                linewidth=0.6,
                hatch=HATCHES[number % len(HATCHES)],
            )
            if panel.to:
                ends = [m[panel.to] * panel.factor for _, m in here]
                axis.vlines(places, values, ends, color="black", linewidth=1)
                axis.plot(places, ends, "_", color="black", markersize=5)
        axis.set_xticks(range(len(found)), list(found))
        axis.set_xlabel("trace")
        axis.set_ylabel(panel.label)
        axis.grid(True, axis="y", alpha=0.3)
        axis.set_axisbelow(True)
        if panel.log:
            axis.set_yscale("log")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(engines))
    file.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if file.suffix == ".svg" else None
    figure.savefig(file, dpi=110, metadata=metadata)
    plt.close(figure)
