"""Real denoisers: what is left for every step, counted exactly, and their repeated blocks as one function.

Counting comes before timing: these numbers do not depend on the machine, so a hoist that is lost shows here first.
`test_coverage.py` counts less, of every class; its runs serve here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from class_runs import ClassRun, class_run
from torch._dynamo.utils import counters
from twins import Twins

from dithoist.models.small.denoisers import build_denoiser, example_calls
from dithoist.passes import PassContext
from dithoist.runtime import backend


@dataclass(frozen=True)
class Counts:
    """Of one call, untouched and compiled.

    Operations captured and left in the body; matrix products for each request, for each row of the schedule, and
    left in the body; bytes of weights the body reads; bytes held for a request and for a row.
    """

    captured: int
    body: int
    products_request: int
    products_row: int
    products_body: int
    weights_body: int
    held_request: int
    held_row: int


COUNTS = {
    "flux": Counts(328, 202, 3, 14, 33, 293824, 5800, 8576),
    "qwen-image": Counts(174, 106, 1, 10, 20, 417728, 3584, 7424),
    "sd3": Counts(262, 189, 3, 12, 35, 273472, 4736, 9472),
    "pixart": Counts(97, 55, 6, 3, 17, 125952, 4672, 2432),
    "wan": Counts(184, 133, 6, 3, 17, 89792, 6208, 2432),
    "glm-image": Counts(181, 91, 6, 5, 16, 104896, 6368, 5376),
    "ideogram-4": Counts(195, 133, 2, 6, 16, 87488, 11632, 1152),
    "hunyuan-video": Counts(400, 207, 9, 19, 32, 293824, 5185, 9728),
}


def count(run: ClassRun) -> Counts:
    (graph,) = run.report.graphs
    times = graph.by_time
    return Counts(
        captured=graph.captured_operations,
        body=times["step"].operations,
        products_request=run.products["model"] + run.products["request"],
        products_row=sum(n for time, n in run.products.items() if "schedule" in time),
        products_body=run.products["step"],
        weights_body=times["step"].weights_read,
        held_request=sum(t.bytes_held for name, t in times.items() if name in ("model", "request")),
        held_row=sum(t.bytes_held for name, t in times.items() if "schedule" in name),
    )


@pytest.mark.parametrize("name", COUNTS)
def test_what_is_left_for_every_step_is_counted(name: str) -> None:
    run = class_run(name)
    assert count(run) == COUNTS[name]
    assert not run.report.graphs[0].demoted


@pytest.mark.parametrize("name", COUNTS)
def test_repeated_blocks_are_one_function_and_keep_the_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def as_for_a_compiler(labels: Any, **options: Any) -> PassContext:
        return PassContext(labels, **(options | {"compiles": True, "verify": True}))

    monkeypatch.setattr(backend, "PassContext", as_for_a_compiler)
    counters.clear()
    twins = Twins(build_denoiser(name, blocks=5))
    for call in example_calls(name, twins.untouched):
        twins.check(**call)
    operations = twins.report.graphs[0].by_time["step"].operations
    assert counters["dithoist"]["outline_repeats"] > operations / 3
