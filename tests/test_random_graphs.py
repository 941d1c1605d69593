"""The random graph generator keeps the promises that the property tests lean on."""

from __future__ import annotations

import math
import operator

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from random_graphs import RandomGraph, bits_equal, random_graphs
from torch._ops import OpOverload
from torch._subclasses import FakeTensor

# The same graphs on every run, with no example database.
FIXED = settings(
    max_examples=150,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def graphs() -> list[RandomGraph]:
    found: list[RandomGraph] = []

    @FIXED
    @given(random_graphs(boolean_masks=True))
    def collect(graph: RandomGraph) -> None:
        found.append(graph)

    collect()
    return found


def operators(graph: RandomGraph) -> set[OpOverload]:
    return {node.target for node in graph.gm.graph.nodes if isinstance(node.target, OpOverload)}


def run(graph: RandomGraph, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return list(graph.gm(*inputs))


def storage(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()


@pytest.mark.parametrize("seed", [0, 1])
def test_runs_are_repeatable_and_leave_the_inputs_alone(graphs: list[RandomGraph], seed: int) -> None:
    for graph in graphs:
        inputs = graph.make_inputs(seed)
        first = [t.clone() for t in run(graph, inputs)]
        second = run(graph, inputs)
        assert all(map(bits_equal, first, second)), graph
        assert all(map(bits_equal, inputs, graph.make_inputs(seed))), graph


def test_metadata_matches_what_runs(graphs: list[RandomGraph]) -> None:
    for graph in graphs:
        inputs = graph.make_inputs(0)
        placeholders = graph.gm.graph.find_nodes(op="placeholder")
        (output,) = graph.gm.graph.find_nodes(op="output")
        for nodes, values in ((placeholders, inputs), (output.args[0], run(graph, inputs))):
            assert len(nodes) == len(values), graph
            for node, value in zip(nodes, values, strict=True):
                fake = node.meta["val"]
                assert (fake.shape, fake.dtype) == (value.shape, value.dtype), (node, graph)
        for spec, value in zip(graph.inputs, inputs, strict=True):
            assert (spec.shape, spec.dtype) == (tuple(value.shape), value.dtype)
            assert value.is_contiguous() or spec.transposed


def test_graphs_are_functional_aten_with_fake_values(graphs: list[RandomGraph]) -> None:
    for graph in graphs:
        modes = set()
        for node in graph.gm.graph.nodes:
            if node.op == "call_function" and node.target is not operator.getitem:
                assert isinstance(node.target, OpOverload), (node, graph)
                assert not node.target._schema.is_mutable, (node, graph)
            if node.op != "output":
                values = node.meta["val"]
                for value in values if isinstance(values, (tuple, list)) else [values]:
                    assert isinstance(value, FakeTensor | torch.SymInt), (node, graph)
                    if isinstance(value, FakeTensor):
                        modes.add(value.fake_mode)
        assert len(modes) <= 1, graph


def test_the_graphs_vary(graphs: list[RandomGraph]) -> None:
    aten = torch.ops.aten
    seen = [operators(graph) for graph in graphs]
    assert len(set().union(*seen)) >= 40
    assert sum(any(op._schema.name in ("aten::view", "aten::select") for op in ops) for ops in seen) >= 10
    assert sum(any(torch.Tag.nondeterministic_seeded in op.tags for op in ops) for ops in seen) >= 5
    assert sum(aten._to_copy.default in ops for ops in seen) >= 5
    assert sum(aten.index_put.default in ops for ops in seen) >= 2
    assert any(spec.parameter for graph in graphs for spec in graph.inputs)

    aliased = repeated = 0
    for graph in graphs:
        inputs = graph.make_inputs(0)
        outputs = [storage(t) for t in run(graph, inputs)]
        aliased += bool(set(outputs) & {storage(t) for t in inputs})
        repeated += len(set(outputs)) < len(outputs)
    assert aliased >= 5
    assert repeated >= 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bits_equal_counts_every_bit(dtype: torch.dtype) -> None:
    nan = torch.tensor([math.nan, 0.0], dtype=dtype)
    assert bits_equal(nan, nan.clone())
    assert not bits_equal(nan, -nan)
    assert not bits_equal(torch.zeros((), dtype=dtype), -torch.zeros((), dtype=dtype))
    assert not bits_equal(nan, nan[:1])
    assert not bits_equal(nan, nan.to(torch.float16))
    assert bits_equal(torch.ones(2, 3, dtype=dtype).T, torch.ones(3, 2, dtype=dtype))
    assert bits_equal(nan.expand(3, 2)[:, 1], torch.zeros(3, dtype=dtype))
