"""Peak memory of a denoising loop with and without its hoisted weights, each in a process of its own.

    python -m bench.memory [--case ID] [--json FILE] [--markdown FILE]

The default is a model of 1 GB in which modulation is a third, as in Qwen-Image. What is resident is counted for the
third generation, with a prompt of its own, interpreter and libraries included; the weights are what is to be seen.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dithoist import compile_denoiser, report

from .cases import Case
from .machine import machine
from .peak import elsewhere, warm_generation
from .workload import load

DEFAULT = Case("qwen-image", tokens=64, steps=8, blocks=28)

MODES: Mapping[str, dict[str, Any] | None] = {
    "eager": None,
    "dithoist": {},
    "dithoist, weights released": {"release_weights": True},
}
"""How the denoiser is compiled (back end ``eager``, so that compiled code takes no room); ``None``: not at all."""


def measure(case: Case, mode: str) -> dict[str, float]:
    """Peak resident bytes of the third generation, median seconds of its steps, bytes of all weights and released."""
    where = machine("cpu")
    workload = load(case)
    module, options = workload.module, MODES[mode]
    if options is not None:
        compile_denoiser(module, backend="eager", **options)
    peak, times = warm_generation(module, workload, where)
    released = report(module).denoisers[0].bytes_released if options is not None else 0
    weights = sum(p.nbytes for p in module.parameters())
    return {"peak": peak, "step": statistics.median(times), "weights": weights, "released": released}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every mode, one process each, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description="peak memory of a loop")
    parser.add_argument("--case", type=Case.from_id, default=DEFAULT, help=f"default: {DEFAULT.id}")
    parser.add_argument("--mode", choices=list(MODES), help="measure one here, and print its line of JSON")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--markdown", type=Path, help="write the table here, as docs/memory.md is written")
    options = parser.parse_args(arguments)
    if options.mode:
        print(json.dumps(measure(options.case, options.mode)))
        return 0
    found = {mode: elsewhere("memory", ["--case", options.case.id, "--mode", mode]) for mode in MODES}
    _show(found, options.case)
    if options.json:
        options.json.write_text(json.dumps({"case": options.case.id, "modes": found}, indent=2))
    if options.markdown:
        options.markdown.write_text(_markdown(found, options.case))
    return 0


_HEADER = ("mode", "peak resident", "of eager's", "weights released", "ms per step, over eager's")


def _rows(found: dict[str, dict[str, float]]) -> list[tuple[str, ...]]:
    eager = found["eager"]
    return [
        (
            mode,
            f"{f['peak'] / 2**20:.0f} MiB",
            f"{f['peak'] / eager['peak']:.2f}",
            f"{f['released'] / 2**20:.0f} of {f['weights'] / 2**20:.0f} MiB",
            f"{f['step'] / eager['step']:.2f}",
        )
        for mode, f in found.items()
    ]


def _show(found: dict[str, dict[str, float]], case: Case) -> None:
    table = Table(title=f"Memory of a loop: {case.id} on {machine('cpu').describe()}")
    for column in _HEADER:
        table.add_column(column, justify="left" if column == "mode" else "right")
    for row in _rows(found):
        table.add_row(*row)
    console = Console()
    console.width = max(console.width, 110)
    console.print(table)


def _markdown(found: dict[str, dict[str, float]], case: Case) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (_HEADER, ["---"] * len(_HEADER), *_rows(found))]
    title = f"# Memory of a loop: {case.id} ({machine('cpu').describe()})"
    words = (
        "Written by `python -m bench.memory --markdown docs/memory.md`, one process a mode, one after the other, so\n"
        "the ratio of their times is rough."
    )
    return "\n\n".join([title, words, "\n".join(lines)]) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
