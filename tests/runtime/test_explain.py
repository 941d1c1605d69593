"""``explain``: what it says of a model nobody has the weights of is what the report would say of the real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dithoist import Explanation, compile_denoiser, explain, report
from dithoist.__main__ import main
from dithoist.models.published import PUBLISHED
from dithoist.models.small import DENOISERS, Sizes, build_denoiser, example_calls
from dithoist.runtime import hollow
from dithoist.runtime.choose import choose

BILLIONS = {
    "flux.1-dev": 11.90, "qwen-image": 20.43, "sd3.5-large": 8.15, "hunyuan-video": 12.82, "wan2.1-14b": 14.29,
    "ideogram-4": 9.28, "pixart-sigma": 0.62, "flux.2-dev": 32.22, "z-image": 6.15, "sana-1.6b": 1.60,
    "cogview4-6b": 6.37, "ltx-video": 1.92, "lumina-image-2.0": 2.61, "auraflow": 6.83, "chroma1-hd": 8.90,
    "glm-image": 6.93,
}  # fmt: skip


def config_file(folder: Path, name: str) -> Path:
    entry = DENOISERS[name]
    path = folder / "config.json"
    path.write_text(json.dumps({"_class_name": entry.class_name, "_diffusers_version": "0", **entry.tiny}))
    return path


@pytest.fixture(scope="module")
def pixart() -> Explanation:
    found = explain("pixart-sigma")
    torch.compiler.reset()
    return found


def test_every_published_configuration_has_the_checkpoints_size() -> None:
    sizes = dict.fromkeys(("height", "width", "frames", "prompt"))
    totals = {}
    for name in PUBLISHED:
        module = hollow.hollow_module(choose(name, None, batch=1, **sizes).build, torch.bfloat16)
        tensors = [*module.parameters(), *module.buffers()]
        assert not any(t.is_meta or t.untyped_storage().size() for t in module.parameters())
        totals[name] = round(sum(t.numel() for t in tensors) / 1e9, 2)
    assert totals == BILLIONS


def test_a_published_model(pixart: Explanation) -> None:
    assert (pixart.module, pixart.tokens, pixart.prompt) == ("PixArtTransformer2DModel", 4096, 300)
    assert round(pixart.body_parameters / 1e9, 2) == 0.53
    assert f"{pixart.schedule_share:.1%} {pixart.request_share:.1%}" == "1.6% 13.1%"
    assert pixart.parameters_unread == 0
    kv = 2 * 28 * 1152 * 1152 + 4096 * 1152 + 1152 * 1152  # Keys and values of the prompt, and its projection.
    assert pixart.by_time["request"].flops == 2 * 300 * kv
    # Four products of 1152 x 1152 and four times as many in the feed-forward a block, all tokens; keys and values
    # aside; attention, to itself and to the prompt; the rest is small.
    body = 28 * 4096 * (2 * (4 + 2 + 8) * 1152**2 + 4 * 1152 * (4096 + 300))
    assert pixart.by_time["step"].flops == pytest.approx(body, rel=1e-3)
    assert pixart.bytes_per_step == 2 * (6 + 1) * 1152  # One shift and scale for all blocks, one at the end.
    assert pixart.body_host_syncs == []


def test_the_largest_hoisted_work_is_named_by_module(pixart: Explanation) -> None:
    first, second, third = pixart.largest[:3]
    assert (first.module, second.module) == ("transformer_blocks.*.attn2.to_k", "transformer_blocks.*.attn2.to_v")
    assert (first.modules, first.binding_time, first.flops) == (28, "request", 28 * 2 * 300 * 1152**2)
    assert (third.module, third.modules) == ("caption_projection.linear_1", 1)


def test_it_prints_and_goes_through_json(pixart: Explanation) -> None:
    printed = str(pixart)
    for words in ("PixArt-Sigma", "body needs 0.53 B", "body (step)", "transformer_blocks.*.attn2.to_k", "left in the"):
        assert words in printed
    assert json.loads(pixart.to_json()) == pixart.to_dict()


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_it_says_what_the_report_says_of_a_real_run(name: str, tmp_path: Path) -> None:
    pixels, frames = (64, 1) if name == "flux" else (32, 13)
    found = explain(config_file(tmp_path, name), height=pixels, width=pixels, frames=frames, prompt=8, backend="eager")
    module = build_denoiser(name, dtype=torch.bfloat16)
    call = example_calls(name, module, Sizes(16, 8, 1), steps=1)[0]
    with torch.no_grad():
        compile_denoiser(module, backend="eager")(**call)
    (graph,) = report(module).denoisers[0].graphs
    assert found.captured_operations == graph.captured_operations
    assert found.bytes_released == graph.hoisted_weights
    real = {label: (r.operations, r.flops, r.bytes_held) for label, r in graph.by_time.items()}
    rows = {label: (r.operations, r.flops, r.bytes_held) for label, r in found.by_time.items()}
    assert {label: row for label, row in rows.items() if any(row)} == real


def test_pictures_need_not_be_square_and_a_class_will_do() -> None:
    config = DENOISERS["flux"].tiny
    found = explain("diffusers.FluxTransformer2DModel", config, height=64, width=128, prompt=8, batch=2)
    assert (found.tokens, found.batch) == (4 * 8, 2)
    table = found.by_time["request"]
    assert table.bytes_held >= 4 * (8 + 4 * 8) * 16  # Rotary tables of text and picture.


def test_a_switched_off_compiler_is_switched_on_or_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = config_file(tmp_path, "pixart")
    with torch.compiler.set_stance("force_eager"):
        assert explain(path, height=64, width=64, prompt=8).captured_operations
    monkeypatch.setattr(hollow.torch, "compile", lambda function, **_: function)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"switched off.*unset"):
        explain(path, height=64, width=64, prompt=8)
    monkeypatch.setenv("DITHOIST_DISABLE", "1")  # It would run a model that has no memory.
    with pytest.raises(RuntimeError, match=r"DITHOIST_DISABLE is set.*unset it"):
        explain(path, height=64, width=64, prompt=8)


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        ("flux1-dev", {}, "'flux1-dev'; did you mean 'flux.1-dev'.*known:.*z-image"),
        ("pixart-sigma", {"height": 100}, "height=100 must be a multiple of 16 pixels"),
        ("ltx-video", {"frames": 4}, "frames=4 must be 1 more than a multiple of 8"),
        ("pixart-sigma", {"batch": 0}, "batch=0"),
        ("pixart-sigma", {"backend": "inducter"}, "did you mean 'inductor'"),
        ("pixart-sigma", {"config": {}}, "has its own configuration"),
        ("nowhere.json", {}, "nowhere.json is no configuration"),
        ("diffusers.FluxTransformer3DModel", {}, "no class FluxTransformer3DModel in diffusers"),
        ("torch.nn.Linear", {}, "how Linear is called is not known.*FluxTransformer2DModel"),
        ({"num_layers": 2}, {}, "names no class"),
    ],
)
def test_bad_names_and_sizes_are_named(model: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain(model, **sizes)  # type: ignore[arg-type]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["explain", "--list"]) == 0
    assert "flux.1-dev" in capsys.readouterr().out
    numbers, chart = tmp_path / "numbers.json", tmp_path / "chart.png"
    sizes = ["--height", "64", "--width", "64", "--prompt", "8"]
    files = ["--json", str(numbers), "--png", str(chart)]
    assert main(["explain", str(config_file(tmp_path, "pixart")), *sizes, *files]) == 0
    assert "body (step)" in capsys.readouterr().out
    assert json.loads(numbers.read_text())["tokens"] == 16
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert main(["explain", "pixart"]) == 1
    assert "did you mean 'pixart-sigma'" in capsys.readouterr().err

    def without(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'diffusers'", name="diffusers")

    monkeypatch.setattr("dithoist.runtime.explain.choose", without)
    assert main(["explain", "pixart-sigma"]) == 1
    assert capsys.readouterr().err == "explain needs diffusers: pip install 'dithoist[diffusers]'\n"
