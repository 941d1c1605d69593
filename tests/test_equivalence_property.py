"""The promise, on random graphs: a split program gives the bits that running the graph at every step gives.

Each case is a random functional ATen graph, random binding times for its inputs, and a random history of
requests and steps. Wrong labels are part of it: the binding times are drawn without looking at what the
history then changes, so a "request" input may change at every step and must still be right.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from graphs import staged_graph
from hypothesis import assume, given, note
from hypothesis import strategies as st
from random_graphs import RandomGraph, bits_equal, random_graphs

from dithoist.passes import TIMES, BindingTime, PassContext
from dithoist.runtime.capture import breakable_cuda_graph
from dithoist.runtime.staged import StagedGraph

_LABELS = (BindingTime.MODEL, BindingTime.REQUEST, BindingTime.SCHEDULE, BindingTime.STEP)


@dataclass(frozen=True)
class Case:
    graph: RandomGraph
    labels: tuple[BindingTime, ...]
    history: tuple[tuple[int, int, bool], ...]
    """(request, step, whether a graph is being captured) of each call."""
    cached_bytes: int
    in_place: bool
    compiles: bool


@st.composite
def cases(draw: st.DrawFn, *, boolean_masks: bool = True) -> Case:
    graph = draw(random_graphs(boolean_masks=boolean_masks))
    labels = tuple(draw(st.sampled_from(_LABELS)) for _ in graph.inputs)
    calls = st.tuples(st.integers(0, 1), st.integers(0, 2), st.booleans())
    history = tuple(draw(st.lists(calls, min_size=1, max_size=8)))
    in_place, compiles = draw(st.sampled_from([(True, False), (False, True), (False, False)]))
    return Case(graph, labels, history, draw(st.sampled_from([0, 64, 10**6])), in_place, compiles)


def stage(case: Case) -> StagedGraph:
    nodes = case.graph.gm.graph.find_nodes(op="placeholder")
    labels = {node.name: label for node, label in zip(nodes, case.labels, strict=True)}
    context = PassContext(labels, in_place=case.in_place, compiles=case.compiles, verify=True)
    return staged_graph(case.graph.gm, context, case.cached_bytes)


def inputs_of_call(case: Case, request: int, step: int) -> list[torch.Tensor]:
    """Weights never change; request inputs with the request; schedule inputs with the step; the rest always."""
    seeds = {
        BindingTime.MODEL: 0,
        BindingTime.REQUEST: 100 + request,
        BindingTime.SCHEDULE: 200 + step,
        BindingTime.STEP: 300 + 10 * request + step,
    }
    values = {seed: case.graph.make_inputs(seed) for seed in seeds.values()}
    return [values[seeds[label]][i] for i, label in enumerate(case.labels)]


def flat(outputs: object) -> list[object]:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def assert_same_history(case: Case, staged: StagedGraph) -> None:
    weights = inputs_of_call(case, 0, 0)  # The same objects at every call, as a module's parameters are.
    for number, (request, step, capturing) in enumerate(case.history):
        values = inputs_of_call(case, request, step)
        values = [
            w if label == BindingTime.MODEL else v for w, v, label in zip(weights, values, case.labels, strict=True)
        ]
        before = [v.clone() for v in values]
        torch.manual_seed(number)
        expected = flat(case.graph.gm(*values))
        torch.manual_seed(number)
        with breakable_cuda_graph(capturing):
            actual = flat(staged(list(values)))
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            if isinstance(e, torch.Tensor):
                assert isinstance(a, torch.Tensor)
                assert bits_equal(a, e), f"call {number}: {a} is not {e}"
                assert a.stride() == e.stride(), f"call {number}: another layout"
            else:
                assert a == e
        for v, b in zip(values, before, strict=True):
            assert bits_equal(v, b), f"call {number} wrote an input"
        # A caller may do what it likes with what it got; the next call must not notice.
        for a in actual:
            if isinstance(a, torch.Tensor) and not any(_shares(a, v) for v in values):
                a.untyped_storage().fill_(7)


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@given(cases())
def test_split_program_gives_the_bits_of_the_graph(case: Case) -> None:
    note(case.graph.source)
    note(f"labels {[t.label for t in case.labels]}, history {case.history}")
    assert_same_history(case, stage(case))


@given(cases())
def test_every_value_that_can_be_known_earlier_is(case: Case) -> None:
    """Nothing is left in the body that reads only earlier values, but what is pinned and what is made again.

    (A back end that compiles makes more of them again, since one more operation costs it nothing.)
    """
    assume(not case.compiles)
    staged = stage(case)
    analysed = {n.name: n.meta["binding_time"] for n in staged.analysed.graph.nodes}
    body = {n.name for n in staged.program.body.module.graph.nodes}
    held = {o for s in staged.program.stages for o in s.outputs}
    for name in body - held:
        time = analysed.get(name)
        assert time in TIMES or time is None
        if time is not None and time != BindingTime.STEP:
            node = next(n for n in staged.analysed.graph.nodes if n.name == name)
            assert node.op in ("placeholder", "get_attr", "output") or _cheap(node), name


def _cheap(node: torch.fx.Node) -> bool:
    from dithoist.passes.effects import is_cast, is_size, is_view

    return is_view(node) or is_cast(node) or is_size(node)
