"""Every diffusion transformer of diffusers, small, compiled and called as its pipeline calls it.

`class_runs.class_run` makes two requests of three steps and asks for the untouched module's bits at every call. What is
not ideal is in `KNOWN` with its reason, exactly, so that a change for the better fails as loudly as one for the worse.

Dynamic sizes take several times as long to capture, so CI takes a spread of classes; `make fuzz` takes all of them, and
so does `make coverage`, which writes `docs/coverage.md` anew.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import diffusers.models.transformers
import pytest
from class_runs import class_run, mislabelled
from coverage_table import PATH, document, dynamic_cells, row, stored_rows
from hypothesis import settings

from dithoist.models.small import DENOISERS, NOT_DENOISERS


@dataclass(frozen=True)
class Known:
    """Why a class is not one graph without host reads, and how far it is from that.

    Attributes:
        why: what in the model's code, in a few words.
        breaks: frames beyond the first, each of which begins where Dynamo breaks the graph.
        recompiles: frames captured again within the first request.
        host_reads: calls in the body that make the host wait, by operator.
        dynamic: graphs that a capture with dynamic sizes has after the first size, and after the second; by default as
            many as without, both times.
    """

    why: str
    breaks: int = 0
    recompiles: int = 0
    host_reads: Mapping[str, int] = field(default_factory=dict)
    dynamic: tuple[int, int] | None = None

    @property
    def graphs(self) -> int:
        """All that a request captures."""
        return 1 + self.breaks + self.recompiles


IDEAL = Known("")
KNOWN = {
    "mochi": Known("dynamic: `torch.linspace` of a picture's height makes it a constant", dynamic=(1, 2)),
    "allegro": Known("dynamic: the smaller picture has as many rows as a video has axes", dynamic=(1, 2)),
    "easy-animate": Known("dynamic: `torch.linspace` of a picture's height makes it a constant", dynamic=(1, 2)),
    "kandinsky-6": Known("dynamic: the smaller picture has as many rows as its sound has tokens", dynamic=(1, 2)),
    "hidream": Known(
        "loops over experts by the number of tokens each got", breaks=14, recompiles=6,
        host_reads={"aten.bincount.default": 2},
    ),
    "nucleus-moe": Known("reads on the host how many tokens each expert got", breaks=9, recompiles=1, dynamic=(14, 15)),
    "hunyuan-image": Known(
        "joins two texts by boolean masks, so their lengths are unknown", breaks=7, recompiles=1, dynamic=(12, 16)
    ),
    "hunyuan-video-1.5": Known(
        "asks on the host if the picture is zero, joins texts by boolean masks", breaks=1,
        dynamic=(4, 4),
    ),
    "hunyuan-video-framepack": Known(
        "cuts the text at a length that the host reads", breaks=3, recompiles=2, dynamic=(8, 9)
    ),
    "joy-image-edit": Known("dynamic: `torch.linspace` of a picture's height makes it a constant", dynamic=(1, 2)),
    "sana-wm": Known("dynamic: `torch.linspace` of a picture's width makes it a constant", dynamic=(1, 2)),
    "lumina": Known("dynamic: `math.sqrt` of the number of tokens makes it a constant", dynamic=(1, 2)),
    "lumina-2": Known("reads the lengths of texts on the host", breaks=3, dynamic=(6, 7)),
    "omnigen": Known("asks on the host if positions are beyond those it was trained on", breaks=3),
    "qwen-image-2.1": Known(
        "reads on the host which tokens are a picture's", breaks=7,
        host_reads={"aten.index_put.default": 1}, dynamic=(10, 12),
    ),
    "wan-animate-2": Known(
        "reads grid sizes, which are tensors, on the host; flex attention warns", breaks=15, recompiles=3,
        dynamic=(20, 21),
    ),
    "minimax-h3": Known("gets one timestep at the first step and two later", recompiles=1),
}  # fmt: skip

MISLABELLED = {"lumina": {"image_rotary_emb": "schedule"}, "sana-wm-refiner": {"video_rotary_emb": "schedule"}}
"""Arguments whose label is wrong, which costs speed until they are noticed, and when they are known: rotary tables that
the pipeline makes anew at each step."""

SPREAD = (
    "flux", "qwen-image", "sd3", "pixart", "glm-image", "ideogram-4", "dit", "prx", "wan", "stable-audio",
)  # fmt: skip
NOT_DYNAMIC = {
    "hidream": "has a graph for as many lengths as its experts happen to get",
    "spectrogram": "its table of positions has 64 rows, and the second size needs more",
}
"""Why a class is not run with dynamic sizes."""

DYNAMIC = (
    tuple(name for name in DENOISERS if name not in NOT_DYNAMIC)
    if settings.get_current_profile_name() == "fuzz"
    else SPREAD
)


def known(name: str) -> Known:
    return KNOWN.get(name, IDEAL)


def test_every_transformer_of_diffusers_is_accounted_for_once() -> None:
    module = diffusers.models.transformers
    classes = {name for name in dir(module) if inspect.isclass(getattr(module, name))}
    entries = [entry.class_name for entry in DENOISERS.values()]
    assert len(set(entries)) == len(entries)
    assert set(entries) | set(NOT_DENOISERS) == classes
    assert not set(entries) & set(NOT_DENOISERS)


def test_the_table_is_as_a_run_writes_it(pytestconfig: pytest.Config) -> None:
    """With `--coverage-table` this run writes it; its rows are compared below."""
    path = pytestconfig.getoption("--coverage-table")
    if path:
        dynamic = {name: class_run(name, dynamic=True) for name in DYNAMIC}
        rows = [row(name, class_run(name), dynamic.get(name), known(name).why) for name in DENOISERS]
        Path(path).write_text(document(rows))
    stored = stored_rows()
    assert list(stored) == [entry.class_name for entry in DENOISERS.values()]
    assert PATH.read_text() == document(stored.values())


@pytest.mark.parametrize("name", DENOISERS)
def test_every_call_has_the_bits_of_the_untouched_module(name: str) -> None:
    assert class_run(name).report.fallbacks == []


@pytest.mark.parametrize("name", DENOISERS)
def test_one_graph_or_as_many_as_are_explained(name: str) -> None:
    report = class_run(name).report
    assert (report.graph_breaks, report.recompiles) == (known(name).breaks, known(name).recompiles)


@pytest.mark.parametrize("name", DENOISERS)
def test_a_second_prompt_captures_nothing(name: str) -> None:
    first, second = class_run(name).captured
    assert second == first


@pytest.mark.parametrize("name", DENOISERS)
def test_work_is_hoisted(name: str) -> None:
    (operations, body), (flops, body_flops) = class_run(name).operations, class_run(name).flops
    assert 0 < body < operations
    assert 0 < body_flops < flops


@pytest.mark.parametrize("name", DENOISERS)
def test_no_host_read_is_left_but_those_explained(name: str) -> None:
    assert class_run(name).host_reads == known(name).host_reads


@pytest.mark.parametrize("name", DENOISERS)
def test_arguments_change_as_often_as_their_labels_say(name: str) -> None:
    assert mislabelled(name) == MISLABELLED.get(name, {})


@pytest.mark.parametrize("name", DENOISERS)
def test_the_row_in_the_table_is_that_of_this_run(name: str) -> None:
    stored = stored_rows()[DENOISERS[name].class_name]
    assert stored[:-3] == row(name, class_run(name), None, "")[:-3]
    assert stored[-1] == known(name).why


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_sizes_are_captured_once_or_as_often_as_is_explained(name: str) -> None:
    first, second = known(name).dynamic or (known(name).graphs, known(name).graphs)
    assert class_run(name, dynamic=True).captured == (first, first, second, second)


@pytest.mark.parametrize("name", DYNAMIC)
def test_the_dynamic_cells_in_the_table_are_those_of_this_run(name: str) -> None:
    stored = stored_rows()[DENOISERS[name].class_name][-3:-1]
    assert stored in (dynamic_cells(class_run(name, dynamic=True)), dynamic_cells(None))
