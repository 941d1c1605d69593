"""One case: every variant in turns, in one process.

1. *Cold*: with an empty compile cache each variant makes its first call. What is done once a process is done before
   (:func:`warm_up`); Dynamo forgets everything before, and not between variants.
2. *Warm*: each runs one generation, and every step's output is compared with eager's.
3. *Rounds*: in each, every variant makes one picture with the same new prompt, in an order that rotates. Then it takes
   the first steps again: now all that can be held is, which a new prompt's first steps do not show where modulation
   depends on it. Our body alone takes as many. Gradients are off and so is the garbage collector.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.utils import _pytree as pytree

from dithoist import report

from . import variants as known_variants
from .cases import Case
from .floor import Floor
from .machine import Machine
from .results import CaseResult, VariantResult
from .variants import OURS
from .workload import Calls, Workload

_HELD_STEPS = 8
Outputs = list[list[torch.Tensor]]
Told = Callable[[str], object]


def parts(variants: Sequence[str], rounds: int, colds: int) -> int:
    """How often :func:`run_case` tells of progress."""
    return len(variants) * (colds + 1) + rounds


@torch.no_grad()
def run_case(
    case: Case,
    workload: Workload,
    variants: Sequence[str],
    rounds: int,
    machine: Machine,
    *,
    colds: int = 1,
    tell: Told = lambda _: None,
    caches: Path | None = None,
) -> CaseResult:
    """Measure a case.

    Args:
        case: what the result is filed under.
        workload: its module and calls.
        variants: names in :data:`.variants.VARIANTS`; eager's outputs are the reference whether it is one or not.
        rounds: timed pictures of each variant.
        machine: where it runs.
        colds: first calls of each variant, of which the fastest counts; every other time in reverse order.
        tell: called with a word when a part begins; :func:`parts` are their number.
        caches: keep compiled kernels in this folder, one folder a variant, for :mod:`.peak`.

    Raises:
        ValueError: a variant that does not exist, or no rounds.
    """
    known_variants.check(list(variants))
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1")
    result = CaseResult(case, workload.depth, {})
    calls = workload.calls(0)
    modules: dict[str, nn.Module] = {}
    for number in range(colds):
        torch.compiler.reset()
        for name in variants[:: -1 if number % 2 else 1]:
            tell(f"{name}: first call")
            _first_call(name, workload, calls, machine, result, modules, caches and caches / name)
    gc.unfreeze()
    modules = {name: modules[name] for name in result.variants}
    _compare(workload.module, modules, calls, result, tell)
    for number in range(rounds):
        tell(f"round {number + 1} of {rounds}")
        _round(modules, workload.calls(number + 1), machine, result, number)
    for name, module in modules.items():
        result.variants[name].host_reads = machine.host_reads(functools.partial(module, **calls[0]))
    _describe(modules, result)
    return result


def warm_up(workload: Workload, device: str) -> None:
    """Let no variant pay for what is done once a process, else the first to compile would seem slower.

    Compiles something small with what denoisers are made of, and traces the module, without a compiler behind.
    """
    block = _Block().to(device).eval()
    calls = {"hidden_states": torch.randn(1, 16, 32, device=device), "timestep": torch.ones(1, device=device)}
    traced = known_variants.build("eager", workload.module)
    traced.compile(backend="aot_eager")
    with torch.no_grad(), fresh_cache():
        for name in (known_variants.PLAIN, "dithoist-eager"):
            known_variants.build(name, block)(**calls)
        traced(**workload.calls(0)[0])


class _Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        scaled = self.norm(hidden_states) * torch.sin(timestep)[:, None, None]
        q, k, v = self.qkv(scaled).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return hidden_states + nn.functional.gelu(self.out(found))


def _first_call(
    name: str, workload: Workload, calls: Calls, machine: Machine,
    result: CaseResult, modules: dict[str, nn.Module], caches: Path | None,
) -> None:  # fmt: skip
    """Build a variant and call it with an empty compile cache. A variant that cannot leaves the others to compare."""
    if caches:
        caches.mkdir(parents=True, exist_ok=True)
    try:
        modules[name] = module = known_variants.build(name, workload.module)
        with fresh_cache(dir=str(caches) if caches else None, delete=caches is None):
            before = _graphs()
            gc.collect()
            gc.freeze()  # What earlier variants left alive must not make the collector slower for this one.
            machine.synchronise()
            start = time.perf_counter()
            module(**calls[0])
            machine.synchronise()
            found = VariantResult(time.perf_counter() - start, graphs=_graphs() - before)
    except known_variants.Unsupported as error:
        result.unsupported[name] = str(error)
    except Exception as error:
        result.failed[name] = f"{type(error).__name__}: {error}"
    else:
        earlier = result.variants.setdefault(name, found)
        earlier.first_call = min(earlier.first_call, found.first_call)


def _graphs() -> int:
    """Graphs Dynamo has captured in this process."""
    return counters["stats"]["unique_graphs"]


def _compare(untouched: nn.Module, modules: dict[str, nn.Module], calls: Calls, result: CaseResult, tell: Told) -> None:
    expected = _outputs(untouched, calls)
    for name, module in modules.items():
        tell(f"{name}: warm up")
        before = _graphs()
        result.variants[name].error = largest_error(_outputs(module, calls), expected)
        result.variants[name].recompiles += _graphs() - before


def _outputs(module: nn.Module, calls: Calls) -> Outputs:
    """The tensors each step returns. (Compiled code may return memory it writes again: copy.)"""
    return [[t.clone() for t in pytree.tree_leaves(module(**c)) if isinstance(t, torch.Tensor)] for c in calls]


def largest_error(actual: Outputs, expected: Outputs) -> float:
    """Largest absolute difference over the largest absolute value; 0 only for the same bits, NaN for NaN."""
    pairs = [(a, e) for step in zip(actual, expected, strict=True) for a, e in zip(*step, strict=True)]
    if all(torch.equal(a, e) for a, e in pairs):
        return 0.0
    difference = max(float((a.double() - e.double()).abs().max()) for a, e in pairs)
    return difference / max(float(e.double().abs().max()) for _, e in pairs)


def _round(modules: dict[str, nn.Module], calls: Calls, machine: Machine, result: CaseResult, number: int) -> None:
    names = list(modules)
    start = number % len(names)
    for name in names[start:] + names[:start]:
        found, module = result.variants[name], modules[name]
        before = _graphs()
        steps = [functools.partial(module, **call) for call in calls]
        found.pictures.append(sum(laps_of(steps, machine)))
        found.steps.append(statistics.median(laps_of(steps[:_HELD_STEPS], machine)))
        found.recompiles += _graphs() - before
        if name == OURS:
            floor = _floor(module, calls)
            if floor is not None:
                result.floor.append(statistics.median(laps_of([floor] * len(steps[:_HELD_STEPS]), machine)))


def _floor(module: nn.Module, calls: Calls) -> Floor | None:
    try:
        return Floor(module, calls[-1])
    except ValueError:  # It fell back; the notes say why.
        return None


def laps_of(steps: Sequence[Callable[[], object]], machine: Machine) -> list[float]:
    """Seconds each of the steps took, one after the other."""
    machine.synchronise()
    stopwatch = machine.stopwatch()
    gc.collect()
    gc.disable()
    try:
        stopwatch.mark()
        for step in steps:
            step()
            stopwatch.mark()
    finally:
        gc.enable()
    return stopwatch.laps()


def _describe(modules: dict[str, nn.Module], result: CaseResult) -> None:
    """What ours says of itself."""
    for name, module in modules.items():
        if not name.startswith("dithoist"):
            continue
        (found,) = report(module).denoisers
        result.variants[name].notes += [f"fell back: {reason}" for reason in found.fallbacks]
        result.variants[name].notes += [f"demoted to step: {d}" for g in found.graphs for d in g.demoted]
        if name == OURS or result.operations is None:
            result.operations = sum(graph.captured_operations for graph in found.graphs)
            result.body_operations = sum(graph.by_time["step"].operations for graph in found.graphs)
            result.body_host_reads = sum(len(graph.body_host_syncs) for graph in found.graphs)
            result.bytes_held = found.bytes_held
