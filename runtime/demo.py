"""``dithoist demo``: the main job on two real diffusers pipelines, before and after ``compile_pipeline``.

Each pipeline makes a picture as it is, and again after ``compile_pipeline`` with the ``eager`` back end, which
promises the same bits, and with ``inductor``. Timings come from repeats in which the untouched pipeline and the
compiled ones take turns.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..models.small import build_pipeline, example_call
from ..passes import TIMES
from .chart import draw_shares
from .pipeline import compile_pipeline
from .report import Report, report

PIPELINES = ("glm-image", "ideogram-4")
BACKENDS = ("eager", "inductor")


@dataclass
class Outcome:
    """What one pipeline gave with one back end."""

    backend: str
    largest_error: float
    largest_value: float
    first_call: float
    untouched: list[float] = field(default_factory=list)
    """Seconds per step, untouched, interleaved with ``compiled``."""
    compiled: list[float] = field(default_factory=list)
    report: Report | None = None

    @property
    def speedup(self) -> float:
        """Time of an untouched step over that of a compiled one, medians."""
        return statistics.median(self.untouched) / statistics.median(self.compiled)


class _Generator:
    """Runs generations of one pipeline and advances a progress bar at each of their steps."""

    def __init__(self, name: str, pipe: Any, steps: int, progress: Progress) -> None:
        self.name = name
        self.steps = steps
        self.progress = progress
        self.pipe = pipe
        self.latents = torch.empty(0)
        self.picture: Any = None

    def run(self, title: str, stop_after: int | None = None) -> list[float]:
        """One generation, or its first steps; keeps latents and picture. Returns the seconds from each step's
        end to the next's, so the first step, which may fill tables, is not among them."""
        last = stop_after or self.steps
        if not self.progress.console.is_terminal:  # A bar would not show.
            self.progress.console.print(f"{self.name}: {title} ...")
        task = self.progress.add_task(f"{self.name}: {title}", total=last)
        ends: list[float] = []

        def on_step_end(pipe: Any, _step: int, _time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            ends.append(time.perf_counter())
            self.latents = tensors["latents"]
            pipe._interrupt = len(ends) >= last
            self.progress.advance(task)
            return {}

        call = example_call(self.name, "demo", steps=self.steps, output_type="pil")
        self.picture = self.pipe(**call, callback_on_step_end=on_step_end).images[0]
        self.progress.remove_task(task)
        return [b - a for a, b in itertools.pairwise(ends)]


def run_demo(
    out: Path,
    *,
    pipelines: tuple[str, ...] = PIPELINES,
    backends: tuple[str, ...] = BACKENDS,
    steps: int = 20,
    repeats: int = 2,
    console: Console | None = None,
) -> dict[str, list[Outcome]]:
    """Run the main job, print a table per pipeline, write pictures, reports and a chart to ``out``.

    Args:
        out: folder for the files; made if it is not there.
        pipelines: which of :data:`PIPELINES`.
        backends: back ends to compile with, in order.
        steps: denoising steps per picture.
        repeats: timed rounds, in each of which every variant runs the first third of the steps.
        console: where to print.

    Returns:
        The outcomes by pipeline.
    """
    console = console or Console()
    console.width = max(console.width, 100)  # A pipe has no width; the tables need one.
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module="diffusers|transformers")
    out.mkdir(parents=True, exist_ok=True)
    outcomes = {}
    for name in pipelines:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            outcomes[name] = _run_pipeline(name, out, backends, steps, repeats, progress)
        _print_outcomes(console, name, outcomes[name])
    chart = out / "demo.png"
    _draw(outcomes, chart)
    console.print(f"pictures, reports and the chart ({chart.name}) are in {out}/")
    return outcomes


def _run_pipeline(
    name: str, out: Path, backends: tuple[str, ...], steps: int, repeats: int, progress: Progress
) -> list[Outcome]:
    untouched = _Generator(name, build_pipeline(name, "demo"), steps, progress)
    untouched.run("untouched")
    untouched.picture.save(out / f"{name}.png")

    compiled, outcomes = [], []
    for backend in backends:
        pipe = compile_pipeline(copy.deepcopy(untouched.pipe), backend=backend)
        generator = _Generator(name, pipe, steps, progress)
        start = time.perf_counter()
        generator.run(f"{backend}, first call (compiles)")
        first_call = time.perf_counter() - start
        error = _error(generator.latents, untouched.latents)
        compiled.append(generator)
        outcomes.append(Outcome(backend, error, float(untouched.latents.abs().max()), first_call))
        generator.picture.save(out / f"{name}-{backend}.png")

    for number in range(1, repeats + 1):
        third = max(steps // 3, 2)
        times = untouched.run(f"untouched, round {number}", third)
        for outcome, generator in zip(outcomes, compiled, strict=True):
            outcome.untouched += times
            outcome.compiled += generator.run(f"{outcome.backend}, round {number}", third)

    for outcome, generator in zip(outcomes, compiled, strict=True):
        outcome.report = report(generator.pipe)
        (out / f"{name}-{outcome.backend}.json").write_text(outcome.report.to_json())
    return outcomes


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return 0.0 if torch.equal(actual, expected) else float((actual - expected).abs().max())


def _print_outcomes(console: Console, name: str, outcomes: list[Outcome]) -> None:
    table = Table(title=f"{name}: compiled against untouched", title_justify="left")
    for column in ("back end", "latents", "untouched, ms/step", "compiled", "ratio", "first call, s"):
        table.add_column(column, no_wrap=True, justify="left" if column in ("back end", "latents") else "right")
    for outcome in outcomes:
        error = outcome.largest_error
        verdict = f"error {error:.0e} of {outcome.largest_value:.0f}" if error else "bitwise equal"
        untouched, compiled = (1e3 * statistics.median(t) for t in (outcome.untouched, outcome.compiled))
        cells = (f"{untouched:.1f}", f"{compiled:.1f}", f"{outcome.speedup:.2f}x", f"{outcome.first_call:.1f}")
        table.add_row(outcome.backend, verdict, *cells)
    console.print(table, soft_wrap=True)
    moved = outcomes[0].report
    assert moved is not None
    console.print(str(moved), highlight=False, soft_wrap=True)
    console.print()


def _draw(outcomes: dict[str, list[Outcome]], path: Path) -> None:
    """Two panels: where the work went (share of operations, FLOPs, weights), and time per step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.2), width_ratios=(3, 2))
    bars = [
        (f"{name}\n{title}", _shares(found[0].report, amount))
        for name, found in outcomes.items()
        for title, amount in _AMOUNTS.items()
    ]
    draw_shares(axes[0], bars)
    axes[0].set_xlabel("share of what every step did before, %")
    axes[0].set_title("when the work runs now")
    axes[0].legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=5, fontsize=8)

    names = [f"{name}\n{o.backend}" for name, found in outcomes.items() for o in found]
    found = [o for group in outcomes.values() for o in group]
    for offset, title, times in (
        (-0.2, "untouched", [statistics.median(o.untouched) for o in found]),
        (0.2, "dithoist", [statistics.median(o.compiled) for o in found]),
    ):
        axes[1].bar([i + offset for i in range(len(found))], [1e3 * t for t in times], 0.4, label=title)
    axes[1].set_xticks(range(len(found)), names, fontsize=8)
    axes[1].set_ylabel("ms per step, median")
    axes[1].set_title("time per step")
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


_AMOUNTS: dict[str, Callable[[Any], int]] = {
    "operations": lambda row: row.operations,
    "FLOPs": lambda row: row.flops,
    "weights read": lambda row: row.weights_read,
}


def _shares(found: Report | None, amount: Callable[[Any], int]) -> dict[str, float]:
    assert found is not None
    totals = {t.label: 0 for t in TIMES}
    for denoiser in found.denoisers:
        for graph in denoiser.graphs:
            for label, row in graph.by_time.items():
                totals[label] += amount(row)
    whole = sum(totals.values()) or 1
    return {label: total / whole for label, total in totals.items()}
