"""What was promised, and whether a run keeps it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .overhead import growth, slope
from .results import CaseResult, Run
from .variants import OURS, PLAIN

_DEEP = 24


@dataclass(frozen=True)
class Verdict:
    """One promise: ``met`` is ``None`` where the run has nothing to judge it by."""

    wanted: str
    got: str
    met: bool | None

    def __str__(self) -> str:
        word = {True: "met", False: "MISSED", None: "not measured"}[self.met]
        return f"{word}: wanted {self.wanted}; got {self.got}"


def verdicts(run: Run) -> list[Verdict]:
    """All promises, in the order of the issue."""
    return [
        _all("loop overhead beyond the body of at most 2 % at 256 tokens", _at_256(run), _floor_ratio, 1.02),
        _all("no picture slower than with torch.compile", run.results, _share("pictures"), 1.0),
        _all("no step slower than with torch.compile", run.results, _share("steps"), 1.0),
        _median(run),
        _all("cold compile no longer than torch.compile's", run.results, _cold(PLAIN), 1.0),
        _all(
            f"from {_DEEP} blocks on, cold compile no longer than compile_repeated_blocks'",
            [r for r in run.results if (r.case.blocks or 0) >= _DEEP],
            _cold("regional"),
            1.0,
        ),
        _growth(run),
    ]


Share = Callable[[CaseResult], float | None]


def _at_256(run: Run) -> list[CaseResult]:
    """The eight families at their plain size: the first case of each with 256 tokens."""
    found: dict[str, CaseResult] = {}
    for result in run.results:
        if result.case.tokens == 256:
            found.setdefault(result.case.family, result)
    return list(found.values())


def _floor_ratio(result: CaseResult) -> float | None:
    found = result.over_floor(OURS)
    return found.value if found else None


def _share(figure: str) -> Share:
    """Our time over that of ``torch.compile``."""

    def share(result: CaseResult) -> float | None:
        speedup = result.speedup(OURS, PLAIN, figure)
        return 1 / speedup.value if speedup else None

    return share


def _cold(other: str) -> Share:
    def share(result: CaseResult) -> float | None:
        if OURS not in result.variants or other not in result.variants:
            return None
        return result.variants[OURS].first_call / result.variants[other].first_call

    return share


def _all(wanted: str, results: list[CaseResult], share: Share, most: float) -> Verdict:
    found = {r.case.id: value for r in results if (value := share(r)) is not None}
    if not found:
        return Verdict(wanted, "no case to judge by", None)
    over = sorted((value, name) for name, value in found.items() if value > most)[::-1]
    names = ", ".join(f"{name} ({value:.3f})" for value, name in over)
    tail = f", over {most}: {names}" if over else ""
    return Verdict(wanted, f"{max(found.values()):.3f} at most in {len(found)} cases{tail}", not over)


def _median(run: Run) -> Verdict:
    wanted = "a median speed-up of at least 1.05x per picture over torch.compile, families at 256 tokens"
    found = [s.value for r in _at_256(run) if (s := r.speedup(OURS, PLAIN, "pictures"))]
    if not found:
        return Verdict(wanted, "no case to judge by", None)
    middle = statistics.median(found)
    return Verdict(wanted, f"{middle:.3f}x over {len(found)} families", middle >= 1.05)


def _growth(run: Run) -> Verdict:
    wanted = "time added per call to grow with the number of parameters no faster than Dynamo's own guards"
    if len(run.overhead) < 2:
        return Verdict(wanted, "no overhead to judge by", None)
    met = slope(run.overhead, lambda o: o.ours) <= slope(run.overhead, lambda o: o.dynamo)
    return Verdict(wanted, growth(run.overhead), met)


def losses(run: Run) -> list[str]:
    """Every figure in which ours is worse than its rival, in words.

    The rival is ``torch.compile``, and eager for ours with the eager back end.
    """
    found = []
    for result in run.results:
        for ours in (name for name in result.variants if name.startswith("dithoist")):
            other = "eager" if ours == "dithoist-eager" else PLAIN
            lines = [*_losses(result, ours, other), *result.variants[ours].notes]
            found += [f"{result.case.id}, {ours}: {line}" for line in lines]
    return found


def _losses(result: CaseResult, ours: str, other: str) -> Iterator[str]:
    if other not in result.variants:
        return
    mine, theirs = result.variants[ours], result.variants[other]
    for figure, word in (("steps", "a step"), ("pictures", "a picture")):
        speedup = result.speedup(ours, other, figure)
        if speedup and speedup.value < 1:
            sure = "" if speedup.high < 1 else " (the interval includes no difference)"
            yield f"{word} takes {1 / speedup.value - 1:.1%} longer than with {other}{sure}"
    if other == PLAIN and mine.first_call > theirs.first_call:
        yield f"the first call takes {mine.first_call / theirs.first_call - 1:.0%} longer than with {other}"
    if mine.peak and theirs.peak and mine.peak > theirs.peak:
        yield f"peak memory is {mine.peak / theirs.peak - 1:.1%} above that of {other}"
    if not mine.error <= theirs.error:
        yield f"the error, {mine.error:.1e}, is above the {theirs.error:.1e} of {other}"
    for word, a, b in (
        ("host reads a step", mine.host_reads, theirs.host_reads),
        ("recompiles", mine.recompiles, theirs.recompiles),
    ):
        if a > b:
            yield f"{word}: {a}, {b} with {other}"
