"""The staged graph: runs a split program, each stage as seldom as its inputs allow.

A call goes through the hoisted stages in order. Each has a key: the weights' epoch and the tokens of the inputs
its values depend on (:mod:`dithoist.runtime.identity`). If values are held under that key they are used,
otherwise the stage runs and its values are held from then on. Then the body runs. Keys name only the inputs a
stage really depends on, so rows that depend on the timestep alone serve both guidance branches and later
prompts, and rows that also depend on the picture's size serve both branches.
"""

from __future__ import annotations

import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, detect_fake_mode, tracing

from ..passes import TIMES, BindingTime, PassContext, Program, Stage, build_program, outline_repeats
from ..passes.edit import copy_graph
from ..passes.effects import is_random
from . import capture
from .cache import HeldValues, Values
from .identity import InputIdentity, WeightsIdentity
from .release import ReleasedWeights, StreamedStage

DEMOTE_AFTER = 4
"""An input that changed in more than this many steps in a row is treated as one that changes every step."""

_MAX_BRANCHES = 8
_MAX_LOOPS = 64
_MAX_STEPS = 4096
_graph_numbers = itertools.count()


@dataclass(frozen=True)
class GraphInput:
    """One placeholder of a captured graph: its node name, the name for people, and when it is known."""

    node: str
    name: str
    label: BindingTime


@dataclass
class _Progress:
    """How far the loop of one guidance branch has come: schedule tokens so far, and the last timestep."""

    seen: set[Hashable] = field(default_factory=set)
    position: float | None = None


def picker(indices: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that takes the values at ``indices``: at every call, of thousands of weights."""
    if len(indices) < 2:
        return lambda values: [values[i] for i in indices]
    return operator.itemgetter(*indices)


@dataclass(frozen=True)
class _StageCall:
    """A compiled stage: which of the call's values it takes, and which inputs make its key."""

    stage: Stage
    function: Callable[..., Any]
    pick: Callable[[list[Any]], Sequence[Any]]
    key_inputs: tuple[int, ...]

    @staticmethod
    def of(stage: Stage, function: Callable[..., Any], position: dict[str, int]) -> _StageCall:
        """The call of ``function`` on values found at ``position``."""
        inputs, depends = (tuple(position[name] for name in names) for names in (stage.inputs, stage.depends))
        return _StageCall(stage, function, picker(inputs), depends)

    def run(self, values: list[Any]) -> Any:
        return self.function(*self.pick(values))


def compile_body(stage: Stage, backend: Callable[..., Any], context: PassContext) -> Callable[..., Any]:
    """Hand the body to the chosen back end, as ``torch.compile`` would.

    The other stages run as captured: once a model, request or row, which compiling them would hardly ever earn.
    """
    module = copy_graph(stage.module)
    if context.compiles and outline_repeats(module, context):
        for name in {str(node.target) for node in module.graph.find_nodes(op="call_module")}:
            part = module.get_submodule(name)
            assert isinstance(part, fx.GraphModule)
            part.forward = _compile_graph(part, backend)
        return module.forward
    return _compile_graph(module, backend)


def _compile_graph(gm: fx.GraphModule, backend: Callable[..., Any]) -> Callable[..., Any]:
    examples = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
    # A context of its own: the one around us describes the whole graph, not this stage.
    with tracing(TracingContext(detect_fake_mode(examples))):
        function = backend(gm, examples)
    assert callable(function)
    return function  # type: ignore[no-any-return]


class StagedGraph:
    """A captured graph that is called like it, with the flat list of its inputs, and does less work."""

    _boxed_call = True  # AOTAutograd then passes one list and unpacks nothing.

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: list[GraphInput],
        backend: Callable[..., Any],
        held: HeldValues,
        *,
        context: Callable[[dict[str, BindingTime]], PassContext] = PassContext,
        generation: Callable[[], object] = lambda: None,
        released: ReleasedWeights | None = None,
    ) -> None:
        """Split and compile.

        Args:
            gm: functional graph of ATen operations with fake values; it is not changed.
            inputs: its placeholders in order.
            backend: compiles each stage.
            held: where held values live; may be shared with other graphs.
            context: makes the passes' context from the labels by node name.
            generation: gives an object that is another one in each generation, if somebody knows.
            released: where weights that only hoisted work reads go after the first call; ``None`` keeps them.
        """
        self.inputs = {i.node: i for i in inputs}
        self.labels = {i.node: i.label for i in inputs}
        self.demoted: list[str] = []
        self.calls = 0
        self.stage_runs = dict.fromkeys(TIMES, 0)
        self.draws = any(is_random(node) for node in gm.graph.nodes)
        self.number = next(_graph_numbers)
        weakref.finalize(self, held.drop, self.number)
        weakref.finalize(self, held.drop, ("inputs", self.number))
        self.source = gm
        self._backend = backend
        self._held = held
        self._make_context = context
        self._generation = generation
        self._released = released
        self._last_generation: object = None
        self._lock = threading.RLock()
        self._build()

    def _build(self) -> None:
        """(Re)build program and stages from the captured graph and the labels as they are now."""
        released = self._released
        gm = copy_graph(self.source)
        self.context = self._make_context(self.labels)
        self.program: Program = build_program(gm, self.context)
        self.analysed = gm
        position = {name: i for i, name in enumerate(self.program.placeholders)}
        self._weights = [
            position[name]
            for name in self.program.placeholders
            if self.labels[name] == BindingTime.MODEL and any(name in s.inputs for s in self.program.stages)
        ]
        self._pick_weights = picker(self._weights)
        self._stages: list[_StageCall] = []
        for stage in self.program.stages:
            function = stage.module.forward if released is None else StreamedStage(stage.module, released.forget)
            self._stages.append(_StageCall.of(stage, function, position))
            position |= {name: len(position) + k for k, name in enumerate(stage.outputs)}
        # Both bodies exist from the start, so that switching between them compiles nothing.
        self._captured_body = self._body_call(self.program.body, position)
        eager_body = self.program.eager_body
        self._body = self._body_call(eager_body, position) if eager_body else self._captured_body
        keyed = sorted({i for s in self._stages for i in s.key_inputs})
        self._identities = {
            i: InputIdentity(
                self._held,
                ("inputs", self.number),  # Apart from the stages' values, which go when a weight changes.
                read_device=self.labels[self.program.placeholders[i]] == BindingTime.SCHEDULE,
            )
            for i in keyed
        }
        self._request_inputs = self._keyed_with(BindingTime.REQUEST)
        self._schedule_inputs = self._keyed_with(BindingTime.SCHEDULE)
        self._weights_identity = WeightsIdentity() if released is None else WeightsIdentity(released.forget)
        bodies = (self.program.body, self.program.eager_body or self.program.body)
        kept = {position[name] for body in bodies for name in body.inputs}
        self._pick_releasable = picker([i for i in self._weights if i not in kept])
        self._released_epoch = -1
        self._progress: dict[Hashable, _Progress] = {}
        self._direction = 0.0  # The way timesteps went the last time they went on.
        self._recent: dict[int, dict[Hashable, None]] = {i: {} for i in self._request_inputs}
        self._changes: dict[int, int] = {}
        self._last_schedule: Hashable = None

    def _body_call(self, body: Stage, position: dict[str, int]) -> _StageCall:
        return _StageCall.of(body, compile_body(body, self._backend, self.context), position)

    def _keyed_with(self, label: BindingTime) -> tuple[int, ...]:
        return tuple(i for i in self._identities if self.labels[self.program.placeholders[i]] == label)

    def __call__(self, args: list[Any]) -> Any:
        """Outputs of the whole graph for these inputs."""
        values = list(args)
        self.calls += 1
        # Held values are never written, so only finding and making them is serialised; bodies run in parallel.
        capturing = capture.is_capturing()
        with self._lock:
            for call, key in self._keys(values):
                if capturing and not call.stage.capture_safe:
                    values.extend([None] * len(call.stage.outputs))
                else:
                    values.extend(self._obtain(call, key, values))
            self.stage_runs[BindingTime.STEP] += 1
            # Another thread's demotion may put a new body in its place.
            body = self._captured_body if capturing else self._body
        result = body.run(values)
        if self._released is not None and self._released_epoch != self._weights_identity.epoch:
            with self._lock:
                self._release(values)
        return result

    def _release(self, values: list[Any]) -> None:
        """Let go of the weights that the body does not read; they have just been read, and are as they were."""
        assert self._released is not None
        self._released_epoch = self._weights_identity.epoch
        try:
            self._released.release(self._pick_releasable(values))
        except OSError as error:
            self.context.note("release_weights", f"weights stay in memory: {error}")
        self._weights_identity.moved(self._pick_weights(values))

    def _keys(self, values: list[Any]) -> list[tuple[_StageCall, Hashable]]:
        tokens = self._tokens(values)
        request = tuple(tokens[i] for i in self._request_inputs)
        schedule = tuple(tokens[i] for i in self._schedule_inputs)
        starts = self._starts_generation(request, schedule, self._position(values))
        changed = self._weights_identity.check(self._pick_weights(values), deep=starts)
        if changed:
            self._held.drop(self.number)
        moved = schedule != self._last_schedule or not self._schedule_inputs
        self._last_schedule = schedule
        if self._demote(tokens, {self._weights[i] for i in changed}, moved=moved):
            return self._keys(values)
        epoch = self._weights_identity.epoch
        return [
            (call, (self.number, stage, epoch, tuple(tokens[i] for i in call.key_inputs)))
            for stage, call in enumerate(self._stages)
        ]

    def _tokens(self, values: list[Any]) -> dict[int, Hashable]:
        return {i: identity.token(values[i]) for i, identity in self._identities.items()}

    def _obtain(self, call: _StageCall, key: Hashable, values: list[Any]) -> Values:
        held = self._held.get(key)
        if held is None:
            held = tuple(call.run(values))
            self.stage_runs[call.stage.time] += call.stage.capture_safe  # Row indices are part of their mask's work.
            self._held.put(key, held)
        return held

    def _starts_generation(self, request: Hashable, schedule: Hashable, position: float | None) -> bool:
        """Whether this call begins a loop: a new request, a step that was there before, or one the other way.

        A pipeline's loop is known by its scheduler (``generation``); the rest is for loops nobody told us of.
        Taking a step for a new loop costs a pass over the hoisted weights, no more.
        """
        generation = self._generation()
        progress = self._progress.get(request)
        move = 0.0
        if progress is not None and position is not None and progress.position is not None:
            move = position - progress.position
        restarted = generation is not self._last_generation or (
            progress is not None
            and (schedule in progress.seen or len(progress.seen) > _MAX_STEPS or move * self._direction < 0)
        )
        self._last_generation = generation
        if restarted or len(self._progress) >= _MAX_LOOPS:
            self._progress.clear()
        if progress is None or restarted:
            progress = self._progress[request] = _Progress()
        elif move:
            self._direction = move
        starts = not progress.seen
        progress.seen.add(schedule)
        progress.position = position
        return starts

    def _position(self, values: list[Any]) -> float | None:
        """The timestep as a number, where it can be read without waiting."""
        for i in self._schedule_inputs:
            value = values[i]
            if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel():
                return float(value.flatten()[:1].tolist()[0].real)
        return None

    def _demote(self, tokens: dict[int, Hashable], changed_weights: set[int], *, moved: bool) -> bool:
        """Treat inputs and weights that change at every step as step inputs. Returns whether there were any.

        Only changes between steps (``moved``) count: a loop of one step with a new prompt each time is no
        evidence.
        """
        for i in self._request_inputs:
            self._count_change(i, self._is_new(i, tokens[i]), moved)
        for i in self._weights:
            self._count_change(i, i in changed_weights, moved)
        changing = [i for i, n in self._changes.items() if n > DEMOTE_AFTER]
        for i in changing:
            node = self.program.placeholders[i]
            self.labels[node] = BindingTime.STEP
            self.demoted.append(self.inputs[node].name)
        if changing:
            self._held.drop(self.number)
            self._held.drop(("inputs", self.number))
            self._build()
        return bool(changing)

    def _count_change(self, i: int, changed: bool, moved: bool) -> None:
        if not changed:
            self._changes.pop(i, None)
        elif moved:
            self._changes[i] = self._changes.get(i, 0) + 1

    def _is_new(self, i: int, token: Hashable) -> bool:
        """Whether the input has none of its last few values (guidance branches alternate between some)."""
        recent = self._recent[i]
        new = token not in recent
        recent.pop(token, None)
        recent[token] = None
        if len(recent) > _MAX_BRANCHES:
            del recent[next(iter(recent))]
        return new

    @property
    def host_reads(self) -> int:
        """How often a key had to be read from an accelerator."""
        return sum(i.host_reads for i in self._identities.values())
