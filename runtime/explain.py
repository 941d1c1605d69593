"""``explain``: what would be hoisted out of a published denoiser's loop, with no weights and no run.

The module is built without memory, captured as ``compile_denoiser`` would capture it on a CPU, and taken through the
same passes. What the program costs is then read off its graphs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from ..passes import TIMES, BindingTime, PassContext, Program, build_program
from ..passes import cost as costs
from ..passes.binding_time import binding_time
from ..passes.cut import is_input
from ..passes.effects import view_base
from . import env
from .backend import module_path
from .choose import Choice, choose
from .explanation import Explanation, HoistedWork, TimeWork
from .settings import Settings, suggest_arguments
from .staged import GraphInput

DTYPE = torch.bfloat16
LARGEST = 10
"""How many works :attr:`Explanation.largest` names."""


class _Captured(NamedTuple):
    """What a call costs before the passes change its graph."""

    operations: int
    flops: int
    host_syncs: list[str]


@suggest_arguments
def explain(
    model: str | Path | Mapping[str, Any],
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    batch: int = 1,
    prompt: int | None = None,
    backend: str = "inductor",
) -> Explanation:
    """What dithoist would hoist out of a denoiser's loop, without its weights.

    Args:
        model: a published model (:data:`dithoist.models.published.PUBLISHED`), a ``config.json`` of a diffusers
            transformer or what is in it, or a class as ``"package.module.Class"``: one of diffusers, or derived from
            one.
        config: configuration of such a class, where it is not the class's defaults.
        height: of the picture in pixels; default as for the published model of that class.
        width: in pixels.
        frames: of the video, 1 for a picture.
        batch: pictures in one call.
        prompt: text tokens, padding included.
        backend: as for ``compile_pipeline``; where it compiles, more is made again rather than held.

    Raises:
        ValueError: no such model, class or back end, or a size it cannot have; the message names the known ones.
        RuntimeError: the class does not become one graph.
        ModuleNotFoundError: diffusers is not installed.
    """
    settings = Settings(backend)
    choice = choose(model, config, height=height, width=width, frames=frames, batch=batch, prompt=prompt)
    from .hollow import capture, hollow_call, hollow_module  # Needs diffusers.

    module = hollow_module(choice.build, DTYPE)
    granted = choice.prepare(module)
    graph, inputs = capture(module, hollow_call(lambda: choice.call(module)), choice.family)
    captured = _Captured(costs.operations(graph), costs.flops(graph), costs.host_reads(graph))
    labels = {i.node: i.label for i in inputs}
    context = PassContext(labels, compiles=settings.backend == "inductor", verify=env.verify())
    if granted:
        context.note("capture", granted)
    program = build_program(graph, context)
    return _explanation(choice, backend, module, graph, inputs, program, captured, context.notes)


def _explanation(
    choice: Choice,
    backend: str,
    module: nn.Module,
    analysed: fx.GraphModule,
    inputs: list[GraphInput],
    program: Program,
    captured: _Captured,
    notes: list[str],
) -> Explanation:
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    weights = {i.node: tensors[i.name] for i in inputs if i.name in tensors}
    last_read = {i: stage.time for stage in (*program.stages, program.body) for i in stage.inputs if i in weights}
    hoisted = [weights[i] for i, time in last_read.items() if time != BindingTime.STEP]
    total = sum(w.numel() for w in tensors.values())
    return Explanation(
        name=choice.name,
        module=type(module).__name__,
        height=choice.height,
        width=choice.width,
        frames=choice.frames,
        tokens=choice.sizes.tokens,
        batch=choice.sizes.batch,
        prompt=choice.sizes.prompt,
        dtype=str(DTYPE).removeprefix("torch."),
        backend=backend,
        parameters=total,
        parameters_unread=total - sum(weights[i].numel() for i in last_read),
        bytes_released=sum(w.numel() * w.element_size() for w in hoisted),
        captured_operations=captured.operations,
        captured_flops=captured.flops,
        captured_host_syncs=captured.host_syncs,
        by_time=_by_time(program, _uncut(analysed), {i: w.numel() for i, w in weights.items()}, last_read),
        body_host_syncs=costs.host_reads(program.body.module),
        largest=_largest(program),
        notes=notes,
    )


def _by_time(
    program: Program, uncut: list[fx.Node], elements: Mapping[str, int], last_read: Mapping[str, BindingTime]
) -> dict[str, TimeWork]:
    stages = {s.time: s for s in (*program.stages, program.body)}
    rows = {}
    for time in TIMES:
        held_uncut = costs.tensor_bytes(n for n in uncut if binding_time(n) == time)
        if time in stages:
            module, read = stages[time].module, [i for i in stages[time].inputs if i in elements]
            (output,) = module.graph.find_nodes(op="output")
            rows[time.label] = TimeWork(
                operations=costs.operations(module),
                flops=costs.flops(module),
                parameters_read=sum(elements[i] for i in read),
                parameters_last_read=sum(elements[i] for i in read if last_read[i] == time),
                bytes_held=costs.tensor_bytes(output.all_input_nodes) if stages[time].outputs else 0,
                bytes_held_uncut=held_uncut,
            )
        elif held_uncut:  # Nothing is held: later times make it again.
            rows[time.label] = TimeWork(0, 0, 0, 0, 0, held_uncut)
    return rows


def _uncut(analysed: fx.GraphModule) -> list[fx.Node]:
    """The values that would be held if each were held that a later time reads."""

    def read_later(node: fx.Node) -> bool:
        return any(u.op == "output" or binding_time(u) != binding_time(node) for u in node.users)

    hoisted = (n for n in analysed.graph.nodes if n.op == "call_function" and binding_time(n) != BindingTime.STEP)
    return [n for n in hoisted if not is_input(view_base(n)) and read_later(n)]


def _largest(program: Program) -> list[HoistedWork]:
    found: dict[tuple[str, BindingTime], list[fx.Node]] = {}
    for stage in program.stages:
        for node in filter(costs.is_operation, stage.module.graph.nodes):
            found.setdefault((_any_block(_module(node)), stage.time), []).append(node)
    works = []
    for (path, time), nodes in found.items():
        modules = {_module(n) for n in nodes}
        work = HoistedWork(
            module=path if len(modules) > 1 else next(iter(modules)),
            binding_time=time.label,
            modules=len(modules),
            operations=len(nodes),
            flops=sum(map(costs.node_flops, nodes)),
        )
        works.append(work)
    return sorted(works, key=lambda w: (w.flops, w.operations), reverse=True)[:LARGEST]


def _any_block(path: str) -> str:
    """``blocks.*.norm.linear`` for ``blocks.3.norm.linear``; a number at the end of a longer path is no block's."""
    return re.sub(r"\.\d+(?=\.)|(?<=^)(\w+)\.\d+$", lambda m: f"{m[1] or ''}.*", path)


def _module(node: fx.Node) -> str:
    """Path of the submodule a node comes from; empty for the denoiser itself."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    path = module_path(stack[-1][0]) if stack else ""
    return "" if path == "L['self']" else path
