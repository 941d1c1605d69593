"""`docs/coverage.md`: written from a run of `test_coverage.py`, and read back to be compared with the next one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import diffusers
import torch
from class_runs import ClassRun

from dithoist.models.small import DENOISERS, NOT_DENOISERS

PATH = Path(__file__).parents[1] / "docs" / "coverage.md"
NOT_RUN = "–"
_COLUMNS = (
    "class", "graphs", "operations", "in the body", "hoisted", "FLOPs hoisted", "weights hoisted",
    "host reads", "graphs, dynamic", "in the body, dynamic", "why not one graph without host reads",
)  # fmt: skip
_PREFACE = f"""# Every diffusion transformer of diffusers {diffusers.__version__}

Written by `make coverage` from a run of `tests/test_coverage.py` (torch {torch.__version__}, `backend="eager"`), with
which every later run is compared. Each class was built with a small configuration and called as its pipeline calls it,
for two requests of three steps. Every call had the bits of the untouched module, the second prompt captured nothing,
and nothing fell back.
"""
_KEY = f"""
*Graphs*: captured in all; more than one where Dynamo breaks the graph or captures a part of it again. *Operations* are
those of one call, and of the body that is left of it. *Hoisted* are shares of operations, of FLOPs, and of the bytes of
weights that are read (those that only hoisted work reads); {NOT_RUN} where graphs that run several times a call, share
weights, or have sizes that depend on data make the sum say little. The models
are small, so shares of FLOPs say no more than that something moved: [explain.md](explain.md) has them for published
sizes. *Host reads*: calls left in the body that make the host wait. *Dynamic*: with `dynamic=True`, at two
sizes and with two prompts each; {NOT_RUN} where that run left it out.
"""


def row(name: str, run: ClassRun, dynamic: ClassRun | None, why: str) -> list[str]:
    """The cells of a class."""
    operations, body = run.operations
    flops, weights = (
        f"{1 - body / every:.1%}" if len(run.report.graphs) == 1 else NOT_RUN
        for every, body in (run.flops, run.weights)
    )
    return [
        DENOISERS[name].class_name,
        str(run.captured[-1]),
        str(operations),
        str(body),
        f"{1 - body / operations:.0%}",
        flops,
        weights,
        str(run.host_reads.total()),
        *dynamic_cells(dynamic),
        why,
    ]


def dynamic_cells(run: ClassRun | None) -> list[str]:
    """Graphs, and operations in the body, of a run with dynamic sizes."""
    return [NOT_RUN, NOT_RUN] if run is None else [str(run.captured[-1]), str(run.operations[1])]


def document(rows: Iterable[list[str]]) -> str:
    """The whole file."""
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    others = "\n".join(f"- `{name}`: {reason}" for name, reason in sorted(NOT_DENOISERS.items()))
    return f"{_PREFACE}\n{table}\n{_KEY}\nTransformers of diffusers that are no denoisers:\n\n{others}\n"


def stored_rows() -> dict[str, list[str]]:
    """The cells of every class in the file, by class name."""
    lines = [line.strip("| ").split(" | ") for line in PATH.read_text().splitlines() if line.startswith("| ")]
    return {cells[0]: cells + [""] * (len(_COLUMNS) - len(cells)) for cells in lines[2:]}
