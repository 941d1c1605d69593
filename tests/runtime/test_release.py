"""Released weights: gone from memory, readable all the same, and back when asked."""

from __future__ import annotations

import copy
import gc
import os
from typing import Any

import pytest
import torch
from torch import nn
from twins import WIDTH, Twins, WideDit, mapped, same_bytes, wide_inputs

from dithoist import DithoistWarning, compile_denoiser, restore
from dithoist.models.small import as_dtype
from dithoist.runtime.release import ReleasedWeights


def generations(twins: Twins, seeds: tuple[int, ...] = (0, 1, 0)) -> None:
    for seed in seeds:
        for step in (3.0, 2.0, 1.0):
            twins.check(**wide_inputs(seed, step))


@pytest.fixture
def twins() -> Twins:
    found = Twins(WideDit(), release_weights=True)
    generations(found)
    return found


def test_weights_of_hoisted_work_are_released_and_no_others(twins: Twins) -> None:
    module = twins.compiled
    assert mapped(module.modulation.weight)
    assert mapped(module.text_proj.weight)
    assert not mapped(module.body.weight)
    assert twins.report.bytes_released == 3 * WIDTH * WIDTH * 4
    assert twins.report.recompiles == 0
    assert twins.report.bytes_read_back > 0
    assert same_bytes(module, twins.untouched)


def test_restore_brings_them_back(twins: Twins) -> None:
    restore(twins.compiled)
    assert not any(mapped(p) for p in twins.compiled.parameters())
    assert same_bytes(twins.compiled, twins.untouched)
    twins.check(**wide_inputs())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.modulation.weight.mul_(2),
        lambda m: m.modulation.weight.data.mul_(2),
        lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
        lambda m: setattr(m.text_proj, "weight", nn.Parameter(m.text_proj.weight * 2, requires_grad=False)),
        lambda m: m.text_proj.weight.untyped_storage().fill_(1),
        lambda m: m.double().float(),
    ],
    ids=["in place", "through .data", "load_state_dict", "another parameter", "storage", "cast and back"],
)
def test_a_changed_weight_is_seen(twins: Twins, change: Any) -> None:
    with torch.no_grad():
        twins.both(change)
    generations(twins)
    assert same_bytes(twins.compiled, twins.untouched)
    assert mapped(twins.compiled.modulation.weight)


def test_another_dtype_is_another_model(twins: Twins) -> None:
    twins.both(lambda m: m.to(torch.bfloat16))
    for step in (2.0, 1.0):
        twins.check(**as_dtype(wide_inputs(0, step), torch.bfloat16))
    assert same_bytes(twins.compiled, twins.untouched)


def test_files_go_with_the_weights_that_were_in_them(twins: Twins) -> None:
    """Fusing LoRA with ``safe_fusing``, casting, assigning a state dict: each leaves the weights in other memory."""

    def files() -> int:
        with open("/proc/self/maps") as maps:
            return sum("dithoist-" in line or "(deleted)" in line for line in maps)

    before = files()
    for _ in range(3):
        twins.both(lambda m: m.double().float())
        generations(twins)
        assert mapped(twins.compiled.modulation.weight)
    assert files() == before


def test_copies_and_files_are_whole(twins: Twins, tmp_path: Any) -> None:
    clone = copy.deepcopy(twins.compiled)
    assert same_bytes(clone, twins.untouched)
    assert not any(mapped(p) for p in clone.parameters())
    torch.save(twins.compiled.state_dict(), tmp_path / "weights.pt")
    fresh = WideDit()
    fresh.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert same_bytes(fresh, twins.untouched)


def test_memory_that_others_use_too_stays(twins: Twins) -> None:
    shared = torch.ones(WIDTH, 2 * WIDTH)
    one, other = nn.Parameter(shared, requires_grad=False), nn.Parameter(shared.view(-1), requires_grad=False)
    own = nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=False)
    half = nn.Parameter(torch.ones(2 * WIDTH, WIDTH)[:WIDTH], requires_grad=False)
    released = ReleasedWeights()
    assert released.release([one, own, own, half])
    assert released.bytes([one, own, half]) == own.nbytes
    one.mul_(2)
    assert torch.equal(other, torch.full_like(other, 2))


def test_a_tied_weight_stays_one_tensor() -> None:
    module = WideDit()
    module.body.weight = module.text_proj.weight
    tied = Twins(module, release_weights=True)
    generations(tied)
    assert not mapped(tied.compiled.body.weight), "the loop reads it"
    tied.both(lambda m: m.body.weight.data.mul_(2))
    generations(tied)


def test_without_room_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    twins = Twins(WideDit())
    compile_denoiser(twins.compiled, backend="eager", release_weights="disk")
    with pytest.warns(DithoistWarning, match="weights stay in memory: .*No space left.*TMPDIR"):
        generations(twins)
    assert twins.report.bytes_released == 0
    assert same_bytes(twins.compiled, twins.untouched)
    strict = Twins(WideDit(), release_weights="disk")
    with pytest.raises(RuntimeError, match="No space left"):
        generations(strict)


def test_an_exception_in_mid_loop_leaves_a_whole_model(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.fx.Interpreter, "call_function", broken)
        with pytest.raises(KeyboardInterrupt):
            twins.check(**wide_inputs(5))
    assert same_bytes(twins.compiled, twins.untouched)
    generations(twins)


@pytest.mark.parametrize("shift", [0, 8, 24, 40])
def test_a_weight_keeps_the_remainder_of_its_address(shift: int) -> None:
    """A product of few rows takes its path by that, so the very same module is its own reference."""
    module = WideDit().eval()
    for parameter in module.parameters():
        room = bytearray(parameter.nbytes + 128)
        start = (shift - torch.frombuffer(room, dtype=torch.uint8).data_ptr()) % 64
        moved = torch.frombuffer(room, dtype=parameter.dtype, count=parameter.numel(), offset=start)
        parameter.data = moved.copy_(parameter.detach().flatten()).view_as(parameter)
    assert {p.data_ptr() % 64 for p in module.parameters()} == {shift}

    def latents() -> list[torch.Tensor]:
        with torch.no_grad():
            return [module(**wide_inputs(seed, step)) for seed in (0, 1) for step in (3.0, 2.0)]

    expected = latents()
    compile_denoiser(module, backend="eager", strict=True, release_weights=True)
    for _ in range(2):
        assert all(map(torch.equal, latents(), expected))
    assert mapped(module.modulation.weight)
    restore(module)
    assert {p.data_ptr() % 64 for p in module.parameters()} == {shift}
    assert all(map(torch.equal, latents(), expected))


def test_restore_keeps_what_lies_over_one_memory_together(twins: Twins) -> None:
    module = twins.compiled
    module.tied = nn.Linear(WIDTH, WIDTH)
    module.tied.weight = nn.Parameter(module.text_proj.weight.data, requires_grad=False)
    seen = module.modulation.weight.detach()
    restore(module)
    with torch.no_grad():
        module.text_proj.weight.fill_(7)
        module.modulation.weight.fill_(8)
    assert bool((module.tied.weight == 7).all())
    assert bool((seen == 8).all()), "somebody else's view: left in the file, and one memory still"
    assert not mapped(module.text_proj.weight)


def test_a_denoiser_that_is_gone_leaves_no_file() -> None:
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    before = files()
    for _ in range(3):
        gone = Twins(WideDit(), release_weights=True)
        generations(gone, (0,))
        assert files() > before
        del gone
        gc.collect()
        assert files() <= before


def test_weights_that_processes_share_stay_shared() -> None:
    shared = Twins(WideDit())
    shared.compiled.share_memory()
    compile_denoiser(shared.compiled, backend="eager", strict=True, release_weights=True)
    generations(shared)
    assert all(p.is_shared() for p in shared.compiled.parameters())


def test_bad_values_are_refused() -> None:
    with pytest.raises(ValueError, match="release_weights='gpu' must be False, True, 'cpu' or 'disk'"):
        compile_denoiser(WideDit(), release_weights="gpu")
    with pytest.raises(ValueError, match="'cpu' would free nothing, as WideDit is on the CPU; 'disk' does"):
        compile_denoiser(WideDit(), release_weights="cpu")
    with pytest.raises(ValueError, match="is for the CPU and CUDA, and WideDit is on meta"):
        compile_denoiser(WideDit().to("meta"), release_weights=True)


@pytest.mark.cuda
def test_weights_of_a_cuda_device_lie_on_the_host_and_stay_readable() -> None:
    torch.manual_seed(0)
    module = WideDit().eval().cuda()
    untouched = copy.deepcopy(module)
    compile_denoiser(module, backend="eager", strict=True, release_weights=True)
    before = torch.cuda.memory_allocated()
    for seed in (0, 1):
        for step in (3.0, 2.0, 1.0):
            call = {k: v.cuda() for k, v in wide_inputs(seed, step).items()}
            with torch.no_grad():
                assert torch.equal(module(**call), untouched(**call))
    released = 3 * WIDTH * WIDTH * 4
    assert before - torch.cuda.memory_allocated() > released // 2
    assert module.modulation.weight.is_cuda
    assert same_bytes(module, untouched)
    restore(module)
    assert same_bytes(module, untouched)
