"""What one call costs besides its work: ours against Dynamo's own.

    python -m bench.overhead [--device NAME] [--rounds N] [--json FILE]

The denoiser multiplies tiny latents; all else, which reads N parameters, is hoisted. Dynamo's time is that of the
same module behind a back end that does nothing, so guards and AOTAutograd's wrapper are left. Ours is what
``compile_denoiser`` takes beyond that and beyond its body (keys, look-ups, and whether weights changed). Both run in
turns. On an accelerator these are times of the host.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

from dithoist import compile_denoiser

from .floor import Floor
from .machine import NAMES, Cpu, available
from .measure import laps_of
from .results import Overhead

PARAMETERS = (10, 100, 1000)
_STEPS = 50


class Trivial(nn.Module):
    """A denoiser of one multiplication, and hoisted work that reads ``count`` small parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((4,), 1 / count) for _ in range(count))

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        """Latents times the weights' sum and the timestep."""
        return hidden_states * (torch.stack(list(self.weights)).sum(0) * timestep)


def does_nothing(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """A back end that runs the graph at the first call and returns the same values ever after."""

    def compile_graph(aot: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
        kept: list[Any] = []

        def run(args: list[Any]) -> Any:
            if not kept:
                kept.extend(aot.forward(*args))
            return tuple(kept)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return aot_autograd(fw_compiler=compile_graph)(gm, inputs)


@torch.no_grad()
def measure(count: int, rounds: int, device: str = "cpu") -> Overhead:
    """The overhead with ``count`` parameters: medians over rounds of 50 steps with held values."""
    torch.compiler.reset()
    plain = Trivial(count).to(device).eval()
    ours = Trivial(count).to(device).eval()
    plain.compile(backend=does_nothing)
    compile_denoiser(ours, backend="eager", strict=True)
    latents = torch.ones(1, 4, device=device)
    calls = [
        {"hidden_states": latents, "timestep": torch.full((1,), 1 - i / _STEPS, device=device)} for i in range(_STEPS)
    ]
    ways: dict[str, list[Callable[[], object]]] = {
        "dynamo": [functools.partial(plain, **call) for call in calls],
        "ours": [functools.partial(ours, **call) for call in calls],
    }
    for steps in ways.values():
        for step in steps:
            step()
    ways["body"] = [Floor(ours, calls[-1])] * _STEPS
    laps: dict[str, list[list[float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, steps in ways.items():
            laps[name].append(laps_of(steps, Cpu()))
    middle = {name: statistics.median(statistics.median(lap[1:]) for lap in found) for name, found in laps.items()}
    first = statistics.median(lap[0] for lap in laps["ours"])
    return Overhead(count, middle["dynamo"], middle["ours"] - middle["body"] - middle["dynamo"], first)


def slope(found: Sequence[Overhead], of: Callable[[Overhead], float]) -> float:
    """Seconds that each further parameter costs."""
    return statistics.linear_regression([o.parameters for o in found], [of(o) for o in found]).slope


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description="microseconds per call")
    parser.add_argument("--device", choices=NAMES, default="cpu")
    parser.add_argument("--rounds", type=int, default=15, help="of 50 calls each (default: 15)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    console = Console()
    if not available(options.device):
        console.print(f"skipped: no {options.device} device here")
        return 0
    found = [measure(count, options.rounds, options.device) for count in PARAMETERS]
    table = Table(title="microseconds per call besides the work")
    for column in ("parameters", "Dynamo", "dithoist adds", "first call of a picture"):
        table.add_column(column, justify="right")
    for row in found:
        table.add_row(str(row.parameters), *(f"{1e6 * t:.1f}" for t in (row.dynamo, row.ours, row.first)))
    console.print(table)
    console.print(growth(found))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")
    return 0


def growth(found: Sequence[Overhead]) -> str:
    """How both grow with the number of parameters, in a sentence."""
    ours, dynamo = (1e6 * slope(found, of) for of in (lambda o: o.ours, lambda o: o.dynamo))
    return f"per parameter Dynamo takes {dynamo:.3f} us and dithoist adds {ours:.3f} us"


if __name__ == "__main__":
    raise SystemExit(main())
