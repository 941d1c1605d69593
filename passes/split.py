"""The split: one graph becomes a program of stages, one for each binding time.

The prologue is the ``MODEL`` and ``REQUEST`` stages, the schedule the ``SCHEDULE`` and ``REQUEST_SCHEDULE``
stages, the body the ``STEP`` stage. A stage computes the nodes of its time that someone needs, and makes again
the views, casts and sizes of earlier values (:mod:`dithoist.passes.cut`).

Legality: a hoisted node reads only values of earlier or equal time (the join), so every stage finds its inputs
in graph inputs, in its own nodes or in held values of stages that ran before it. Nodes keep their order
inside a stage, so random calls and writes, all of them in the body, happen in the model's order. An assertion runs in
the first stage that knows what it asks: where it fails there, it would have failed in this call. A held value
may be read for many steps, so nobody outside may get hold of it: an output that is a held value, or a view of
one, leaves the body as a copy. Graph inputs that leave as outputs are left alone: sharing memory with the
caller's tensor is what the model did.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from .binding_time import HOISTED, BindingTime, binding_time
from .context import PassContext
from .cut import choose_held, is_input
from .edit import call, needed_nodes, placeholder_for
from .effects import is_assertion, pinned_reason, view_base


@dataclass(frozen=True)
class Stage:
    """One stage of a program.

    Attributes:
        time: when the stage can run.
        module: its graph. Placeholders are ``inputs`` in order; it returns ``outputs`` in order (the body
            returns what the whole graph returned).
        inputs: names of the graph inputs and held values it reads.
        outputs: names of the held values it makes; empty for the body.
        depends: names of the graph inputs, weights aside, that decide the outputs, directly or through held
            values. Narrower than what earlier stages read: two calls that agree on these share the outputs.
        capture_safe: whether it may run while a CUDA graph is captured (no host read, static shapes).
    """

    time: BindingTime
    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    depends: tuple[str, ...]
    capture_safe: bool = True


@dataclass(frozen=True)
class Program:
    """A denoiser's graph, split by binding time.

    Attributes:
        placeholders: inputs of the whole graph, in calling order.
        labels: binding time of each of them.
        stages: the hoisted stages that have work to do, in the order they run.
        body: what is left for every step; functional, so that it may run under capture.
        sources: for each held value, the graph inputs it depends on, weights aside.
        eager_body: the body to run while no capture is active, where a pass made another
            (:mod:`dithoist.passes.masked_fill`).
    """

    placeholders: tuple[str, ...]
    labels: dict[str, BindingTime]
    stages: tuple[Stage, ...]
    body: Stage
    sources: dict[str, tuple[str, ...]]
    eager_body: Stage | None = None

    def depends(self, name: str) -> tuple[str, ...]:
        """The graph inputs, weights aside, that decide a graph input or held value."""
        if name in self.sources:
            return self.sources[name]
        return () if self.labels[name] == BindingTime.MODEL else (name,)


def split_by_binding_time(gm: fx.GraphModule, context: PassContext) -> Program:
    """Split an analysed graph. ``gm`` itself is only changed by the copies its outputs need."""
    _copy_held_outputs(gm, context)
    held = choose_held(gm, context)
    placeholders = gm.graph.find_nodes(op="placeholder")
    stages = []
    assertions = [n for n in gm.graph.nodes if is_assertion(n)]
    for time in HOISTED:
        outputs = [n for n in held if binding_time(n) == time]
        if outputs:
            known = [n for n in assertions if binding_time(n) | time == time]
            assertions = [n for n in assertions if n not in known]
            stages.append(_stage(gm, time, outputs, held, known))
            context.count(f"held_{time.label}", len(outputs))
    (output,) = gm.graph.find_nodes(op="output")
    effects = [n for n in gm.graph.nodes if pinned_reason(n) is not None]
    return Program(
        placeholders=tuple(n.name for n in placeholders),
        labels={n.name: binding_time(n) for n in placeholders},
        stages=tuple(stages),
        body=_stage(gm, BindingTime.STEP, [*effects, *assertions, output], held),
        sources={n.name: _sources([n]) for n in held},
    )


def _copy_held_outputs(gm: fx.GraphModule, context: PassContext) -> None:
    """Give the caller a copy of each held value that leaves, and the views the model took of it on that copy."""
    (output,) = gm.graph.find_nodes(op="output")
    copies: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies:
            if node is view_base(node):
                copies[node] = call(node, torch.ops.aten.clone.default, node)
                output.prepend(copies[node])
            else:
                source = node.args[0]
                assert isinstance(source, fx.Node)
                base = copy(source)
                with gm.graph.inserting_before(output):
                    copies[node] = gm.graph.node_copy(node, lambda n: base if n is source else n)
            copies[node].meta["binding_time"] = BindingTime.STEP
        return copies[node]

    for node in output.all_input_nodes:
        base = view_base(node)
        is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
        if is_tensor and not is_input(base) and binding_time(base) != BindingTime.STEP:
            copy(node)
            context.note("split", f"output {node.name} is known before the loop: the caller gets a copy")
    output.args = fx.node.map_arg(output.args, lambda n: copies.get(n, n))


def _stage(
    gm: fx.GraphModule,
    time: BindingTime,
    outputs: list[fx.Node],
    held: Iterable[fx.Node],
    assertions: Iterable[fx.Node] = (),
) -> Stage:
    external = {n for n in held if binding_time(n) != time}
    needed = needed_nodes([*outputs, *assertions], external)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    inputs = [n for n in gm.graph.nodes if n in needed and (n.op == "placeholder" or n in external)]
    for node in inputs:
        env[node] = placeholder_for(node, graph)
    for node in gm.graph.nodes:
        if node in needed and node not in env:
            env[node] = graph.node_copy(node, env.__getitem__)
    if time != BindingTime.STEP:
        graph.output(tuple(env[n] for n in outputs)).meta["binding_time"] = time
    graph.lint()
    module = fx.GraphModule(gm, graph, class_name=f"{time.label.title().replace('+', '')}Stage")
    names = () if time == BindingTime.STEP else tuple(n.name for n in outputs)
    return Stage(time, module, tuple(n.name for n in inputs), names, _sources(outputs))


def _sources(nodes: list[fx.Node]) -> tuple[str, ...]:
    """Graph inputs, weights aside, that ``nodes`` depend on."""
    found = (n for n in needed_nodes(nodes, set()) if n.op == "placeholder")
    return tuple(n.name for n in sorted(found) if binding_time(n) != BindingTime.MODEL)
