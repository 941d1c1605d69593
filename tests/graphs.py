"""Small graphs for tests: a Python function in, the functional ATen graph AOTAutograd makes of it out."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.common import aot_autograd

from dithoist.passes import BindingTime, PassContext, eliminate_dead_code
from dithoist.runtime.cache import HeldValues
from dithoist.runtime.staged import GraphInput, StagedGraph


def capture(function: Callable[..., Any], *args: Any, dynamic: bool = False) -> fx.GraphModule:
    """The inference graph of ``function``, its placeholders named after the function's arguments."""
    found: list[fx.GraphModule] = []
    names: list[str] = []

    def keep(aot: fx.GraphModule, _: Any) -> Any:
        for node in aot.graph.find_nodes(op="placeholder"):
            node._rename(names[node.meta["desc"].idx])
        aot.recompile()
        found.append(aot)
        return aot.forward

    def backend(gm: fx.GraphModule, examples: Any) -> Any:
        names.extend(n.name.removeprefix("l_").strip("_") for n in gm.graph.find_nodes(op="placeholder"))
        return aot_autograd(fw_compiler=keep, inference_compiler=keep)(gm, examples)

    with torch.no_grad(), dynamo_config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    (gm,) = found
    return gm


def rewritten(
    run: Callable[[fx.GraphModule, PassContext], int], function: Callable[..., Any], *args: Any
) -> fx.GraphModule:
    """The graph of ``function`` after one pass, without what that left unread."""
    gm = capture(function, *args)
    run(gm, context())
    eliminate_dead_code(gm, context())
    gm.recompile()
    return gm


def context(**labels: str) -> PassContext:
    """A context from ``x="step"``; verification on."""
    times = {t.label: t for t in (BindingTime.MODEL, BindingTime.REQUEST, BindingTime.SCHEDULE)}
    return PassContext({k: times.get(v, BindingTime.STEP) for k, v in labels.items()}, verify=True)


def staged_graph(gm: fx.GraphModule, ctx: PassContext, cached_bytes: int = 10**6) -> StagedGraph:
    """``gm`` staged for the eager back end, with ``ctx``'s labels and options."""
    return StagedGraph(
        gm,
        [GraphInput(node, node, label) for node, label in ctx.labels.items()],
        torch._dynamo.lookup_backend("eager"),
        HeldValues(cached_bytes),
        context=lambda labels: dataclasses.replace(ctx, labels=labels),
    )


def dit(x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A DiT in four lines: a timestep row, a text projection, their sum, and a body."""
    row = torch.sin(t).unsqueeze(0) @ w
    prompt = text @ w
    modulation = (row + prompt.mean(0)).to(x.dtype)
    return x * modulation.expand_as(x) + prompt


DIT_INPUTS = tuple(torch.ones(s) for s in ((2, 3), (3,), (2, 3), (3, 3)))
DIT_LABELS = {"x": "step", "t": "schedule", "text": "request", "w": "model"}


def text(source: str) -> str:
    """A golden text as written in a test, without its indentation."""
    return textwrap.dedent(source).strip()
