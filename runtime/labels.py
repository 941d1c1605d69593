"""Labels are guesses; what is passed tells the truth. An input that keeps changing is demoted, one that stays promoted.

A request input or weight that is new at more than `PATIENCE` steps in a row is one of the step; a small one, such as a
second timestep, is first taken for one of the schedule, and stays that if its values come again in a later generation.
An input of the step that was the same tensor, unwritten, at more than `PATIENCE` steps is one of the request. Nothing
is relabelled more than twice, so there is an end to it; labels the user chose are never promoted.

Only changes between steps count: a loop of one step with a new prompt each time is no evidence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch

from ..passes import BindingTime

PATIENCE = 4

FEW = 16
"""Elements that a timestep for each picture of a batch has at most."""

_MAX_BRANCHES = 8
_MAX_RELABELLED = 2
_MAX_SEEN = 4096


class Observation:
    """What the inputs of one graph were like."""

    def __init__(self) -> None:
        self._relabelled: Counter[int] = Counter()
        self._proving: dict[int, set[Hashable]] = {}
        self._fresh: Counter[int] = Counter()
        self.begin({}, ())

    def begin(self, labels: Mapping[int, BindingTime], movable: Collection[int]) -> None:
        """Start anew with these labels of inputs and weights by position; ``movable`` may be promoted."""
        self._labels = dict(labels)
        self._movable = [i for i in movable if self._relabelled[i] < _MAX_RELABELLED]
        self._changes: Counter[int] = Counter()
        self._same: Counter[int] = Counter()
        self._recent: dict[int, dict[Hashable, Any]] = {}

    def look(
        self,
        values: Sequence[Any],
        tokens: Mapping[int, Hashable],
        changed_weights: Collection[int],
        *,
        moved: bool,
        starts: bool,
    ) -> dict[int, BindingTime]:
        """The labels that have proved wrong, with what they are to be.

        Args:
            values: of the call.
            tokens: of request and schedule inputs.
            changed_weights: positions of weights that are not what they were.
            moved: whether the call is one of another step than the last.
            starts: whether a generation begins.
        """
        found: dict[int, BindingTime] = {}
        for i, label in self._labels.items():
            if label == BindingTime.MODEL:
                self._count(self._changes, i, i in changed_weights, moved)
            elif label == BindingTime.REQUEST and i in tokens:
                self._count(self._changes, i, self._is_new(i, tokens[i], None), moved)
            if self._changes[i] > PATIENCE:
                found[i] = self._demoted(i, label, values[i])
        for i in self._movable:
            value = values[i]
            if isinstance(value, torch.Tensor) and not value.is_inference():
                self._count(self._same, i, not self._is_new(i, (id(value), value._version), value), moved)
                if self._same[i] > PATIENCE:
                    found[i] = BindingTime.REQUEST
        for i in list(self._proving):
            if i in tokens and i not in found and self._has_failed(i, tokens[i], starts=starts):
                found[i] = BindingTime.STEP
        self._relabelled.update(found.keys())
        return found

    def _count(self, counter: Counter[int], i: int, happened: bool, moved: bool) -> None:
        if not happened:
            counter.pop(i, None)
        elif moved:
            counter[i] += 1

    def _is_new(self, i: int, token: Hashable, kept: Any) -> bool:
        """Whether the input has none of its last few values (guidance branches alternate between some)."""
        recent = self._recent.setdefault(i, {})
        new = token not in recent
        recent.pop(token, None)
        recent[token] = kept  # A tensor goes by its id, so it must live as long as that is remembered.
        if len(recent) > _MAX_BRANCHES:
            del recent[next(iter(recent))]
        return new

    def _demoted(self, i: int, label: BindingTime, value: Any) -> BindingTime:
        small = isinstance(value, torch.Tensor) and value.numel() <= FEW
        if label == BindingTime.MODEL or not small or self._relabelled[i]:
            return BindingTime.STEP
        self._proving[i] = set()
        return BindingTime.SCHEDULE

    def _has_failed(self, i: int, token: Hashable, *, starts: bool) -> bool:
        """Whether an input on trial shows no value again in its second generation."""
        seen = self._proving[i]
        if starts:
            self._fresh[i] += bool(seen)
        if token in seen and self._fresh[i]:
            del self._proving[i]  # It is one of the schedule.
        elif self._fresh[i] > PATIENCE or len(seen) > _MAX_SEEN:
            del self._proving[i]
            return True
        else:
            self._fresh[i] += bool(self._fresh[i]) and token not in seen
            seen.add(token)
        return False
