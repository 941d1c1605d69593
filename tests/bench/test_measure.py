"""One case from end to end, on a small stand-in and without Inductor, and the parts it is made of."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_run import stored_run
from torch import nn
from twins import TinyDit, tiny_inputs

from dithoist import compile_denoiser
from dithoist.bench import overhead, peak, runner, variants
from dithoist.bench.cases import Case
from dithoist.bench.floor import Floor
from dithoist.bench.machine import available, machine
from dithoist.bench.measure import largest_error, parts, run_case
from dithoist.bench.results import Run
from dithoist.bench.workload import Workload, load, move

CASE = Case("flux", tokens=16, prompt=8, steps=3)
CPU = machine("cpu")


def workload(module: nn.Module | None = None) -> Workload:
    """Three steps; what is fixed for the request is one object in all of them."""

    def calls(seed: int) -> list[dict[str, Any]]:
        request = {k: v for k, v in tiny_inputs(seed).items() if k in ("encoder_hidden_states", "mask")}
        return [tiny_inputs(seed, step) | request for step in (3.0, 2.0, 1.0)]

    return Workload((module or TinyDit()).eval(), calls)


def test_a_case_is_measured_from_end_to_end(tmp_path: Path) -> None:
    told: list[str] = []
    names = ["eager", "dithoist-eager"]
    result = run_case(CASE, workload(), names, 2, CPU, colds=2, tell=told.append)
    assert len(told) == parts(names, 2, colds=2)
    eager, ours = (result.variants[name] for name in names)
    assert ours.error == 0
    assert (eager.graphs, ours.graphs) == (0, 1)
    assert (eager.recompiles, ours.recompiles) == (0, 0)
    for variant in (eager, ours):
        assert len(variant.steps) == len(variant.pictures) == 2
        assert all(picture > step > 0 for step, picture in zip(variant.steps, variant.pictures, strict=True))
    assert result.operations is not None
    assert result.body_operations is not None
    assert result.operations > result.body_operations
    assert not result.failed
    Run("cpu", "here", 2, [result]).save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json").results == [result]


def test_a_variant_that_fails_or_does_not_exist_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: nn.Module) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setitem(variants.VARIANTS, "bad", fail)
    result = run_case(CASE, workload(), ["eager", "bad", "regional"], 1, CPU)
    assert list(result.variants) == ["eager"]
    assert result.failed == {"bad": "RuntimeError: out of luck"}
    assert result.unsupported == {"regional": "TinyDit names no repeated blocks"}


def test_variants_share_weights_but_not_the_module() -> None:
    module = TinyDit()
    twin = variants.build("dithoist-eager", module)
    assert twin is not module
    assert all(a is b for a, b in zip(twin.parameters(), module.parameters(), strict=True))
    assert twin.get_buffer("frequencies") is module.get_buffer("frequencies")
    assert "_compiled_call_impl" not in vars(module)
    with pytest.raises(ValueError, match=r"no variant 'x' \(known: eager, torch.compile"):
        variants.build("x", module)


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="rounds=0"):
        run_case(CASE, workload(), ["eager"], 0, CPU)
    with pytest.raises(ValueError, match="no variant"):
        run_case(CASE, workload(), ["x"], 1, CPU)
    with pytest.raises(ValueError, match=r"no platform 'tpu' \(known: cpu"):
        machine("tpu")


def test_a_process_that_fails_is_answered_with_its_last_line() -> None:
    with pytest.raises(RuntimeError, match="no-such-family"):
        peak.peak_elsewhere(Case("no-such-family"), "eager", "cpu")


@torch.no_grad()
def test_the_floor_runs_the_body_alone_with_what_a_call_gave_it() -> None:
    module = TinyDit().eval()
    compile_denoiser(module, backend="eager", strict=True)
    expected = module(**tiny_inputs())
    floor = Floor(module, tiny_inputs())
    ((body, inputs),) = floor.bodies
    assert torch.equal(body(*inputs)[0], expected)
    assert torch.equal(module(**tiny_inputs()), expected)
    assert len(floor.bodies) == 1, "the graph must have its own body back"
    floor()
    with pytest.raises(ValueError, match="not compiled"):
        Floor(TinyDit(), tiny_inputs())


def test_errors_are_relative_and_zero_means_the_same_bits() -> None:
    expected = [[torch.tensor([1.0, -4.0])], [torch.tensor([2.0, 0.0])]]
    assert largest_error(expected, expected) == 0
    actual = [[torch.tensor([1.0, -4.0])], [torch.tensor([2.0, 1.0])]]
    assert largest_error(actual, expected) == 0.25
    actual[0][0] = torch.tensor([float("nan"), 0.0])
    assert largest_error(actual, expected) != largest_error(actual, expected), "NaN"


def test_host_reads_are_counted() -> None:
    x = torch.ones(4)
    assert CPU.host_reads(lambda: x * 2) == 0
    assert CPU.host_reads(lambda: float(x.sum())) == 1


def test_peak_memory_is_that_of_the_loop() -> None:
    small, large = (peak.peak(workload(Allocates(mib)), "eager", CPU) for mib in (1, 201))
    assert 150 * 2**20 < large - small < 250 * 2**20


class Allocates(TinyDit):
    """Writes some mebibytes at each call, and frees them."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        self.mib = mib

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs) + torch.ones(self.mib * 2**18).sum() * 0


def test_what_is_one_object_in_all_steps_stays_one_on_a_device() -> None:
    calls = workload().calls(0)
    moved = move(calls, "meta")
    assert moved[0]["encoder_hidden_states"] is moved[1]["encoder_hidden_states"]
    assert moved[0]["hidden_states"] is not moved[1]["hidden_states"]
    assert moved[0]["mask"].device.type == "meta"


def test_a_real_workload_has_its_depth_and_calls() -> None:
    found = load(Case("flux", tokens=16, prompt=8, steps=2, blocks=1))
    first, second = found.calls(0)
    assert found.depth > 0
    assert first["encoder_hidden_states"] is second["encoder_hidden_states"]
    assert first["hidden_states"] is not second["hidden_states"]


def test_overhead_is_measured_and_its_growth_told() -> None:
    found = [overhead.measure(count, 2) for count in (4, 8)]
    assert all(o.dynamo > 0 and o.first > 0 for o in found)
    assert "per parameter Dynamo takes" in overhead.growth(found)


@pytest.mark.parametrize("minutes", [None, 1e-9], ids=["no limit", "no time"])
def test_a_family_that_fails_is_told_and_the_run_goes_on(minutes: float | None, capsys: Any) -> None:
    from rich.console import Console

    plan = runner.Plan(("eager",), rounds=1, memory=False, overhead=(), minutes=minutes)
    found = runner.run([Case("no-such-family")], plan, Console())
    if minutes is None:
        assert "no-such-family" in found.failed["no-such-family-256t-64p-20s"]
    else:
        assert found.skipped == ["no-such-family-256t-64p-20s"]


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    from rich.console import Console

    plan = runner.Plan(("eager",), rounds=3, memory=False, overhead=())
    earlier = stored_run()
    earlier.machine = runner.machine("cpu").describe()
    cases = [result.case for result in earlier.results]
    found = runner.run([*cases, Case("no-such-family")], plan, Console(), tmp_path / "run.json", earlier)
    assert [result.case for result in found.results] == cases, "what was measured stays"
    assert list(found.failed) == ["no-such-family-256t-64p-20s"], "what failed is tried again"
    assert found.skipped == []
    assert Run.load(tmp_path / "run.json") == found
    with pytest.raises(ValueError, match="whose rounds is 3: here it is 5"):
        runner.run(cases, dataclasses.replace(plan, rounds=5), Console(), earlier=earlier)


@pytest.mark.cuda
def test_a_case_on_a_gpu() -> None:
    assert available("cuda")
    found = workload(TinyDit().to("cuda"))
    on_device = Workload(found.module, lambda seed: move(found.calls(seed), "cuda"))
    result = run_case(CASE, on_device, ["eager", "dithoist-eager"], 2, machine("cuda"))
    assert result.variants["dithoist-eager"].error == 0
    assert peak.peak(on_device, "dithoist-eager", machine("cuda")) > 0
