"""The hoisted stages of one captured graph, and what they gave: request values and the rows of the schedule table.

Each stage has a key: the weights' epoch, switches of PyTorch's numerics, and the tokens of the inputs its values depend
on. If values are held under that key they are used, otherwise the stage runs and its values are held from then on. With
a forecast, the rows of the coming steps are made together with the one that is missing. A forecast is never trusted: a
row is used only by a call whose own inputs have its key.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..passes import BindingTime, Stage
from ..passes.cost import tensor_bytes
from .cache import HeldValues, Values
from .forecast import Forecast, Tokens
from .identity import InputIdentity
from .rows import HoistedStage


def picker(indices: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that takes the values at ``indices``: at every call, of thousands of weights."""
    if len(indices) < 2:
        return lambda values: [values[i] for i in indices]
    return operator.itemgetter(*indices)


@dataclass(frozen=True)
class StageCall:
    """A compiled stage: which of the call's values it takes, and which inputs make its key."""

    stage: Stage
    function: Callable[..., Any]
    pick: Callable[[list[Any]], Sequence[Any]]
    key_inputs: tuple[int, ...]
    place: int

    @staticmethod
    def of(stage: Stage, function: Callable[..., Any], position: Mapping[str, int], place: int = -1) -> StageCall:
        """The call of ``function``, the ``place``-th of the hoisted stages, on values found at ``position``."""
        inputs, depends = (tuple(position[name] for name in names) for names in (stage.inputs, stage.depends))
        return StageCall(stage, function, picker(inputs), depends, place)

    def run(self, values: list[Any]) -> Any:
        return self.function(*self.pick(values))


class Table:
    """Held values by stage and key."""

    def __init__(
        self,
        number: int,
        stages: Sequence[StageCall],
        held: HeldValues,
        identities: Mapping[int, InputIdentity],
        schedule_inputs: Sequence[int],
        *,
        runs: dict[BindingTime, int],
        note: Callable[[str, str], None],
        forecast: Forecast | None = None,
    ) -> None:
        """
        Args:
            number: of the graph, first part of all keys.
            stages: in the order they run.
            held: where values are held.
            identities: of the inputs that make keys.
            schedule_inputs: which of these the schedule decides.
            runs: counts how often the stages of each time ran.
            note: keeps a line for the report.
            forecast: what the coming steps will pass; ``None`` makes each row when its step comes.
        """
        self._number = number
        self._stages = stages
        self._held = held
        self._identities = identities
        self._schedule_inputs = schedule_inputs
        self._runs = runs
        self._note = note
        self._scheduled = [call for call in stages if call.stage.time & BindingTime.SCHEDULE]
        self._forecast = forecast if self._scheduled else None
        outputs = (call.stage.module.graph.find_nodes(op="output")[0] for call in self._scheduled)
        self._row_bytes = sum(tensor_bytes(output.all_input_nodes) for output in outputs)

    def passed(self, tokens: Tokens, *, starts: bool) -> None:
        """Note what a call passes for its step; ``starts`` says whether a generation begins."""
        if self._forecast is not None:
            self._forecast.passed({i: tokens[i] for i in self._schedule_inputs}, starts=starts)

    def extend(self, values: list[Any], tokens: Tokens, epoch: Hashable, *, capturing: bool) -> None:
        """Append to a call's inputs what the stages give, in their order; ``None`` for what no capture allows."""
        for call in self._stages:
            if self._forecast is not None and call is self._scheduled[0] and not capturing:
                self._make_rows(self._forecast, values, tokens, epoch)
            if capturing and not call.stage.capture_safe:
                values.extend([None] * len(call.stage.outputs))
                continue
            key = self._key(call, tokens, epoch)
            made = self._held.get(key)
            if made is None:
                made = tuple(call.run(values))
                self._keep(call, key, made)
            values.extend(made)

    def _key(self, call: StageCall, tokens: Tokens, epoch: Hashable) -> Hashable:
        return self._number, call.place, epoch, tuple(tokens[i] for i in call.key_inputs)

    def _keep(self, call: StageCall, key: Hashable, made: Values) -> None:
        self._runs[call.stage.time] += call.stage.capture_safe  # Row indices are part of their mask's work.
        self._held.put(key, made)

    def _make_rows(self, forecast: Forecast, values: Sequence[Any], tokens: Tokens, epoch: Hashable) -> None:
        """Make the rows of this step and of those to come together, if one of this step's is missing."""
        if all(self._held.peek(self._key(call, tokens, epoch)) is not None for call in self._scheduled):
            return
        rows = [(list(values), tokens)]
        room = self._held.max_bytes // 2 // max(self._row_bytes, 1)
        now = {i: tokens[i] for i in self._schedule_inputs}
        for step in forecast.coming(now)[: max(0, room - 1)]:
            row = list(values)
            for i, value in step.items():
                row[i] = value.to(values[i].device)
            rows.append((row, {**tokens, **{i: self._identities[i].bits_token(v) for i, v in step.items()}}))
        for call in self._scheduled:
            keys = [self._key(call, row_tokens, epoch) for _, row_tokens in rows]
            found = {key: self._held.peek(key) for key in keys}
            missing = {key: row for key, (row, _) in zip(keys, rows, strict=True) if found[key] is None}
            for key, made in zip(missing, self._run_rows(call, list(missing.values())), strict=True):
                found[key] = made
                self._keep(call, key, made)
            for key, (row, _) in zip(keys, rows, strict=True):
                row.extend(found[key] or ())

    def _run_rows(self, call: StageCall, rows: list[list[Any]]) -> list[Values]:
        stage = call.function
        assert isinstance(stage, HoistedStage)
        inputs = [call.pick(row) for row in rows]
        try:
            return stage.rows(inputs) if inputs else []
        except (RuntimeError, ValueError, NotImplementedError) as error:
            if not stage.fast:
                raise
            stage.fast = False
            self._note("rows", f"made one by one, not as a batch: {type(error).__name__}: {error}")
            return stage.rows(inputs)
