"""``dithoist demo``: the main job on two real diffusers pipelines, before and after ``compile_pipeline``.

Each pipeline makes a picture as it is; then it is compiled and makes the same picture again, first with the
``eager`` back end, which promises the same bits, then with ``inductor``. Timings come from repeats that
alternate between the untouched and the compiled pipeline in one process.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..models.small import build_pipeline, example_call
from ..passes import TIMES
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


class _Steps:
    """Runs generations and advances a progress bar at each of their steps."""

    def __init__(self, pipe: Any, name: str, progress: Progress, steps: int) -> None:
        self.pipe = pipe
        self.name = name
        self.progress = progress
        self.steps = steps

    def __call__(self, title: str, output_type: str = "latent") -> tuple[Any, list[float]]:
        """One generation: its pictures (or latents) and the seconds from each step's end to the next's."""
        task = self.progress.add_task(f"{self.name}: {title}", total=self.steps)
        ends: list[float] = []

        def on_step_end(_pipe: Any, _step: int, _timestep: Any, _tensors: dict[str, Any]) -> dict[str, Any]:
            ends.append(time.perf_counter())
            self.progress.advance(task)
            return {}

        call = example_call(self.name, "demo", steps=self.steps, output_type=output_type)
        images = self.pipe(**call, callback_on_step_end=on_step_end).images
        self.progress.remove_task(task)
        return images, [b - a for a, b in itertools.pairwise(ends)]


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
        repeats: timed generations of each variant.
        console: where to print.

    Returns:
        The outcomes by pipeline.
    """
    console = console or Console()
    out.mkdir(parents=True, exist_ok=True)
    outcomes = {}
    for name in pipelines:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            outcomes[name] = _run_pipeline(name, out, backends, steps, repeats, progress)
        _print_outcomes(console, name, outcomes[name])
    chart = out / "demo.png"
    _draw(outcomes, chart)
    console.print(f"pictures, reports and the chart are in {out}/ ({chart.name})")
    return outcomes


def _run_pipeline(
    name: str, out: Path, backends: tuple[str, ...], steps: int, repeats: int, progress: Progress
) -> list[Outcome]:
    pipe = build_pipeline(name, "demo")
    run = _Steps(pipe, name, progress, steps)
    pictures, _ = run("picture, untouched", "pil")
    pictures[0].save(out / f"{name}.png")
    expected, _ = run("latents, untouched")
    outcomes = []
    for backend in backends:
        compile_pipeline(pipe, backend=backend)
        start = time.perf_counter()
        actual, _ = run(f"first call, {backend} (compiles)")
        first_call = time.perf_counter() - start
        outcome = Outcome(backend, _error(actual, expected), float(expected.abs().max()), first_call)
        for number in range(repeats):
            with torch.compiler.set_stance("force_eager"):
                outcome.untouched += run(f"untouched, repeat {number + 1}")[1]
            outcome.compiled += run(f"{backend}, repeat {number + 1}")[1]
        outcome.report = report(pipe)
        (out / f"{name}-{backend}.json").write_text(outcome.report.to_json())
        outcomes.append(outcome)
    pictures, _ = run("picture, compiled", "pil")
    pictures[0].save(out / f"{name}-dithoist.png")
    return outcomes


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return 0.0 if torch.equal(actual, expected) else float((actual - expected).abs().max())


def _print_outcomes(console: Console, name: str, outcomes: list[Outcome]) -> None:
    table = Table(title=f"{name}: compiled against untouched", title_justify="left")
    for column in ("back end", "latents", "untouched, ms/step", "dithoist, ms/step", "ratio", "first call, s"):
        table.add_column(column, justify="left" if column in ("back end", "latents") else "right")
    for outcome in outcomes:
        error = outcome.largest_error
        verdict = f"largest error {error:.1e} of {outcome.largest_value:.1f}" if error else "bitwise equal"
        untouched, compiled = (1e3 * statistics.median(t) for t in (outcome.untouched, outcome.compiled))
        cells = (f"{untouched:.1f}", f"{compiled:.1f}", f"{outcome.speedup:.2f}x", f"{outcome.first_call:.1f}")
        table.add_row(outcome.backend, verdict, *cells)
    console.print(table)
    moved = outcomes[0].report
    assert moved is not None
    console.print(str(moved), highlight=False)
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
    left = [0.0] * len(bars)
    for time_label in (t.label for t in TIMES):
        widths = [100 * shares.get(time_label, 0.0) for _, shares in bars]
        title = "step (body)" if time_label == "step" else time_label
        axes[0].barh([label for label, _ in bars], widths, left=left, label=title)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes[0].invert_yaxis()
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
    totals: dict[str, int] = {}
    for denoiser in found.denoisers:
        for graph in denoiser.graphs:
            for label, row in graph.by_time.items():
                totals[label] = totals.get(label, 0) + amount(row)
    whole = sum(totals.values()) or 1
    return {label: total / whole for label, total in totals.items()}
