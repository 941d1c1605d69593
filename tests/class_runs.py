"""One run of a class of diffusers beside its untouched twin, and what it showed: `test_coverage.py` asks about it.

A run serves every test that asks, so what it showed must not hold on to anything that was compiled.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from dataclasses import dataclass

import torch
from twins import Twins, tensors

from dithoist.models.families import argument_labels
from dithoist.models.small import DENOISERS, Sizes, build_denoiser, example_calls
from dithoist.passes import Stage
from dithoist.runtime.backend import forward_arguments
from dithoist.runtime.denoiser import compiled_denoiser
from dithoist.runtime.report import DenoiserReport
from dithoist.runtime.staged import StagedGraph

# Unlike each other and every width: Dynamo gives one symbol to all that have the same size at the first capture, and
# a width is fixed.
_DYNAMIC_SIZES = (Sizes(tokens=36, prompt=11), Sizes(tokens=100, prompt=13))
_LARGER_SIZES = (Sizes(tokens=100, prompt=11), Sizes(tokens=196, prompt=13))
_NEED_LARGER = {"hunyuan-dit", "wan-vace", "helios", "any-flow-far"}
"""Of whose picture the smaller size is a width, or leaves one token at some place, which is fixed as well."""
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


@dataclass(frozen=True)
class ClassRun:
    """What a class showed.

    Attributes:
        report: of the compiled denoiser, after all requests.
        captured: graphs there were after each request.
        products: matrix products in the stages, by binding time.
    """

    report: DenoiserReport
    captured: tuple[int, ...]
    products: Counter[str]

    @property
    def operations(self) -> tuple[int, int]:
        """Of a call as captured, and of what is left in the body. A graph counts once, however often a call runs it."""
        captured = sum(graph.captured_operations for graph in self.report.graphs)
        return captured, sum(graph.by_time["step"].operations for graph in self.report.graphs)

    @property
    def flops(self) -> tuple[int, int]:
        """The same for FLOPs."""
        every = sum(row.flops for graph in self.report.graphs for row in graph.by_time.values())
        return every, sum(graph.by_time["step"].flops for graph in self.report.graphs)

    @property
    def weights(self) -> tuple[int, int]:
        """Bytes of the weights that are read at all, and of those that the body reads."""
        hoisted = sum(graph.hoisted_weights for graph in self.report.graphs)
        body = sum(graph.by_time["step"].weights_read for graph in self.report.graphs)
        return hoisted + body, body

    @property
    def host_reads(self) -> Counter[str]:
        """Operators in the body that make the host wait."""
        found = [re.search(r"\((.*)\)", name) for graph in self.report.graphs for name in graph.body_host_syncs]
        return Counter(match[1] for match in found if match)


@functools.cache
def class_run(name: str, *, dynamic: bool = False) -> ClassRun:
    """Two requests of three steps, for a dynamic capture at two sizes, every call with the untouched module's bits.

    Nothing may fall back: `Twins` compiles with `strict=True`.
    """
    torch.compiler.reset()  # Dynamo remembers sizes that changed, and would take them for dynamic from then on.
    twins = Twins(build_denoiser(name), dynamic=dynamic or None)
    wrapper = compiled_denoiser(twins.compiled)
    assert wrapper is not None
    captured = []
    dynamic_sizes = _LARGER_SIZES if name in _NEED_LARGER else _DYNAMIC_SIZES
    for sizes, seed in itertools.product(dynamic_sizes if dynamic else (Sizes(),), (0, 1)):
        for call in example_calls(name, twins.untouched, sizes, seed=seed):
            twins.check(**call)
        captured.append(len(wrapper.state.graphs))
    return ClassRun(twins.report, tuple(captured), _products(wrapper.state.graphs))


def _products(graphs: set[StagedGraph]) -> Counter[str]:
    stages: list[Stage] = [stage for graph in graphs for stage in (*graph.program.stages, graph.program.body)]
    found: Counter[str] = Counter()
    for stage in stages:
        found[stage.time.label] += sum(node.target in _PRODUCTS for node in stage.module.graph.nodes)
    return found


def mislabelled(name: str) -> dict[str, str]:
    """Arguments the pipeline changes more often, or more seldom, than their label says, and what they are.

    What is the same object at each call is known with the request, what other requests have too with the schedule.
    A guidance scale that does not change is no mistake: it might.
    """
    module = build_denoiser(name)
    labels = argument_labels(DENOISERS[name].class_name, forward_arguments(module), {})
    calls, others = (example_calls(name, module, seed=seed) for seed in (0, 1))
    found = {}
    for argument in calls[0]:
        values = [tensors(call[argument]) for call in calls]
        if not values[0]:
            continue
        label = labels[argument].label if argument in labels else "request"
        if all(call[argument] is calls[0][argument] for call in calls):
            is_known = "request"
        elif all(_equal(tensors(other[argument]), value) for other, value in zip(others, values, strict=True)):
            is_known = "schedule"
        else:
            is_known = "step"
        if label != is_known and (label, is_known) != ("schedule", "request"):
            found[argument] = is_known
    return found


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))
