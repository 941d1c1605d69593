"""A run as a picture: how time grows with steps, picture tokens and depth, and the families side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .cases import Case, series
from .results import CaseResult, Run, VariantResult
from .variants import OURS, PLAIN

_MARKERS = "osD^v<>P*X"


def draw(run: Run, path: Path) -> None:
    """Write four panels to ``path``; its ending decides the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(14, 10))
    _families(axes[0, 0], run)
    _steps(axes[0, 1], run)
    _tokens(axes[1, 0], run)
    _depth(axes[1, 1], run)
    figure.suptitle(f"{run.platform}: {run.machine}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _series(run: Run, along: str) -> list[list[CaseResult]]:
    by_case: dict[Case, CaseResult] = {result.case: result for result in run.results}
    return [[by_case[case] for case in group] for group in series(by_case, along)]


def _families(axes: Any, run: Run) -> None:
    found = [r for r in run.results if r.case == Case(r.case.family, dtype=r.case.dtype)] or run.results
    for offset, (figure, label) in ((-0.2, ("steps", "a step")), (0.2, ("pictures", "a picture, new prompt"))):
        ratios = [(i, s) for i, r in enumerate(found) if (s := r.speedup(OURS, PLAIN, figure))]
        if ratios:
            errors = [[s.value - s.low for _, s in ratios], [s.high - s.value for _, s in ratios]]
            heights = [s.value for _, s in ratios]
            axes.bar([i + offset for i, _ in ratios], heights, 0.4, yerr=errors, capsize=3, label=label)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(found)), [r.case.family for r in found], rotation=30, ha="right")
    axes.set_ylabel(f"speed-up over {PLAIN}")
    _finish(axes, f"{OURS}, families at one size", bool(found))


def _steps(axes: Any, run: Run) -> None:
    groups = _series(run, "steps")
    for marker, group in zip(_MARKERS, groups, strict=False):
        for name in ("eager", PLAIN, OURS):
            known = [r for r in group if name in r.variants]
            if len(known) < 2:
                continue
            x = [r.case.steps for r in known]
            y = [statistics.median(r.variants[name].pictures) for r in known]
            line = statistics.linear_regression(x, y)
            floors = [statistics.median(r.floor) for r in known if r.floor]
            body = f", body {1e3 * statistics.median(floors):.1f}" if name == OURS and floors else ""
            label = f"{group[0].case.family} {name}: slope {1e3 * line.slope:.1f} ms{body}"
            (drawn,) = axes.plot(x, y, marker, label=label)
            ends = [0, max(x)]
            axes.plot(ends, [line.intercept + line.slope * s for s in ends], "-", color=drawn.get_color(), alpha=0.5)
    axes.set_xlabel("steps")
    axes.set_ylabel("seconds per picture")
    _finish(axes, "time per picture: what is hoisted is paid once", bool(groups))


def _tokens(axes: Any, run: Run) -> None:
    groups = _series(run, "tokens")
    _lines(axes, groups, (PLAIN, OURS), lambda r: r.case.tokens, lambda v: 1e3 * statistics.median(v.steps))
    if groups:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    axes.set_xlabel("picture tokens")
    axes.set_ylabel("ms per step")
    _finish(axes, "time per step", bool(groups))


def _depth(axes: Any, run: Run) -> None:
    groups = _series(run, "blocks")
    _lines(axes, groups, (PLAIN, "regional", OURS), lambda r: r.depth, lambda v: v.first_call)
    axes.set_xlabel("repeated blocks")
    axes.set_ylabel("seconds, first call")
    _finish(axes, "cold compile", bool(groups))


def _lines(
    axes: Any,
    groups: list[list[CaseResult]],
    names: Sequence[str],
    x: Callable[[CaseResult], float],
    y: Callable[[VariantResult], float],
) -> None:
    """A line for each group and variant, through the cases that have the variant."""
    for marker, group in zip(_MARKERS, groups, strict=False):
        for name in names:
            known = [r for r in group if name in r.variants]
            times = [y(r.variants[name]) for r in known]
            axes.plot([x(r) for r in known], times, f"{marker}-", label=f"{group[0].case.family} {name}")


def _finish(axes: Any, title: str, any_case: bool) -> None:
    axes.set_title(title)
    if any_case and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)
    else:
        axes.text(0.5, 0.5, "no cases for this in the run", ha="center", transform=axes.transAxes)
