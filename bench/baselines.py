"""Baselines: a run that was good, and whether a later one falls short of it.

    python -m bench.baselines --write [--results run.json]
    python -m bench.baselines --check [--results run.json]

Without ``--results`` the cases are run, those of ``--quick`` or all. ``bench/baselines/<platform>.json`` holds

    {"machine": "what it was, in words", "cases": {"<case id>": {"<kind>: <figure>": number, ...}, ...}}

with figures that mean something on another machine of the platform: ratios, bytes and counts, no times. A *kind* says
which way is better and by how much a figure may be worse (:data:`KINDS`); being better is always right. Writing
replaces the file, so that its figures are of one run. A case without a baseline is said, not failed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from .cases import CASES, QUICK
from .machine import NAMES, available, machine
from .results import CaseResult, Run
from .runner import Plan, run
from .variants import OURS, PLAIN, VARIANTS

FOLDER = Path(__file__).parent / "baselines"
Figures = dict[str, float]


@dataclass(frozen=True)
class Kind:
    """How a kind of figure is judged: ``allowed`` is the share by which it may be worse."""

    larger_is_better: bool
    allowed: float

    def shortfall(self, wanted: float, got: float) -> float:
        """By which share of ``wanted`` the figure is worse; negative if it is better."""
        if got == wanted:
            return 0.0
        worse = wanted - got if self.larger_is_better else got - wanted
        return worse / wanted if wanted else math.copysign(math.inf, worse)


KINDS = {
    "speed-up": Kind(larger_is_better=True, allowed=0.05),
    "compile speed-up": Kind(larger_is_better=True, allowed=0.15),
    "over body": Kind(larger_is_better=False, allowed=0.03),
    "bytes": Kind(larger_is_better=False, allowed=0.05),
    "count": Kind(larger_is_better=False, allowed=0.0),
    "error": Kind(larger_is_better=False, allowed=1.0),
}


def figures(result: CaseResult) -> Figures:
    """What is kept of a case."""
    found: Figures = {}
    for name in (n for n in result.variants if n.startswith("dithoist")):
        variant = result.variants[name]
        for other in ("eager", PLAIN):
            for figure in ("steps", "pictures"):
                speedup = result.speedup(name, other, figure)
                if speedup:
                    found[f"speed-up: {figure}, {name} over {other}"] = speedup.value
        if name == OURS:
            for other in (PLAIN, "regional"):
                if other in result.variants:
                    share = result.variants[other].first_call / variant.first_call
                    found[f"compile speed-up: {name} over {other}"] = share
        if variant.peak:
            found[f"bytes: peak, {name}"] = variant.peak
        found[f"count: graphs, {name}"] = variant.graphs
        found[f"count: recompiles, {name}"] = variant.recompiles
        found[f"count: host reads a step, {name}"] = variant.host_reads
        found[f"error: {name}"] = variant.error
    over = result.over_floor(OURS)
    if over:
        found[f"over body: {OURS}"] = over.value
    ours = {
        "count: operations in the body": result.body_operations,
        "count: host reads in the body": result.body_host_reads,
        "bytes: held": result.bytes_held,
    }
    return found | {name: value for name, value in ours.items() if value is not None}


@dataclass(frozen=True)
class Shortfall:
    """A figure that is worse than its kind allows; ``by`` is the share of what was wanted."""

    case: str
    figure: str
    wanted: float
    got: float
    by: float
    allowed: float

    def __str__(self) -> str:
        return (
            f"{self.case}: {self.figure}: {self.got:.4g}, baseline {self.wanted:.4g}, "
            f"worse by {self.by:.1%} (allowed: {self.allowed:.0%})"
        )


@dataclass(frozen=True)
class Judgement:
    """What :func:`judge` found: figures that fell short, and cases that could not be judged, with the reason."""

    short: list[Shortfall]
    unjudged: list[str]


def judge(found: Run, baseline: dict[str, Figures]) -> Judgement:
    """Compare a run with the figures kept by case. Figures one of the two lacks are not compared."""
    short, unjudged = [], []
    for result in found.results:
        wanted = baseline.get(result.case.id)
        if wanted is None:
            unjudged.append(f"{result.case.id}: no baseline yet")
            continue
        for figure, got in figures(result).items():
            kind = KINDS[figure.split(":")[0]]
            if figure not in wanted:
                continue
            by = kind.shortfall(wanted[figure], got)
            if not by <= kind.allowed:  # NaN falls short too.
                short.append(Shortfall(result.case.id, figure, wanted[figure], got, by, kind.allowed))
    return Judgement(short, unjudged)


def write(found: Run, path: Path) -> None:
    """Keep the figures of a run, in place of those kept before."""
    cases = {result.case.id: figures(result) for result in found.results}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machine": found.machine, "cases": cases}, indent=1) + "\n")


def read(path: Path) -> dict[str, Figures]:
    """The figures by case; none if there is no file."""
    if not path.exists():
        return {}
    cases: dict[str, Figures] = json.loads(path.read_text())["cases"]
    return cases


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check; returns the exit status: 1 if a figure falls short or a case failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.baselines", description="judge a run by an earlier one")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="keep the run's figures")
    action.add_argument("--check", action="store_true", help="compare the run with what is kept")
    parser.add_argument("--results", type=Path, help="a run that python -m bench --json wrote; else one is made")
    parser.add_argument("--quick", action="store_true", help="run one small case")
    parser.add_argument("--device", choices=NAMES, help="default: the best at hand")
    parser.add_argument("--file", type=Path, help="baseline to use (default: bench/baselines/<platform>.json)")
    options = parser.parse_args(arguments)
    console = Console(soft_wrap=True, highlight=False)
    if options.device and not available(options.device):
        console.print(f"skipped: no {options.device} device here")
        return 0
    if options.results:
        try:
            found = Run.load(options.results)
        except (OSError, ValueError) as error:
            parser.error(str(error))
    else:
        plan = Plan(tuple(VARIANTS), device=machine(options.device).name, memory=not options.quick)
        found = run([QUICK] if options.quick else CASES, plan, console)
    path = options.file or FOLDER / f"{found.platform}.json"
    for name, reason in found.failed.items():
        console.print(f"{name} failed: {reason}", markup=False)
    if options.write:
        write(found, path)
        console.print(f"{len(found.results)} cases written to {path.name}")
        return 1 if found.failed else 0
    judgement = judge(found, read(path))
    for line in (*judgement.unjudged, *map(str, judgement.short)):
        console.print(line, markup=False)
    cases = len({shortfall.case for shortfall in judgement.short})
    judged = len(found.results) - len(judgement.unjudged)
    console.print(f"{cases} of {judged} cases fell short of their baseline, in {len(judgement.short)} figures")
    return 1 if found.failed or judgement.short else 0


if __name__ == "__main__":
    raise SystemExit(main())
