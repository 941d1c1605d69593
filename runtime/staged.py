"""The staged graph: runs a split program, each stage as seldom as its inputs allow.

A call goes through the hoisted stages in order, which run where no values are held for its inputs
(:mod:`dithoist.runtime.table`, :mod:`dithoist.runtime.identity`). Then the body runs. Keys name only the inputs a
stage really depends on, so rows that depend on the timestep alone serve both guidance branches and later
prompts, and rows that also depend on the picture's size serve both branches.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, detect_fake_mode, tracing

from ..passes import TIMES, BindingTime, PassContext, Program, Stage, build_program, outline_repeats
from ..passes import cost as costs
from ..passes.binding_time import binding_time
from ..passes.edit import copy_graph
from ..passes.effects import is_random, view_base
from . import capture
from .cache import HeldValues
from .device_schedule import DeviceSchedule
from .env import log
from .forecast import Forecast
from .identity import InputIdentity, WeightsIdentity, reads_wait
from .labels import FEW, Observation
from .loop import Generations, Loop
from .release import ReleasedWeights
from .rows import HoistedStage
from .table import StageCall, Table, picker

_graph_numbers = itertools.count()


@dataclass(frozen=True)
class GraphInput:
    """One placeholder of a captured graph: its node name, the name for people, and when it is known.

    ``movable``: an input of the step that turns out to stay may be taken for one of the request.
    """

    node: str
    name: str
    label: BindingTime
    movable: bool = False


_PRECISIONS = list(itertools.product(("cuda", "mkldnn"), ("matmul", "conv")))
_precision_getter = getattr(torch._C, "_get_fp32_precision_getter", None)


def _numerics() -> Hashable:
    """Switches that decide about last bits and that Dynamo guards in part; held values must not outlive a change."""
    libraries = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled(), torch._C._get_cudnn_deterministic()
    if _precision_getter is None:
        return *libraries, torch.get_float32_matmul_precision()
    # That one raises where somebody uses the new names (``torch.backends.cuda.matmul.fp32_precision``).
    return *libraries, *itertools.starmap(_precision_getter, _PRECISIONS)


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


def _output_times(gm: fx.GraphModule) -> list[BindingTime]:
    """When each value is known that an analysed graph returns: where it is a copy for the caller, its original."""
    (output,) = gm.graph.find_nodes(op="output")
    assert isinstance(output.args[0], tuple | list)
    return [_known(n) if isinstance(n, fx.Node) else BindingTime.MODEL for n in output.args[0]]


def _known(node: fx.Node) -> BindingTime:
    base = view_base(node)
    if base.target is torch.ops.aten.clone.default:
        base = base.all_input_nodes[0]
    return binding_time(base)


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
        loop: Loop | None = None,
        released: ReleasedWeights | None = None,
        warn: Callable[[str], None] = lambda message: None,
        returned: Callable[[Sequence[Any], Sequence[BindingTime]], None] = lambda values, times: None,
    ) -> None:
        """Split and compile.

        Args:
            gm: functional graph of ATen operations with fake values; it is not changed.
            inputs: its placeholders in order.
            backend: compiles each stage.
            held: where held values live; may be shared with other graphs.
            context: makes the passes' context from the labels by node name.
            loop: what is known of the loop around the calls.
            released: where weights that only hoisted work reads go after the first call; ``None`` keeps them.
            warn: told what the user asked for and does not get.
            returned: told at the first call what it returned, and when each value of it is known.
        """
        self.inputs = {i.node: i for i in inputs}
        self.labels = {i.node: i.label for i in inputs}
        self.demoted: list[str] = []
        self.promoted: list[str] = []
        self._observation = Observation()
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
        self._loop = loop or Loop()
        self._released = released
        self._warn = warn
        self._returned = returned
        self._lock = threading.RLock()
        self._build()
        self._log_program("captured")

    def _log_program(self, done: str) -> None:
        before, now = costs.operations(self.source), costs.operations(self.program.body.module)
        log.info("graph %d %s: %d of %d operations stay in the loop", self.number, done, now, before)

    def _build(self) -> None:
        """(Re)build program and stages from the captured graph and the labels as they are now."""
        self._whole = False  # Until the end: compiling takes seconds, and Ctrl-C in them must leave no half.
        released = self._released
        gm = copy_graph(self.source)
        self.context = self._make_context(self.labels)
        self.program: Program = build_program(gm, self.context)
        self._output_times = _output_times(gm)
        self.analysed = gm
        position = {name: i for i, name in enumerate(self.program.placeholders)}
        self._weights = [
            position[name]
            for name in self.program.placeholders
            if self.labels[name] == BindingTime.MODEL and any(name in s.inputs for s in self.program.stages)
        ]
        self._pick_weights = picker(self._weights)
        stages: list[StageCall] = []
        for place, stage in enumerate(self.program.stages):
            function = HoistedStage(stage.module, fast=self.context.fast, released=released)
            stages.append(StageCall.of(stage, function, position, place))
            position |= {name: len(position) + k for k, name in enumerate(stage.outputs)}
        # Both bodies exist from the start, so that switching between them compiles nothing.
        self._captured_body = self._body_call(self.program.body, position)
        eager_body = self.program.eager_body
        self._body = self._body_call(eager_body, position) if eager_body else self._captured_body
        keyed = sorted({i for call in stages for i in call.key_inputs})
        self._request_inputs = self._with_label(keyed, BindingTime.REQUEST)
        self._schedule_inputs = self._with_label(keyed, BindingTime.SCHEDULE)
        self._device_schedule = DeviceSchedule(self._loop)
        owner = ("inputs", self.number)  # Apart from the stages' values, which go when a weight changes.
        aligned = costs.inputs_of_products(gm)
        self._identities = {
            i: InputIdentity(
                self._held,
                owner,
                functools.partial(self._device_schedule.token, i) if i in self._schedule_inputs else None,
                aligned=self.program.placeholders[i] in aligned,
            )
            for i in keyed
        }
        self._table = Table(
            self.number, stages, self._held, self._identities, self._schedule_inputs,
            runs=self.stage_runs, note=self.context.note,
            forecast=Forecast(self._loop) if self.context.fast or released is not None else None,
        )  # fmt: skip
        self._weights_identity = WeightsIdentity() if released is None else WeightsIdentity(released.forget)
        bodies = (self.program.body, self.program.eager_body or self.program.body)
        kept = {position[name] for body in bodies for name in body.inputs}
        self._pick_releasable = picker([i for i in self._weights if i not in kept])
        self._released_arrival = -1
        self._generations = Generations(self._loop)
        self._observation.begin(
            dict.fromkeys(self._request_inputs, BindingTime.REQUEST) | dict.fromkeys(self._weights, BindingTime.MODEL),
            [i for i, name in enumerate(self.program.placeholders) if self._may_be_promoted(name)],
        )
        self._last_schedule: Hashable = None
        self._unchecked = True
        self._whole = True

    def _may_be_promoted(self, name: str) -> bool:
        return self.inputs[name].movable and self.labels[name] == BindingTime.STEP

    def _body_call(self, body: Stage, position: dict[str, int]) -> StageCall:
        return StageCall.of(body, compile_body(body, self._backend, self.context), position)

    def _with_label(self, inputs: Sequence[int], label: BindingTime) -> tuple[int, ...]:
        return tuple(i for i in inputs if self.labels[self.program.placeholders[i]] == label)

    def __call__(self, args: list[Any]) -> Any:
        """Outputs of the whole graph for these inputs."""
        with self._released.in_use() if self._released is not None else nullcontext():
            return self._run(list(args))

    def _run(self, values: list[Any]) -> Any:
        self.calls += 1
        # Held values are never written, so only finding and making them is serialised; bodies run in parallel.
        capturing = capture.is_capturing()
        with self._lock:
            if not self._whole:
                self._restage()
            tokens = self._look(values)
            self._table.extend(values, tokens, (self._weights_identity.epoch, _numerics()), capturing=capturing)
            self.stage_runs[BindingTime.STEP] += 1
            # Another thread's demotion may put a new body in its place.
            body = self._captured_body if capturing else self._body
        result = body.run(values)
        if self.calls == 1:
            self._returned(result, self._output_times)
        if self._released is not None and self._released_arrival != self._weights_identity.arrivals:
            with self._lock:
                self._release(values)
        return result

    def _release(self, values: list[Any]) -> None:
        """Let go of the weights that the body does not read; they have just been read, and are as they were."""
        assert self._released is not None
        try:
            if not self._released.release(self._pick_releasable(values)):
                return  # The next call may.
            log.info("graph %d: weights that the loop does not read left memory", self.number)
        except OSError as error:
            self._warn(f"weights stay in memory: {error}")
        self._released_arrival = self._weights_identity.arrivals
        self._weights_identity.moved(self._pick_weights(values))

    def _look(self, values: list[Any]) -> dict[int, Hashable]:
        """Tokens of the inputs that make keys; and what follows from them and from changed weights."""
        if any(isinstance(values[i], torch.Tensor) and reads_wait(values[i].device) for i in self._schedule_inputs):
            self._device_schedule.begin_call()
        tokens = {i: identity.token(values[i]) for i, identity in self._identities.items()}
        request = tuple(tokens[i] for i in self._request_inputs)
        schedule = tuple(tokens[i] for i in self._schedule_inputs)
        starts = self._generations.starts(request, schedule, self._position(values))
        self._unchecked |= starts  # A call that was stopped here leaves its check to the next.
        changed = self._weights_identity.check(self._pick_weights(values), deep=self._unchecked)
        self._unchecked = False
        if changed:
            log.debug("graph %d: %d weights are new or changed", self.number, len(changed))
            self._held.drop(self.number)
        moved = schedule != self._last_schedule or not self._schedule_inputs
        self._last_schedule = schedule
        weights = {self._weights[i] for i in changed}
        wrong = self._observation.look(values, tokens, weights, moved=moved, starts=starts)
        if wrong:
            self._relabel(wrong)
            return self._look(values)
        self._table.passed(tokens, starts=starts)
        return tokens

    def _position(self, values: list[Any]) -> float | None:
        """The timestep as a number, where it can be read without waiting; what is made of it says little."""
        for i in self._schedule_inputs:
            value = values[i]
            if isinstance(value, torch.Tensor) and value.numel() and not reads_wait(value.device):
                first = value.flatten()[:1]
                if value.numel() <= FEW or bool((value == first).all()):
                    return float(first.tolist()[0].real)
        return None

    def _relabel(self, labels: dict[int, BindingTime]) -> None:
        """Stage the graph anew, with labels that were found out."""
        self._whole = False
        for i, label in labels.items():
            node = self.program.placeholders[i]
            names = self.demoted if label > self.labels[node] else self.promoted
            names.append(self.inputs[node].name)
            log.info("graph %d: %s is %s, not %s", self.number, names[-1], label.label, self.labels[node].label)
            self.labels[node] = label
        self._restage()

    def _restage(self) -> None:
        self._drop_held()
        self._build()
        self._log_program("staged anew")

    def _drop_held(self) -> None:
        self._held.drop(self.number)
        self._held.drop(("inputs", self.number))

    def drop(self) -> None:
        """Free all that is held."""
        with self._lock:
            self.forget_inputs()
            self._drop_held()

    def forget_inputs(self) -> None:
        """Let go of the inputs that were kept to know them again."""
        with self._lock:
            for identity in self._identities.values():
                identity.forget()

    @property
    def host_reads(self) -> int:
        """How often a schedule input had to be read from an accelerator."""
        return self._device_schedule.host_reads
