"""Dead code goes, effects stay, and assertions go with the data-dependent size they check."""

from __future__ import annotations

import torch
from graphs import capture, context
from torch.fx.experimental.proxy_tensor import make_fx

from dithoist.passes import canonicalize_graph, eliminate_dead_code


def test_unread_work_goes_and_random_draws_stay() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        x.exp()
        torch.rand(3)
        return x + 1

    gm = make_fx(model, tracing_mode="fake")(torch.ones(2))  # Dynamo would drop the draw before we see it.
    eliminate_dead_code(gm, context())
    targets = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    assert targets == ["aten.rand.default", "aten.add.Tensor"]


def test_size_assertions_go_only_with_the_operation_that_made_the_size() -> None:
    def static(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y[m] *= 0.0
        return y

    def data_dependent(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y[m] = y[m].exp()
        return y

    for model, kept in ((static, False), (data_dependent, True)):
        gm = capture(model, torch.ones(3, 2), torch.tensor([True, False, True]))
        canonicalize_graph(gm, context())
        eliminate_dead_code(gm, context())
        targets = [str(n.target) for n in gm.graph.nodes]
        assert ("aten._assert_scalar.default" in targets) is kept
        assert ("aten.index.Tensor" in targets) is kept
