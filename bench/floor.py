"""The floor: our compiled body alone, on values that are held already."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

from dithoist.runtime.denoiser import compiled_denoiser
from dithoist.runtime.staged import StagedGraph

Body = Callable[..., Any]


class Floor:
    """What a step cannot go below: the bodies one call ran, with the inputs it ran them with.

    Calling it runs them again. Dynamo's guards, keys and look-ups are left out, and nothing else is.
    """

    def __init__(self, module: nn.Module, call: dict[str, Any]) -> None:
        """Call a compiled ``module`` once, and keep what its bodies were given.

        Raises:
            ValueError: ``module`` is not compiled by us, or did not run what was compiled.
        """
        wrapper = compiled_denoiser(module)
        if wrapper is None:
            raise ValueError(f"{type(module).__name__} is not compiled by dithoist")
        self.bodies: list[tuple[Body, tuple[Any, ...]]] = []
        graphs = list(wrapper.state.graphs)
        originals = [graph._body for graph in graphs]
        try:
            for graph in graphs:
                self._record(graph)
            module(**call)
        finally:
            for graph, body in zip(graphs, originals, strict=True):
                graph._body = body
        if not self.bodies:
            raise ValueError(f"{type(module).__name__} ran no body of ours")

    def _record(self, graph: StagedGraph) -> None:
        body = graph._body.function

        def run(*inputs: Any) -> Any:
            self.bodies.append((body, inputs))
            return body(*inputs)

        graph._body = dataclasses.replace(graph._body, function=run)

    def __call__(self) -> None:
        for body, inputs in self.bodies:
            body(*inputs)
