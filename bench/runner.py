"""All cases: a process for each family, one after the other, and the progress they tell."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .cases import Case, unique
from .machine import machine
from .measure import parts, run_case, warm_up
from .overhead import PARAMETERS
from .overhead import measure as measure_overhead
from .peak import peak_elsewhere
from .results import CaseResult, Overhead, Run
from .workload import load

_OVERHEAD_ROUNDS = 15


@dataclass(frozen=True)
class Plan:
    """How to run.

    Attributes:
        variants: names, in the order of the first round.
        rounds: timed pictures of each variant.
        colds: first calls of each variant, with cold caches.
        device: ``"cpu"``, ``"cuda"`` or ``"npu"``.
        memory: measure peak memory, in a process for each variant.
        overhead: numbers of parameters for which to measure what a call costs besides its work.
        minutes: begin no case that, by the slowest so far, would end later; ``None`` is no limit.
    """

    variants: tuple[str, ...]
    rounds: int = 7
    colds: int = 1
    device: str = "cpu"
    memory: bool = True
    overhead: tuple[int, ...] = PARAMETERS
    minutes: float | None = None


def run(
    cases: Sequence[Case], plan: Plan, console: Console, keep: Path | None = None, earlier: Run | None = None
) -> Run:
    """Measure all cases. A case that fails is noted with its reason, and the others go on.

    After each case, what is known is written to ``keep``, so that hours are not lost with the last minute. What
    ``earlier`` has is not measured again.

    Raises:
        ValueError: ``earlier`` ran on another machine, or other rounds.
    """
    found = Run(plan.device, machine(plan.device).describe(), plan.rounds)
    if earlier is not None:
        found.take_over(earlier)
    done = [result.case for result in found.results]
    cases = [case for case in unique(cases) if case not in done]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress, tempfile.TemporaryDirectory() as folder:
        total = progress.add_task("all cases", total=len(cases) + bool(plan.overhead))
        budget = _Budget(plan.minutes)
        told = _Told(progress, total)
        if plan.overhead and not found.overhead:
            told.begin("overhead", len(plan.overhead))
            found.overhead = _overhead(plan, told)
            told.end()
        families: dict[str, list[Case]] = {}
        for case in cases:
            families.setdefault(case.family, []).append(case)
        for family in families.values():
            if budget.allows_another():
                _run_family(family, plan, Path(folder), found, told, budget, keep)
            else:
                found.skipped += [case.id for case in family]
            if keep:
                found.save(keep)
    return found


def _overhead(plan: Plan, told: _Told) -> list[Overhead]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found = []
        for count in plan.overhead:
            told.step(f"overhead: {count} parameters")
            found.append(pool.submit(measure_overhead, count, _OVERHEAD_ROUNDS, plan.device).result())
    return found


class _Told:
    """Shows the progress of the case at hand; where no bar would show, a line for each case."""

    def __init__(self, progress: Progress, total: TaskID) -> None:
        self._progress = progress
        self._total = total
        self._task: TaskID | None = None

    def begin(self, title: str, steps: int) -> None:
        if not self._progress.console.is_terminal:
            self._progress.console.print(f"{title} ...")
        self._task = self._progress.add_task(title, total=steps)

    def step(self, title: str) -> None:
        if self._task is not None:
            self._progress.update(self._task, description=title, advance=1)

    def end(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        self._progress.advance(self._total)


class _Budget:
    """Whether there is time for another case."""

    def __init__(self, minutes: float | None) -> None:
        self._seconds = None if minutes is None else 60 * minutes
        self._start = self._case = time.monotonic()
        self._longest = 0.0

    def allows_another(self) -> bool:
        self._case = time.monotonic()
        return self._seconds is None or self._case - self._start + self._longest < self._seconds

    def ended(self) -> None:
        self._longest = max(self._longest, time.monotonic() - self._case)


def _run_family(
    cases: list[Case], plan: Plan, folder: Path, found: Run, told: _Told, budget: _Budget, keep: Path | None
) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, plan), daemon=False)
    process.start()
    theirs.close()
    try:
        for case in cases:
            if not budget.allows_another():
                found.skipped.append(case.id)
                continue
            told.begin(case.id, parts(plan.variants, plan.rounds, plan.colds) + plan.memory * len(plan.variants))
            caches = folder / case.id if plan.memory else None
            try:
                result = _ask(ours, case, caches, told)
                if plan.memory:
                    _measure_memory(result, plan, caches, told)
                found.results.append(result)
                found.failed |= {f"{case.id}, {name}": reason for name, reason in result.failed.items()}
            except (EOFError, ConnectionError):  # A process that was ended says nothing; its exit code does.
                process.join()
                found.failed[case.id] = f"the family's process ended with exit code {process.exitcode}"
            except RuntimeError as error:
                found.failed[case.id] = str(error)
            told.end()
            budget.ended()
            if keep:
                found.save(keep)
    finally:
        with suppress(OSError):
            ours.send(None)
        process.join()


def _ask(connection: Connection[Any, Any], case: Case, caches: Path | None, told: _Told) -> CaseResult:
    connection.send((case, caches))
    while True:
        kind, content = connection.recv()
        if kind == "step":
            told.step(f"{case.id}: {content}")
        elif kind == "failed":
            raise RuntimeError(content)
        else:
            assert isinstance(content, CaseResult)
            return content


def _serve(connection: Connection[Any, Any], plan: Plan) -> None:
    """What a family's process does: measure the cases it is sent until it is sent ``None``."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    where = machine(plan.device)
    warm = False
    while (request := connection.recv()) is not None:
        case, caches = request
        try:
            workload = load(case, plan.device)
            if not warm:
                warm_up(workload, plan.device)
                warm = True
            result = run_case(
                case, workload, plan.variants, plan.rounds, where,
                colds=plan.colds, tell=lambda title: connection.send(("step", title)), caches=caches,
            )  # fmt: skip
        except Exception as error:
            connection.send(("failed", f"{type(error).__name__}: {error}"))
        else:
            connection.send(("result", result))


def _measure_memory(result: CaseResult, plan: Plan, caches: Path | None, told: _Told) -> None:
    for name, variant in result.variants.items():
        told.step(f"{result.case.id}: {name}: memory")
        kept = next((caches / name).iterdir(), None) if caches else None
        try:
            variant.peak = peak_elsewhere(result.case, name, plan.device, kept)
        except RuntimeError as error:  # The times are known all the same.
            result.failed[f"{name}, memory"] = str(error)
