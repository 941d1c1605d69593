"""The whole thing: real diffusers pipelines, untouched against compiled."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from graphs import text
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode

from dithoist import compile_pipeline, report, restore
from dithoist.models.small import build_pipeline, example_call
from dithoist.passes import BindingTime
from dithoist.passes.effects import host_read
from dithoist.passes.printing import format_node
from dithoist.runtime import table

NAMES = ("glm-image", "ideogram-4")
CAT, DOG = 'a sign that says "CAT"', 'a wall with "DOGS" on it'


class Pair:
    """A pipeline as it is and its compiled copy."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.name = name
        self.untouched = build_pipeline(name, dtype=dtype)
        self.compiled = copy.deepcopy(self.untouched)
        compile_pipeline(self.compiled, **{"backend": "eager", "strict": True, **options})

    def run(self, pipe: Any, *, callback: Any = None, **call: Any) -> torch.Tensor:
        if callback is not None:
            names = pipe._callback_tensor_inputs
            extra = {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": names}
        else:
            extra = {}
        return pipe(**example_call(self.name, **call), **extra).images

    def check(self, **call: Any) -> torch.Tensor:
        expected, actual = self.run(self.untouched, **call), self.run(self.compiled, **call)
        assert torch.equal(actual, expected), f"{call}: largest error {(actual - expected).abs().max()}"
        return actual

    def denoisers(self) -> list[Any]:
        return report(self.compiled).denoisers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_latents_have_the_bits_of_the_untouched_pipeline(name: str, dtype: torch.dtype) -> None:
    pair = Pair(name, dtype)
    seen = []
    for guidance in (True, False):
        for batch in (1, 2):
            for prompt in (CAT, DOG, CAT):
                latents = pair.check(prompt=[prompt] * batch if batch > 1 else prompt, guidance=guidance)
                assert latents.isfinite().all()
                seen.append(latents)
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])
    for denoiser in pair.denoisers():
        assert denoiser.fallbacks == []
        assert denoiser.graph_breaks == 0
        assert all(not g.demoted for g in denoiser.graphs)


@contextmanager
def no_host_reads_in_the_body(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every operation the body runs goes past a guard that raises where the host would wait for a value."""
    ran: list[str] = []

    class Guard(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            graph = torch.fx.Graph()
            nodes = []
            for argument in args:
                flat = argument if isinstance(argument, (list, tuple)) else [argument]
                made = [graph.placeholder("x") if isinstance(a, torch.Tensor) else a for a in flat]
                for node, a in zip(made, flat, strict=True):
                    if isinstance(a, torch.Tensor):
                        node.meta["val"] = a
                nodes.append(made if isinstance(argument, (list, tuple)) else made[0])
            if host_read(graph.call_function(func, tuple(nodes), dict(kwargs or {}))):
                raise AssertionError(f"{func} makes the host wait inside the loop")
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    run = table.StageCall.run

    def guarded(self: Any, values: Any) -> Any:
        if self.stage.time != BindingTime.STEP:
            return run(self, values)
        with Guard():
            return run(self, values)

    with monkeypatch.context() as patch:
        patch.setattr(table.StageCall, "run", guarded)
        yield ran


# A hoist that is lost later shows here: operations captured, and left in the body, of one denoiser call.
COUNTS = {
    "glm-image": {"transformer": (181, 91)},
    "ideogram-4": {"transformer": (195, 135), "unconditional_transformer": (195, 133)},
}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_left_in_the_body_is_counted_and_reads_nothing_on_the_host(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(name)
    with no_host_reads_in_the_body(monkeypatch) as ran:
        pair.check(prompt=CAT)
    counts = {}
    for denoiser in pair.denoisers():
        for graph in denoiser.graphs:
            counts[denoiser.name] = (graph.captured_operations, graph.by_time["step"].operations)
            assert graph.body_host_syncs == []
            assert graph.hoisted_weights > 0
    assert counts == COUNTS[name]
    forbidden = ("nonzero", "_local_scalar_dense", "masked_fill", "aten.index.Tensor", "index_put")
    assert not [op for op in ran if any(word in op for word in forbidden)]


def prior_branch(gm: torch.fx.GraphModule) -> str:
    """From the prior tokens' embedding to the activation behind their first projection."""
    reached = {n for n in gm.graph.nodes if n.name.startswith("prior_")}
    lines = []
    for node in gm.graph.nodes:
        if node.op == "call_function" and reached.intersection(node.all_input_nodes):
            reached.add(node)
            lines.append(format_node(node))
            if node.target is torch.ops.aten.silu.default:
                break
    return "\n".join(lines)


def test_golden_prior_branch_of_glm_image() -> None:
    """``prior_embedding[prior_token_drop] *= 0.0`` breaks the Dynamo graph of the model as it is written."""
    pair = Pair("glm-image")
    pair.check(prompt=CAT, guidance=False, steps=1)
    (graph,) = pair.compiled.transformer._compiled_call_impl.state.graphs
    assert prior_branch(graph.source) == text("""
        embedding: f32[1, 16, 64] = aten.embedding.default(prior_token_embedding_weight, prior_token_id)
        index: f32[u0, 64] = aten.index.Tensor(embedding, [prior_token_drop])
        sym_size_int: u0 = aten.sym_size.int(index, 0)
        ge: u0 >= 0 = ge(sym_size_int, 0)
        _assert_scalar = aten._assert_scalar.default(ge, Runtime assertion failed for expression u0 >= 0 on node 'ge')
        le: u0 <= 16 = le(sym_size_int, 16)
        _assert_scalar_1 = aten._assert_scalar.default(le, Runtime assertion failed for expression u0 <= 16 on node 'le')
        mul_8: f32[u0, 64] = aten.mul.Tensor(index, 0.0)
        index_put: f32[1, 16, 64] = aten.index_put.default(embedding, [prior_token_drop], mul_8)
        t_3: f32[64, 64] = aten.t.default(prior_projector_net_0_proj_weight)
        view_12: f32[16, 64] = aten.view.default(index_put, [16, 64])
        addmm_3: f32[16, 64] = aten.addmm.default(prior_projector_net_0_proj_bias, view_12, t_3)
        view_13: f32[1, 16, 64] = aten.view.default(addmm_3, [1, 16, 64])
        silu: f32[1, 16, 64] = aten.silu.default(view_13)
    """)  # noqa: E501
    assert prior_branch(graph.analysed) == text("""
        embedding: f32[1, 16, 64] = aten.embedding.default(prior_token_embedding_weight, prior_token_id)
        unsqueeze_50: b8[1, 16, 1] = aten.unsqueeze.default(prior_token_drop, -1)
        mul_47: f32[1, 16, 64] = aten.mul.Tensor(embedding, 0.0)
        where: f32[1, 16, 64] = aten.where.self(unsqueeze_50, mul_47, embedding)
        t_3: f32[64, 64] = aten.t.default(prior_projector_net_0_proj_weight)
        view_12: f32[16, 64] = aten.view.default(where, [16, 64])
        addmm_3: f32[16, 64] = aten.addmm.default(prior_projector_net_0_proj_bias, view_12, t_3)
        view_13: f32[1, 16, 64] = aten.view.default(addmm_3, [1, 16, 64])
        silu: f32[1, 16, 64] = aten.silu.default(view_13)
    """)
    assert prior_branch(graph.program.body.module) == ""  # All of it is the request's.


def test_schedule_rows_are_computed_once_whatever_the_prompt() -> None:
    pair = Pair("ideogram-4")
    for prompt in (CAT, DOG, CAT):
        pair.check(prompt=prompt, steps=4)
    conditional, unconditional = pair.denoisers()
    assert conditional.graphs[0].by_time["schedule"].runs == 4
    assert conditional.graphs[0].by_time["request"].runs == 2
    # The unconditional branch sees zeros for text, whatever the prompt.
    assert unconditional.graphs[0].by_time["request"].runs == 1
    pair.check(prompt=CAT, steps=3)
    assert pair.denoisers()[0].recompiles == 0


def test_callbacks_interrupt_and_exceptions_work_as_before() -> None:
    pair = Pair("glm-image")

    def louder(_pipe: Any, step: int, _t: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"prompt_embeds": tensors["prompt_embeds"] * 2} if step == 1 else {}

    def in_place(_pipe: Any, step: int, _t: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 1:
            tensors["prompt_embeds"].mul_(2)
        return {}

    def stop(pipe: Any, step: int, _t: Any, _tensors: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = step >= 1
        return {}

    plain = pair.check(prompt=CAT, steps=5)
    changed = [pair.check(prompt=CAT, steps=5, callback=c) for c in (louder, in_place, stop)]
    assert all(not torch.equal(plain, other) for other in changed)

    def fail(_pipe: Any, step: int, _t: Any, _tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 1:
            raise KeyboardInterrupt
        return {}

    with pytest.raises(KeyboardInterrupt):
        pair.run(pair.compiled, prompt=DOG, steps=5, callback=fail)
    pair.check(prompt=DOG, steps=5)
    assert torch.equal(pair.check(prompt=CAT, steps=5), plain)


@pytest.mark.parametrize("name", NAMES)
def test_pictures_and_saved_weights_are_the_same(name: str, tmp_path: Any) -> None:
    pair = Pair(name)
    pictures = [pair.run(p, output_type="pil")[0].tobytes() for p in (pair.untouched, pair.compiled)]
    assert pictures[0] == pictures[1]
    assert pair.compiled.transformer.config == pair.untouched.transformer.config
    pair.compiled.transformer.save_pretrained(tmp_path)
    loaded = type(pair.compiled.transformer).from_pretrained(tmp_path)
    for key, value in pair.untouched.transformer.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)
    assert pair.compiled.transformer.dtype == pair.untouched.transformer.dtype


def test_restore_leaves_the_pipeline_exactly_as_it_was() -> None:
    pipe = build_pipeline("ideogram-4")
    modules = {n: m for n, m in pipe.components.items() if isinstance(m, torch.nn.Module)}
    before = {n: dict(m.__dict__) for n, m in modules.items()}
    assert compile_pipeline(compile_pipeline(pipe, backend="eager"), backend="eager") is pipe
    pipe(**example_call("ideogram-4"))
    assert restore(pipe) is pipe
    for name, module in modules.items():
        after = {k: v for k, v in module.__dict__.items() if k != "_compiled_call_impl"}
        assert after == {k: v for k, v in before[name].items() if k != "_compiled_call_impl"}
        assert module._compiled_call_impl is None
    with pytest.raises(ValueError, match="was not compiled"):
        restore(pipe)


def test_lora_loaded_scaled_fused_and_unloaded_between_pictures() -> None:
    """Fusing writes weights through ``.data``; unfusing brings back nearly, but not exactly, the old bits."""
    pair = Pair("glm-image")
    plain = pair.check(prompt=CAT)

    def both(change: Any) -> None:
        for pipe in (pair.untouched, pair.compiled):
            torch.manual_seed(1)
            change(pipe.transformer)

    config = LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, target_modules=["linear", "to_q", "net.0.proj"])
    both(lambda m: m.add_adapter(config, "style"))
    assert not torch.equal(pair.check(prompt=CAT), plain)
    for scale in (0.5, 1.0):
        both(lambda m, scale=scale: m.fuse_lora(lora_scale=scale))
        pair.check(prompt=CAT)
        both(lambda m: m.unfuse_lora())
        pair.check(prompt=CAT)
    both(lambda m: m.disable_adapters())
    pair.check(prompt=CAT)
    both(lambda m: m.unload_lora())
    pair.check(prompt=CAT)


@pytest.mark.slow
def test_inductor_is_as_close_to_eager_as_plain_torch_compile() -> None:
    call = {"prompt": CAT, "guidance": False}
    pair = Pair("glm-image", backend="inductor")
    expected = pair.run(pair.untouched, **call)
    ours = pair.run(pair.compiled, **call)
    plain = copy.deepcopy(pair.untouched)
    plain.transformer.compile()
    theirs = pair.run(plain, **call)
    error, allowed = ((x - expected).abs().max().item() for x in (ours, theirs))
    assert error <= 2 * allowed, f"ours {error}, torch.compile {allowed}"
    assert report(pair.compiled).denoisers[0].fallbacks == []


class UNetPipeline(DiffusionPipeline):
    def __init__(self, unet: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)


def test_bad_pipelines_are_refused_by_name() -> None:
    pipe = build_pipeline("ideogram-4")
    unet = UNetPipeline(torch.nn.Linear(1, 1), pipe.scheduler)
    with pytest.raises(ValueError, match="UNet is not supported"):
        compile_pipeline(unet)
    for bad in (None, 3, torch.nn.Linear(1, 1)):
        with pytest.raises(TypeError, match="must be a diffusers DiffusionPipeline"):
            compile_pipeline(bad)
    with pytest.raises(TypeError, match="did you mean 'backend'"):
        compile_pipeline(pipe, bakend="eager")
    with pytest.raises(ValueError, match="did you mean 'inductor'"):
        compile_pipeline(pipe, backend="induktor")
    pipe.scheduler = None
    with pytest.raises(ValueError, match="has no scheduler"):
        compile_pipeline(pipe)
    assert pipe.transformer._compiled_call_impl is None
    assert pipe.unconditional_transformer._compiled_call_impl is None
