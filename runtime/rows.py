"""Runs a hoisted stage: for one row of the schedule table, or for many at once.

Many rows at once read each weight once. In *exact* mode each operation runs for one row after the other, with the
shapes the model would give it, so that a row's bits do not depend on how many are made. In *fast* mode the rows are a
batch (``torch.func.vmap``): one matrix product instead of as many products with a vector, whose last bits differ.

Either way a stage whose weights may lie elsewhere runs operation by operation: a weight is fetched before its first
use and forgotten after its last, so never are all of them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ..passes.effects import view_base
from .cache import Values
from .release import ReleasedWeights


class HoistedStage:
    """The graph of a hoisted stage, to be called like it."""

    def __init__(self, gm: fx.GraphModule, *, fast: bool = False, released: ReleasedWeights | None = None) -> None:
        """
        Args:
            gm: the graph; it returns a tuple of tensors.
            fast: make many rows as one batch.
            released: where weights may lie; each is fetched before its first use and forgotten after its last.
        """
        self.gm = gm
        self._released = released
        (output,) = gm.graph.find_nodes(op="output")
        self._layouts = [node.meta.get("val") for node in output.all_input_nodes]
        self._done: dict[fx.Node, list[int]] = {}
        last_reader = {view_base(s): node for node in gm.graph.nodes for s in node.all_input_nodes}
        inputs = gm.graph.find_nodes(op="placeholder")
        # Sizes that are known only at a call say nothing of how the stage alone would lay a result out.
        values = [n.meta.get("val") for n in inputs]
        self.fast = fast and not any(_is_dynamic(v) for v in values)
        for i, node in enumerate(inputs):
            if node in last_reader:
                self._done.setdefault(last_reader[node], []).append(i)

    def __call__(self, *inputs: Any) -> Values:
        """What the graph returns."""
        if self._released is None:
            return tuple(self.gm.forward(*inputs))
        return self._interpret([inputs])[0]

    def rows(self, inputs: Sequence[Sequence[Any]]) -> list[Values]:
        """What the graph returns for each of ``inputs``, which are alike but for the values of some tensors.

        Raises:
            RuntimeError, ValueError, NotImplementedError: in fast mode, an operation that has no batched form.
        """
        return self._batched(inputs) if self.fast and len(inputs) > 1 else self._interpret(inputs)

    def _interpret(self, inputs: Sequence[Sequence[Any]]) -> list[Values]:
        run = _Rows(self, len(inputs), inputs[0])
        rows: list[Values] = run.run(*zip(*inputs, strict=True), enable_io_processing=False)
        return rows

    def _batched(self, inputs: Sequence[Sequence[Any]]) -> list[Values]:
        columns = list(zip(*inputs, strict=True))
        varies = [any(value is not column[0] for value in column) for column in columns]
        stacked = [torch.stack(c) if v else c[0] for c, v in zip(columns, varies, strict=True)]

        def one(*row: Any) -> Any:
            return _Rows(self, 1, inputs[0]).run(*((v,) for v in row), enable_io_processing=False)[0]

        batch = torch.func.vmap(one, in_dims=tuple(0 if v else None for v in varies))(*stacked)
        return [tuple(_row(t[k], v) for t, v in zip(batch, self._layouts, strict=True)) for k in range(len(inputs))]

    def fetch(self, value: Any) -> Any:
        """An input before its first use."""
        return self._released.fetch(value) if self._released is not None and isinstance(value, torch.Tensor) else value

    def forget(self, node: fx.Node, inputs: Sequence[Any]) -> None:
        """Tell which of ``inputs`` nothing reads after ``node``."""
        for i in self._done.get(node, ()):
            if self._released is not None and isinstance(inputs[i], torch.Tensor):
                self._released.forget(inputs[i])


def _is_dynamic(value: Any) -> bool:
    sizes = [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]
    return any(isinstance(s, torch.SymInt) for s in sizes)


def _row(value: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
    """A row of its own memory (it must not keep the batch alive), laid out as the stage alone would."""
    if like is None:
        return value.clone(memory_format=torch.contiguous_format)
    row = torch.empty_strided(like.shape, like.stride(), dtype=value.dtype, device=value.device)
    return row.copy_(value)


class _PerRow(tuple[Any, ...]):
    """A value for each row."""


class _Rows(fx.Interpreter):
    """One run of a stage for some rows; what is the same for all of them is computed once."""

    def __init__(self, stage: HoistedStage, count: int, inputs: Sequence[Any]) -> None:
        super().__init__(stage.gm)
        self._stage = stage
        self._count = count
        self._inputs = inputs
        self._to_fetch = dict(zip(stage.gm.graph.find_nodes(op="placeholder"), inputs, strict=True))

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "placeholder":
            column = super().run_node(n)
            same = all(value is column[0] for value in column)
            return column[0] if same else _PerRow(column)
        if n.op == "output":
            return [tuple(self._of_row(m, k) for m in n.all_input_nodes) for k in range(self._count)]
        for m in n.all_input_nodes:
            if self._to_fetch.pop(m, None) is self.env[m]:  # What differs from row to row is no weight.
                self.env[m] = self._stage.fetch(self.env[m])
        if any(isinstance(self.env[m], _PerRow) for m in n.all_input_nodes):
            result: Any = _PerRow(self._call(n, k) for k in range(self._count))
        else:
            result = self._call(n, 0)
        self._stage.forget(n, self._inputs)
        return result

    def _of_row(self, node: fx.Node, k: int) -> Any:
        value = self.env[node]
        return value[k] if isinstance(value, _PerRow) else value

    def _call(self, n: fx.Node, k: int) -> Any:
        args, kwargs = map_arg((n.args, n.kwargs), lambda m: self._of_row(m, k))
        return getattr(self, n.op)(n.target, args, kwargs)
