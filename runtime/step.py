"""``compile_step``: a whole step of a loop of your own, as a function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._dynamo.eval_frame import skip_code
from torch.compiler import config as compiler_config
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from ..models.families import argument_labels
from ..passes import BindingTime
from .backend import function_arguments
from .denoiser import Compiled, DynamoOptions, compile_for
from .env import log
from .settings import Backend, Numerics, Settings, parse_labels, suggest_arguments
from .state import DenoiserState

# A number the host reads (a schedule value's ``.item()``) then becomes part of the graph, and leaves the loop with it.
_OPTIONS = DynamoOptions(guard_hooks=True, capture_scalar_outputs=True)
_OPTIONS_WITH_HOST_READS = DynamoOptions(guard_hooks=True)


class _NumbersAsIndices(TorchFunctionMode):
    """``x[i]`` for a tensor ``i`` of no dimensions, said so that Dynamo does not take the number for a constant."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            x, index = args
            if isinstance(index, torch.Tensor) and index.ndim == 0 and index.dtype in (torch.int64, torch.int32):
                return x.select(0, index.item())
        return func(*args, **(kwargs or {}))


# Traced as part of a step it is understood. Where Dynamo gives a step up, it must not be compiled for itself: nothing
# then guards which function it was called for, and one's graph would serve another.
skip_code(_NumbersAsIndices.__torch_function__.__code__)


class CompiledStep(Compiled):
    """A step function that does less work; called like it."""

    def __init__(self, function: Callable[..., Any], arguments: list[str], state: DenoiserState) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._arguments = arguments
        self._needs_numbers = False
        self._options = _OPTIONS
        super().__init__(state)

    @property
    def title(self) -> str:
        """The function's name."""
        return getattr(self._function, "__qualname__", type(self._function).__name__)

    def _compile(self) -> Callable[..., Any]:
        function = self._function

        def step(*args: Any, **kwargs: Any) -> Any:
            with _NumbersAsIndices():
                return function(*args, **kwargs)

        return compile_for(self.state, step)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are of the function that was compiled, as those of a compiled module are of the module."""
        return _itself, (self._function,)

    def remove(self) -> None:
        """Call the function itself from now on, and free what is held."""
        self._broken = True
        self.state.held.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        numbers = self._numbers(args, kwargs)
        # Dynamo takes an unknown number for one that is not negative.
        if not self._may_run() or any(value < 0 for value in numbers.values()):
            return self._function(*args, **kwargs)
        ran = self.state.graph_calls
        try:
            with self._options(), _unknown("" if self._needs_numbers else ",".join(numbers)):
                return self._run(self._function, *args, **kwargs)
        except (GuardOnDataDependentSymNode, AssertionError, IndexError) as error:
            has_run = self.state.graph_calls > ran
            if numbers and not self._needs_numbers and not has_run:
                return self._run_with_numbers(error, *args, **kwargs)
            if not isinstance(error, GuardOnDataDependentSymNode) or self._options is _OPTIONS_WITH_HOST_READS:
                raise
            log.info("%s: the host reads a number that it decides by: %s", self.state.name, error)
            self._options = _OPTIONS_WITH_HOST_READS
            if has_run:  # Making the call again would do that part twice.
                raise
            return self(*args, **kwargs)
        except RuntimeError as error:
            # An index out of range, say, of which the function speaks in its own words.
            if "Runtime assertion failed" not in str(error):
                raise
            return self._function(*args, **kwargs)

    def _run_with_numbers(self, error: Exception, *args: Any, **kwargs: Any) -> Any:
        """Where the function asks more than can be said of a number that is not known (which element of a list it
        names, say), a graph for each number; an error of the function's own is raised again here."""
        self._needs_numbers = True
        try:
            result = self(*args, **kwargs)
        except Exception:
            self._needs_numbers = False
            raise
        log.info("%s: a whole number of the schedule needs a graph for each value: %s", self.state.name, error)
        return result

    def _numbers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int]:
        """Arguments that are whole numbers of the schedule, such as the step's index, as Dynamo names them."""
        found = {f"L['kwargs']['{name}']": v for name, v in kwargs.items() if self._is_number(name, v)}
        passed = enumerate(zip(self._arguments, args, strict=False))
        return found | {f"L['args'][{k}]": v for k, (name, v) in passed if self._is_number(name, v)}

    def _is_number(self, name: str, value: Any) -> bool:
        return type(value) is int and self.state.labels.get(name) == BindingTime.SCHEDULE


def _itself(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _unknown(sources: str) -> AbstractContextManager[Any]:
    """Let Dynamo take these numbers as unknown from the first call on, so that none has a graph of its own."""
    patch: AbstractContextManager[Any] = compiler_config.patch(unbacked_sources=sources)  # type: ignore[attr-defined]
    return patch


@suggest_arguments
def compile_step(
    step_fn: Callable[..., Any],
    labels: dict[str, str] | None = None,
    *,
    backend: Backend = "inductor",
    numerics: Numerics = "exact",
    dynamic: bool | None = None,
    strict: bool = False,
    max_cached_bytes: int | None = None,
) -> CompiledStep:
    """Compile a step of your own loop: denoiser calls, guidance, scheduler arithmetic, whatever it builds on the way.

    Schedule values and their differences, masks and their metadata that the function makes at each step leave the loop
    by themselves, host reads (``.item()``, ``nonzero``) with them.

    Args:
        step_fn: called once a step under ``torch.no_grad()`` or ``torch.inference_mode()``. The modules it calls are in
            ``eval`` mode. It may be passed the step's index as a whole number: that costs no graph of its own.
        labels: when each argument changes, by name: ``"model"``, ``"request"``, ``"schedule"`` or ``"step"``. The
            others follow a rule on their names. A wrong label costs speed, never a number.
        backend: compiles what is left in the loop: ``"inductor"``, ``"eager"`` (same bits as ``step_fn``) or anything
            else ``torch.compile`` accepts.
        numerics: as for :func:`compile_denoiser`.
        dynamic: as in ``torch.compile``.
        strict: raise where the default falls back to ``step_fn`` with a warning.
        max_cached_bytes: bound on held values; ``None`` is 256 MiB.

    Returns:
        A function like ``step_fn``, for :func:`report` and :func:`restore` too. ``step_fn`` is as it was.

    Raises:
        TypeError: ``step_fn`` cannot be called, or is a module (:func:`compile_denoiser` is for those).
        ValueError: an option or label that does not exist; the message names the close ones.
    """
    if isinstance(step_fn, torch.nn.Module):
        raise TypeError("step_fn is a module; use compile_denoiser(module) for a loop that calls it")
    if not callable(step_fn):
        raise TypeError(f"step_fn must be a function, not {type(step_fn).__name__}")
    settings = Settings(backend, numerics, dynamic, strict, False, max_cached_bytes)
    arguments = function_arguments(step_fn)
    chosen = argument_labels("", arguments, parse_labels(labels, arguments))
    name = getattr(step_fn, "__name__", "step")
    return CompiledStep(step_fn, arguments, DenoiserState(name, settings, chosen, arguments, chosen=labels or ()))
