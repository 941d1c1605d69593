"""The chart of :func:`dithoist.explain`: when the work of a call runs, and what is held for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..passes import TIMES, BindingTime
from .explanation import Explanation, TimeWork

_SHARES: dict[str, Callable[[TimeWork], int]] = {
    "operations": lambda row: row.operations,
    "FLOPs": lambda row: row.flops,
    "parameters read": lambda row: row.parameters_last_read,
}


def draw_shares(axes: Any, bars: Sequence[tuple[str, Mapping[str, float]]]) -> None:
    """A horizontal bar each, the first on top, of shares by binding time (the same times in every bar)."""
    left = [0.0] * len(bars)
    for label in (t.label for t in TIMES if t.label in bars[0][1]):
        widths = [100 * shares[label] for _, shares in bars]
        title = "step (body)" if label == BindingTime.STEP.label else label
        axes.barh([name for name, _ in bars], widths, left=left, label=title)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()


def draw(found: Explanation, path: Path) -> None:
    """Write the chart to ``path``; its ending gives the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    shares, held = figure.subplots(1, 2, width_ratios=(3, 2))
    bars = []
    for title, amount in _SHARES.items():
        total = max(1, sum(map(amount, found.by_time.values())))
        bars.append((title, {label: amount(row) / total for label, row in found.by_time.items()}))
    draw_shares(shares, bars)
    shares.set_xlabel("share, %")
    shares.set_title(f"{found.name}: when the work runs", fontsize=10)
    shares.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=5, fontsize=8)

    rows = {label: row for label, row in found.by_time.items() if label != BindingTime.STEP.label}
    for offset, title in ((-0.2, "as it is"), (0.2, "after the cut")):
        amounts = [row.bytes_held_uncut if offset < 0 else row.bytes_held for row in rows.values()]
        held.bar([i + offset for i in range(len(rows))], [n / 1e6 for n in amounts], 0.4, label=title)
    ticks = [f"{label}\n(one step)" if "schedule" in label else label for label in rows]
    held.set_xticks(range(len(rows)), ticks, fontsize=8)
    held.set_yscale("log")
    held.set_ylabel("MB")
    held.set_title("values held for later times", fontsize=10)
    held.legend(fontsize=8)
    figure.savefig(path, dpi=130)
