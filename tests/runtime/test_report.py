"""The report and the dumps: complete, readable, and true."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
from pathlib import Path

import pytest
import torch
from graphs import text
from twins import TinyDit, Twins, tiny_inputs

from dithoist import clear_caches, report
from dithoist.passes import PASSES
from dithoist.runtime.report import human


def compiled() -> Twins:
    twins = Twins(TinyDit())
    for step in (2.0, 1.0):
        twins.check(**tiny_inputs(0, step))
    return twins


def test_the_tree_counts_work_by_binding_time() -> None:
    twins = compiled()
    tree = json.loads(report(twins.compiled).to_json())
    assert tree == report(twins.compiled).to_dict()
    (denoiser,) = tree["denoisers"]
    (graph,) = denoiser["graphs"]
    rows = graph["by_time"]
    assert list(rows) == ["request", "schedule", "step"]
    assert {t: r["runs"] for t, r in rows.items()} == {"request": 1, "schedule": 2, "step": 2}
    # One matrix product each, counted as 2 * rows * in * out.
    assert {t: r["flops"] for t, r in rows.items()} == {"request": 768, "schedule": 512, "step": 1024}
    weights = {"request": 8 * 8 + 8, "schedule": 8 * 16 + 16 + 8, "step": 8 * 8 + 8}
    assert {t: r["weights_read"] for t, r in rows.items()} == {t: 4 * n for t, n in weights.items()}
    assert graph["hoisted_weights"] == 4 * (weights["request"] + weights["schedule"])
    assert graph["inputs"] == {
        "hidden_states": "step", "timestep": "schedule", "encoder_hidden_states": "request", "mask": "request",
    }  # fmt: skip
    assert graph["captured_operations"] > rows["step"]["operations"]
    assert (denoiser["cache_hits"], denoiser["cache_misses"]) == (1, 3)
    assert denoiser["bytes_held"] > 0


def test_it_prints_as_a_table() -> None:
    printed = str(report(compiled().compiled))
    for word in (
        "TinyDit",
        "backend=eager",
        "request",
        "schedule",
        "body (step)",
        "host reads left",
        "1 hits, 3 misses",
    ):
        assert word in printed
    fresh = Twins(TinyDit())
    assert "nothing captured yet" in str(report(fresh.compiled))


def test_the_graph_prints_with_the_binding_time_of_each_node() -> None:
    assert report(compiled().compiled).graph() == text("""
        # TinyDit, graph 0
        schedule          timestep: f32[2] = placeholder
        model             frequencies: f32[8] = placeholder
        model             modulation_weight: f32[16, 8] = placeholder
        model             modulation_bias: f32[16] = placeholder
        model             text_proj_weight: f32[8, 8] = placeholder
        model             text_proj_bias: f32[8] = placeholder
        request           encoder_hidden_states: f32[2, 3, 8] = placeholder
        request           mask: b8[2, 3] = placeholder
        step              hidden_states: f32[2, 4, 8] = placeholder
        model             body_weight: f32[8, 8] = placeholder
        model             body_bias: f32[8] = placeholder
        schedule          unsqueeze: f32[2, 1] = aten.unsqueeze.default(timestep, 1)
        schedule          mul: f32[2, 8] = aten.mul.Tensor(unsqueeze, frequencies)
        schedule          sin: f32[2, 8] = aten.sin.default(mul)
        model             t: f32[8, 16] = aten.t.default(modulation_weight)
        schedule          addmm: f32[2, 16] = aten.addmm.default(modulation_bias, sin, t)
        schedule          split: (f32[2, 8], f32[2, 8]) = aten.split.Tensor(addmm, 8, -1)
        schedule          getitem: f32[2, 8] = getitem(split, 0)
        schedule          getitem_1: f32[2, 8] = getitem(split, 1)
        request           view: f32[6, 8] = aten.view.default(encoder_hidden_states, [6, 8])
        model             t_1: f32[8, 8] = aten.t.default(text_proj_weight)
        request           addmm_1: f32[6, 8] = aten.addmm.default(text_proj_bias, view, t_1)
        request           view_1: f32[2, 3, 8] = aten.view.default(addmm_1, [2, 3, 8])
        request           unsqueeze_1: b8[2, 3, 1] = aten.unsqueeze.default(mask, -1)
        request           masked_fill: f32[2, 3, 8] = aten.masked_fill.Scalar(view_1, unsqueeze_1, 0.0)
        schedule          unsqueeze_2: f32[2, 1, 8] = aten.unsqueeze.default(getitem, 1)
        schedule          add: f32[2, 1, 8] = aten.add.Tensor(unsqueeze_2, 1)
        step              mul_1: f32[2, 4, 8] = aten.mul.Tensor(hidden_states, add)
        schedule          unsqueeze_3: f32[2, 1, 8] = aten.unsqueeze.default(getitem_1, 1)
        step              add_1: f32[2, 4, 8] = aten.add.Tensor(mul_1, unsqueeze_3)
        request           mean: f32[2, 1, 8] = aten.mean.dim(masked_fill, [1], True)
        step              add_2: f32[2, 4, 8] = aten.add.Tensor(add_1, mean)
        step              view_2: f32[8, 8] = aten.view.default(add_2, [8, 8])
        model             t_2: f32[8, 8] = aten.t.default(body_weight)
        step              addmm_2: f32[8, 8] = aten.addmm.default(body_bias, view_2, t_2)
        step              view_3: f32[2, 4, 8] = aten.view.default(addmm_2, [2, 4, 8])
        step              return (view_3,)
    """)


def test_dumps_are_numbered_readable_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DITHOIST_DUMP", str(tmp_path / "dump"))
    compiled()
    files = sorted((tmp_path / "dump").iterdir())
    titles = [f.stem.split("_", 2)[2] for f in files]
    expected = [f"{p.__name__}_{when}" for p in PASSES for when in ("before", "after")]
    assert titles == [*expected, "split_request", "split_schedule", "split_step"]
    for file in files:
        assert any(isinstance(node, ast.ClassDef) for node in ast.parse(file.read_text()).body)
    assert "hidden_states" in files[-1].read_text()


def test_the_log_is_quiet_unless_asked(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("dithoist")
    Twins(TinyDit()).check(**tiny_inputs())
    assert "dithoist" not in capfd.readouterr().err
    handler = logging.StreamHandler(stream := io.StringIO())
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        twins = Twins(TinyDit())
        twins.check(**tiny_inputs())
        clear_caches(twins.compiled)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    lines = stream.getvalue()
    for words in (r"graph \d+ captured: \d of 1\d operations stay", "weights are new", "bytes of held values freed"):
        assert re.search(words, lines), lines


def test_counters_are_kept_where_torch_keeps_them() -> None:
    from torch._dynamo.utils import counters

    counters["dithoist"].clear()
    compiled()
    assert counters["dithoist"]["binding_times"] == 19
    assert counters["dithoist"]["held_request"] == 1
    assert counters["dithoist"]["held_schedule"] == 2


def test_human_amounts() -> None:
    assert [human(n) for n in (0, 1023, 1024, 5 * 2**30, 2**50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 GiB",
        "1024.0 TiB",
    ]
    assert [human(n, 1000, "") for n in (7, 1500, 2.5e12)] == ["7", "1.5 k", "2.5 T"]


def test_a_tensor_attribute_and_a_global_are_weights() -> None:
    class WithAttribute(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.arange(3.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.table.exp() + OFFSET.exp()

    twins = Twins(WithAttribute())
    twins.check(torch.zeros(3))
    OFFSET.add_(1)
    twins.both(lambda m: m.table.add_(1))
    twins.check(torch.zeros(3))
    assert twins.runs("model") == 2


OFFSET = torch.ones(())
