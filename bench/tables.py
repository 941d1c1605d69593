"""A run as tables: on the terminal, and as ``docs/performance.md``."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from rich.console import Console

from dithoist.runtime.report import human

from .ratios import spread
from .results import CaseResult, Run, VariantResult
from .sheet import Sheet
from .targets import losses, verdicts
from .variants import OURS, PLAIN

_LOSS = "▼"
_PREFACE = """Written by `python -m bench --results run.json --markdown docs/performance.md` from one run. Every ratio
compares times of the same case in the same process, variants in turns: medians of {rounds} rounds, in brackets the
95 % bootstrap interval. A speed-up of ours below 1 is a loss, marked {loss}. A *step* finds held what can be; a
*picture* has a new prompt, so what is done once a request is part of it, and {steps} steps, as the id of the case says.
*error* is against eager, over its largest value; 0 is the same bits. Modules are of the real classes, small, with
random weights: what a step can skip is a larger part of it than in a checkpoint."""


def sheets(run: Run) -> list[Sheet]:
    """All tables that the run has figures for."""
    found = [_times(run), _costs(run), _floors(run), _overheads(run)]
    return [sheet for sheet in found if sheet.rows]


def _times(run: Run) -> Sheet:
    header = (
        "case", "variant", "ms/step", "spread", "step over eager", f"step over {PLAIN}",
        "s/picture", "picture over eager", f"picture over {PLAIN}",
    )  # fmt: skip
    rows = []
    for result, name, variant in _each(run):
        cells = [result.case.id, name]
        for figure, times, scale in (("steps", variant.steps, 1e3), ("pictures", variant.pictures, 1)):
            cells.append(f"{scale * statistics.median(times):.3g}")
            if figure == "steps":
                cells.append(f"{spread(times):.1%}")
            cells += [_speedup(result, name, other, figure) for other in ("eager", PLAIN)]
        rows.append(tuple(cells))
    return Sheet("Time", header, rows)


def _costs(run: Run) -> Sheet:
    header = (
        "case", "variant", "first call, s", f"of {PLAIN}'s", "graphs", "recompiles", "host reads a step",
        "peak memory", "of eager's", "error",
    )  # fmt: skip
    rows = []
    for result, name, variant in _each(run):
        eager, plain = result.variants.get("eager"), result.variants.get(PLAIN)
        rows.append((
            result.case.id, name, f"{variant.first_call:.2f}",
            f"{variant.first_call / plain.first_call:.2f}" if plain else "",
            str(variant.graphs), str(variant.recompiles), str(variant.host_reads),
            human(variant.peak) if variant.peak else "",
            f"{variant.peak / eager.peak:.3f}" if variant.peak and eager and eager.peak else "",
            f"{variant.error:.1e}" if variant.error else "0",
        ))  # fmt: skip
    return Sheet("First call, memory, exactness", header, rows)


def _floors(run: Run) -> Sheet:
    header = (
        "case",
        "ours, ms/step",
        "body alone",
        "ours over body",
        "operations",
        "in the body",
        "host reads there",
        "held",
    )
    rows = []
    for result in run.results:
        over = result.over_floor(OURS)
        if over is None:
            continue
        ours, floor = (1e3 * statistics.median(t) for t in (result.variants[OURS].steps, result.floor))
        counts = map(str, (result.operations, result.body_operations, result.body_host_reads))
        rows.append((
            result.case.id, f"{ours:.3g}", f"{floor:.3g}", str(over), *counts, human(result.bytes_held or 0)
        ))  # fmt: skip
    return Sheet("The floor: the body alone", header, rows)


def _overheads(run: Run) -> Sheet:
    header = ("parameters", "Dynamo, us a call", "dithoist adds, us", "first call of a picture, us")
    rows = [
        (str(o.parameters), *(f"{1e6 * seconds:.1f}" for seconds in (o.dynamo, o.ours, o.first)))
        for o in run.overhead
    ]  # fmt: skip
    return Sheet("What a call costs besides its work", header, rows)


def _each(run: Run) -> Iterator[tuple[CaseResult, str, VariantResult]]:
    for result in run.results:
        for name, variant in result.variants.items():
            yield result, name, variant


def _speedup(result: CaseResult, name: str, other: str, figure: str) -> str:
    found = result.speedup(name, other, figure)
    if found is None or name == other:
        return ""
    return f"{_LOSS} {found}" if name.startswith("dithoist") and found.value < 1 else str(found)


def lists(run: Run) -> list[tuple[str, list[str]]]:
    """What is said in sentences: titles and lines, those that have any."""
    found = [
        ("Wanted and got", [str(verdict) for verdict in verdicts(run)]),
        ("Losses", losses(run) or ["none"]),
        ("Failed", [f"{name}: {reason}" for name, reason in run.failed.items()]),
        ("Not run, for want of time", run.skipped),
        ("No such variant", [f"{r.case.id}, {n}: {why}" for r in run.results for n, why in r.unsupported.items()]),
    ]
    return [(title, lines) for title, lines in found if lines]


def show(run: Run, console: Console) -> None:
    """Print everything."""
    console.print(f"on {run.platform}: {run.machine}; medians of {run.rounds} rounds", highlight=False)
    for sheet in sheets(run):
        sheet.print(console)
    for title, lines in lists(run):
        console.print(f"[bold]{title}[/]")
        for line in lines:
            console.print(f"  {line}", highlight=False, markup=False)


def markdown(run: Run) -> str:
    """Everything, for ``docs/performance.md``."""
    steps = sorted({result.case.steps for result in run.results})
    preface = _PREFACE.format(loss=_LOSS, rounds=run.rounds, steps=" or ".join(map(str, steps)))
    parts = ["# Performance", "", f"Measured on {run.platform}: {run.machine}.", "", preface]
    for title, lines in lists(run):
        parts += ["", f"## {title}", "", *(f"- {line}" for line in lines)]
    for sheet in sheets(run):
        parts += ["", f"## {sheet.title}", "", *sheet.markdown()]
    return "\n".join(parts) + "\n"
