"""Our back end for ``torch.compile``: Dynamo's graph, through AOTAutograd, into a staged graph.

``torch.compile(model, backend="dithoist")`` finds :func:`dithoist_backend` by entry point and uses the default
labels. :func:`dithoist.compile_denoiser` makes one back end for each denoiser with :func:`make_backend`.
"""

from __future__ import annotations

import inspect
import itertools
import re
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, SubclassGetAttrAOTInput

from ..models.families import default_label
from ..passes import BindingTime, PassContext
from . import env
from .device_schedule import ScheduleMismatch
from .env import log
from .floats import keep_floats_beside_alpha
from .settings import Settings
from .staged import GraphInput, StagedGraph
from .state import DOCTOR, DenoiserState

_ARGUMENT = re.compile(r"L\['(?P<local>\w+)'\](?:\[(?:'(?P<key>\w+)'|(?P<index>\d+))\])?")
# A hook around the whole module, where Dynamo breaks the graph, hands its arguments on as a pair ``(args, kwargs)``.
_HANDED_ON = re.compile(r"^L\['___stack\d+'\]\[1\]\['(?P<key>\w+)'\]")
OUT_OF_MEMORY = (
    "memory ran out, so what was held between calls was freed and half of it at most will be again; the result is "
    "right; max_cached_bytes=... is a bound of your own"
)
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Any]
CapturedInput = tuple[str, BindingTime]
"""Name for people and label of one of Dynamo's inputs."""

_dump_numbers = itertools.count(1)


def dithoist_backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
    """Entry point for ``torch.compile(model, backend="dithoist", options={...})``.

    ``options`` are those of :class:`dithoist.runtime.settings.Settings`, such as ``{"backend": "eager"}``.
    """
    settings = Settings(**options.get("options") or {})
    return make_backend(DenoiserState("torch.compile", settings))(gm, example_inputs)


def make_backend(state: DenoiserState) -> Compiler:
    """A back end that keeps what it compiled in ``state``."""
    return capturing_backend(state, lambda aot, captured: _compile(aot, captured, state))


def capturing_backend(
    state: DenoiserState, compile_graph: Callable[[fx.GraphModule, list[CapturedInput]], Any]
) -> Compiler:
    """A back end that gives AOTAutograd's inference graph and Dynamo's labelled inputs to ``compile_graph``."""

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        if env.disabled():
            return gm.forward
        keep_floats_beside_alpha(gm)
        placeholders = gm.graph.find_nodes(op="placeholder")
        inputs = zip(placeholders, example_inputs, strict=True)
        captured = [_captured_input(node, value, state) for node, value in inputs]

        def compile_inference(aot: fx.GraphModule, _: Sequence[Any]) -> Any:
            return compile_graph(aot, captured)

        def compile_training(aot: fx.GraphModule, _: Sequence[Any]) -> Any:
            state.fall_back("gradients are enabled; call it under torch.no_grad(), and let it not enable them itself")
            return make_boxed_func(aot.forward)

        run = aot_autograd(fw_compiler=compile_training, inference_compiler=compile_inference)
        return run(gm, example_inputs)

    return backend


def _captured_input(node: fx.Node, passed: Any, state: DenoiserState) -> CapturedInput:
    """Name for people and label of a placeholder of Dynamo's graph, for which the first call has ``passed`` a value."""
    value = node.meta.get("example_value", node.meta.get("val"))
    grapharg = node.meta.get("grapharg")
    source = getattr(grapharg, "source", None)
    name = getattr(source, "name", node.name)
    name = name() if callable(name) else str(name)
    match = _ARGUMENT.match(name)
    of_a_module = re.search(r"\b(_parameters|_buffers|_modules)\b", name) is not None
    number = isinstance(value, (torch.SymInt, int))
    if match is None or match["local"] == "self" or of_a_module:  # Attributes of the model and globals.
        # A number (LoRA's scale, say) is a new tensor at each call: only its bits tell whether it is the one it was.
        changes = number or getattr(grapharg, "pass_arg_as_tensor", False)
        return module_path(name), BindingTime.REQUEST if changes else BindingTime.MODEL
    argument = match["local"]
    handed_on = _HANDED_ON.search(name)
    if handed_on and handed_on["key"] in state.arguments:
        argument = handed_on["key"]
    elif match["key"] and argument not in state.labels:  # ``**kwargs``, whatever it is called.
        argument = match["key"]
    elif argument == "args" and match["index"]:
        position = int(match["index"])
        argument = state.arguments[position] if position < len(state.arguments) else argument
    origin = state.origins.label(passed)
    if origin is not None and argument not in state.chosen:
        return name if argument.startswith("___") else argument, origin
    if argument.startswith("___"):  # A value on Dynamo's stack after a graph break: made by the model itself.
        return name, BindingTime.REQUEST if number else BindingTime.STEP
    label = state.labels.get(argument, default_label(argument))
    if number:  # Of the schedule, such as the step's index; or a size, which is no value of what it is the size of.
        passed = match.end() == len(name) and label == BindingTime.SCHEDULE
        return argument, BindingTime.SCHEDULE if passed else BindingTime.REQUEST
    # An argument is no weight: only its bits tell whether it is the one it was.
    return argument, BindingTime.REQUEST if label == BindingTime.MODEL else label


def module_path(source: str) -> str:
    """``transformer_blocks.0.norm1.linear.weight`` from Dynamo's source of a parameter or module."""
    parts = re.findall(r"\['([^']+)'\]|\.(?!_modules|_parameters|_buffers|__dict__)(\w+)", source)
    names = [a or b for a, b in parts if (a or b) not in ("self", "_modules", "_parameters", "_buffers")]
    return ".".join(names) or source


def _compile(aot: fx.GraphModule, captured: list[CapturedInput], state: DenoiserState) -> Any:
    """AOTAutograd's inference graph, staged; or as it is, if our compiler fails."""
    try:
        inputs = graph_inputs(aot, captured, state.chosen)
        staged = StagedGraph(
            aot,
            inputs,
            state.settings.resolve_backend(),
            state.held,
            context=lambda labels: PassContext(
                labels,
                in_place=state.settings.backend == "eager",
                compiles=state.settings.backend == "inductor",
                fast=state.settings.numerics == "fast",
                max_held_bytes=state.held.max_bytes,
                verify=env.verify(),
                dump=_dumper(state),
            ),
            loop=state.loop,
            released=state.released if state.settings.release_weights else None,
            warn=state.warn,
            returned=state.origins.note,
        )
    except Exception as error:
        state.fall_back(f"a graph could not be staged: {type(error).__name__}: {error}; {DOCTOR}", error)
        return _Guarded(None, aot, state)
    state.add_graph(staged)
    return _Guarded(staged, aot, state)


def graph_inputs(aot: fx.GraphModule, captured: list[CapturedInput], chosen: Collection[str] = ()) -> list[GraphInput]:
    """The placeholders of AOTAutograd's graph, which get the names of what they stand for.

    ``chosen`` are arguments whose label the user gave, which no observation promotes.
    """
    inputs = [_graph_input(node, captured, chosen) for node in aot.graph.find_nodes(op="placeholder")]
    _pin_written_weights(aot, inputs)
    return inputs


def _graph_input(node: fx.Node, captured: list[CapturedInput], chosen: Collection[str]) -> GraphInput:
    """AOTAutograd says which of Dynamo's inputs each of its own is; what it made itself is ``STEP``."""
    index, attributes = _captured_index(node.meta.get("desc"))
    if index is None or index >= len(captured):
        return GraphInput(node.name, node.name, BindingTime.STEP)
    name, label = captured[index]
    name = ".".join((name, *attributes))
    node._rename(name)  # Dumps and reports then speak of hidden_states rather than arg0_1.
    return GraphInput(node.name, name, label, movable=label == BindingTime.STEP and name not in chosen)


def _captured_index(desc: object) -> tuple[int | None, tuple[str, ...]]:
    """Which of Dynamo's inputs an input of AOTAutograd's is, and which part of it if that is a tensor subclass."""
    if isinstance(desc, SubclassGetAttrAOTInput):
        index, attributes = _captured_index(desc.base)
        return index, (*attributes, desc.attr)
    return (desc.idx if isinstance(desc, PlainAOTInput) else None), ()


def _pin_written_weights(aot: fx.GraphModule, inputs: list[GraphInput]) -> None:
    """A buffer the model writes at each call (a step counter, say) is known only at the step."""
    (output,) = aot.graph.find_nodes(op="output")
    written = set()
    for desc in output.meta.get("desc", ()):
        index, _ = _captured_index(getattr(desc, "mutated_input", None))
        if index is not None:
            written.add(index)
    for position, node in enumerate(aot.graph.find_nodes(op="placeholder")):
        if _captured_index(node.meta.get("desc"))[0] in written and inputs[position].label == BindingTime.MODEL:
            inputs[position] = GraphInput(node.name, inputs[position].name, BindingTime.STEP)


class _Guarded:
    """Runs a staged graph; without one, or once our run time has failed, the graph as it was captured.

    Where memory ran out the next call is staged again, with less held.
    The graph is functional and AOTAutograd writes inputs back only afterwards, so running it again is safe.
    """

    _boxed_call = True

    def __init__(self, staged: StagedGraph | None, aot: fx.GraphModule, state: DenoiserState) -> None:
        self._staged = staged
        self._aot = aot
        self._state = state

    def __call__(self, args: list[Any]) -> Any:
        self._state.count_graph_call()
        if self._staged is None:
            return self._aot.forward(*args)
        random_state = torch.get_rng_state() if self._staged.draws else None
        try:
            return self._staged(args)
        except ScheduleMismatch:  # Of earlier steps: running this one as it was would not mend them.
            raise
        except Exception as error:
            if random_state is not None:
                torch.set_rng_state(random_state)
            return self._as_captured(args, error)

    def _as_captured(self, args: list[Any], error: Exception) -> Any:
        out_of_memory = _is_out_of_memory(error)
        if out_of_memory:
            traceback.clear_frames(error.__traceback__)  # What they were making goes with them.
            self._state.held.shrink()
        # What the model itself raises is raised again here, and the staged graph stays.
        result = self._aot.forward(*args)
        if out_of_memory:
            self._state.warn(OUT_OF_MEMORY, error=error)
        else:
            self._staged = None
            self._state.fall_back(f"a staged graph failed: {type(error).__name__}: {error}; {DOCTOR}", error)
        return result


def _is_out_of_memory(error: Exception) -> bool:
    of_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return of_cpu or isinstance(error, MemoryError | torch.OutOfMemoryError)


def _dumper(state: DenoiserState) -> Callable[[str, fx.GraphModule], None] | None:
    folder = env.dump_dir()
    if folder is None:
        return None

    def dump(title: str, gm: fx.GraphModule) -> None:
        gm.recompile()
        text = gm.print_readable(print_output=False, include_stride=True, include_device=True)
        number = next(_dump_numbers)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number:04}_{state.name}_{title}.py").write_text(text)
        except OSError as error:
            log.warning("DITHOIST_DUMP must name a folder that can be written: %s", error)

    return dump


def forward_arguments(module: torch.nn.Module) -> list[str]:
    """Names of the arguments ``module.forward`` takes, without ``self`` and ``**kwargs``."""
    return function_arguments(type(module).forward)[1:]


def function_arguments(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments a function takes, without ``*args`` and ``**kwargs``."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind not in kinds]
