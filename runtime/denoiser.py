"""``compile_denoiser``: one module, compiled in place, and the way back."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo import config as dynamo_config
from torch._dynamo import eval_frame
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.decorators import error_on_graph_break
from torch._dynamo.exc import TorchDynamoException
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.jit._trace import is_tracing as is_jit_tracing
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from ..models.families import argument_labels
from ..models.padding import PADDING
from . import env
from .backend import forward_arguments, make_backend
from .env import log
from .hooks import WeightHooks
from .loop import Loop
from .own_code import with_own_code
from .settings import Backend, Numerics, Settings, parse_labels, suggest_arguments
from .state import DOCTOR, DenoiserState
from .trim import Trim

DYNAMO_CONFIG = {
    # Boolean indices give data-dependent shapes, which canonicalisation makes static.
    "capture_dynamic_output_shape_ops": True,
    # Two prompt lengths, a few sizes, and LoRA loaded, fused, disabled: eight are soon used up.
    "recompile_limit": 32,
}
if hasattr(dynamo_config, "invalidate_compile_context_weakrefs"):
    # Quantised weights move by ``swap_tensors``, which refuses what a weak reference points to.
    DYNAMO_CONFIG["invalidate_compile_context_weakrefs"] = True

_AS_AT_FIRST = FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT)


class DynamoOptions:
    """Dynamo's options around our own calls.

    One patch serves all calls where it can be entered twice (torch 2.13): each new one leaves an entry in the context.
    """

    def __init__(self, *, guard_hooks: bool, **changes: Any) -> None:
        self._changes = DYNAMO_CONFIG | {"skip_nnmodule_hook_guards": not guard_hooks} | changes
        self._patch: AbstractContextManager[Any] = dynamo_config.patch(self._changes)
        self._reentrant = isinstance(getattr(self._patch, "_prior", None), ContextVar)

    def __call__(self) -> AbstractContextManager[Any]:
        if self._reentrant:
            return self._patch
        fresh: AbstractContextManager[Any] = dynamo_config.patch(self._changes)
        return fresh


_OPTIONS = DynamoOptions(guard_hooks=False)
_OPTIONS_WITH_HOOKS = DynamoOptions(guard_hooks=True)


def compile_for(state: DenoiserState, function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` of a copy of ``function`` for our back end."""
    return torch.compile(with_own_code(function), backend=make_backend(state), dynamic=state.settings.dynamic)


class Compiled:
    """Something Dynamo compiled for our back end, and what to do when that fails."""

    def __init__(self, state: DenoiserState) -> None:
        self.state = state
        self._broken = False
        self._may_be_whole: bool | None = None  # Not before a call has been captured.
        self._compiled = self._compile()

    @property
    def title(self) -> str:
        """What was compiled, for people."""
        raise NotImplementedError

    def weights(self) -> list[torch.Tensor]:
        """Tensors whose release is counted."""
        return []

    def remove(self) -> None:
        """Undo the compilation and free what is held."""
        raise NotImplementedError

    def _compile(self) -> Callable[..., Any]:
        """A capture to come, which knows of no other."""
        raise NotImplementedError

    def _run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call what was compiled, or ``original`` where Dynamo cannot."""
        ran = self.state.graph_calls
        try:
            result = self._run_captured(original, *args, **kwargs)
        except Exception:
            if self.state.graph_calls == ran:  # Dynamo gives up a function that raises while it is traced.
                set_code_exec_strategy(inspect.unwrap(self._compiled).__code__, _AS_AT_FIRST)
            raise
        if self.state.graph_calls == ran and not self._broken and eval_frame._stance.stance == "default":
            limit = DYNAMO_CONFIG["recompile_limit"]
            why = "TORCH_LOGS=graph_breaks,recompiles says why"
            if self.state.captured >= limit:
                why = f"{limit} captures are the limit; restore it and compile it again to begin anew"
            self.state.fall_back(f"Dynamo compiled nothing for a call; {why}")
        return result

    def _run_captured(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ran = self.state.graph_calls
        self.state.origins.begin_call()
        try:
            if self._may_be_whole and eval_frame._stance.stance == "default":
                self._may_be_whole = False
                try:
                    return self._run_whole(*args, **kwargs)
                except TorchDynamoException:  # It breaks again, so what there is goes on.
                    if self.state.graph_calls > ran:
                        raise
            result = self._compiled(*args, **kwargs)
            if self._may_be_whole is None and self.state.graph_calls > ran:
                self._may_be_whole = self.state.graph_breaks > 0
        except TorchDynamoException as error:
            if self.state.graph_calls > ran:  # Part of the call has been made; making it again would do that twice.
                self._broken = True
                reason = f"capture failed behind a graph break: {type(error).__name__}: {error}"
                self.state.fall_back(f"{reason}; make the call again, it will run untouched", error)
                raise
            # An error of the model's own is raised again here, in its own words.
            result = original(*args, **kwargs)
            self._broken = True
            self.state.fall_back(f"capture failed: {type(error).__name__}: {error}; {DOCTOR}", error)
        return result

    def _run_whole(self, *args: Any, **kwargs: Any) -> Any:
        """Capture the second call anew, and run that, because the first one broke.

        The first call of some models makes what later calls find, rotary tables mostly, in ways that Dynamo cannot
        follow. A model that breaks for another reason is traced up to there once more, no further.

        Raises:
            TorchDynamoException: it breaks again; nothing has run.
        """
        earlier, compiled = self.state.captures(), self._compile()
        # What is to happen at a break holds for all threads, so no other may compile meanwhile.
        with compile_lock, error_on_graph_break(True):
            result = compiled(*args, **kwargs)
        self._compiled = compiled
        self.state.replace(earlier)
        log.info("%s: captured whole, where the first call broke", self.state.name)
        return result

    def _may_run(self) -> bool:
        if self._broken or env.disabled() or _is_being_traced():
            return False
        if torch.is_grad_enabled():
            self.state.fall_back("gradients are enabled; call it under torch.no_grad()")
            return False
        return True


class CompiledDenoiser(Compiled):
    """What a compiled module calls instead of ``_call_impl`` (as ``nn.Module.compile`` arranges it).

    The module itself stays in place, so ``config``, ``dtype``, saving and LoRA loading go on working, and
    copying or pickling it leaves this object behind.
    """

    def __init__(self, module: torch.nn.Module, state: DenoiserState) -> None:
        self.module = module
        super().__init__(state)
        self.previous: Callable[..., Any] | None = None
        self._had_previous = False
        # Where a graph broke, Dynamo keeps compiled code, and with it our state, for as long as the class lives.
        weakref.finalize(module, state.close)
        self._handles = -1
        self._weight_hooks = WeightHooks(module)
        self._options = _OPTIONS

    @property
    def title(self) -> str:
        """The module's class."""
        return type(self.module).__name__

    def weights(self) -> list[torch.Tensor]:
        """The module's parameters and buffers; of those of a tensor subclass (quantised ones) the tensors within."""
        return [t for w in (*self.module.parameters(), *self.module.buffers()) for t in _plain_tensors(w)]

    def _compile(self) -> Callable[..., Any]:
        return compile_for(self.state, _caller(self.module))

    def _look_for_hooks(self) -> None:
        """Guard on hooks only once there are any: checking at every call that every submodule has none takes long."""
        self._handles = RemovableHandle.next_id
        if self.state.trim is not None:
            self.state.trim.look_at(self.module)
        hooked = any(m._forward_hooks or m._forward_pre_hooks for m in self.module.modules())
        if hooked and self._options is _OPTIONS:
            self._options = _OPTIONS_WITH_HOOKS
            self._compiled = self._compile()

    def install(self) -> None:
        """Make the module call this object."""
        self._had_previous = "_compiled_call_impl" in vars(self.module)
        self.previous = self.module._compiled_call_impl
        self.module._compiled_call_impl = self

    def remove(self) -> None:
        """Leave the module as it was before :meth:`install` and free what is held."""
        # The module last, so that an interrupted removal can be repeated.
        self.state.released.restore(self.weights())
        self.state.held.clear()
        if self._had_previous:
            self.module._compiled_call_impl = self.previous
        else:
            del self.module._compiled_call_impl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._applies():
            return self.module._call_impl(*args, **kwargs)
        if RemovableHandle.next_id != self._handles:  # Somebody registered a hook somewhere.
            self._look_for_hooks()
        trim = self.state.trim
        given, finish = ((args, kwargs), None) if trim is None else trim(args, kwargs)
        captured = self.state.captured
        result = self._run_compiled(*given[0], **given[1])
        if self.state.captured == captured:
            return result if finish is None else finish(result)
        self._weight_hooks.refresh()  # Another graph, maybe because a submodule is another.
        if trim is not None:
            trim.look_at(self.module)
            if finish is not None and trim.untrusted:
                return self._run_compiled(*args, **kwargs)
        return result if finish is None else finish(result)

    def _run_compiled(self, *args: Any, **kwargs: Any) -> Any:
        with self._options():
            return self._run(self.module._call_impl, *args, **kwargs)

    def _applies(self) -> bool:
        if not self._may_run():
            return False
        if _has_any_global_hook():
            self.state.fall_back("a global module hook is registered, which compiled code would not call; remove it")
            return False
        if self.module.training:
            self.state.fall_back("it is in training mode; call .eval() on it")
            return False
        reason = self._weight_hooks.reason()
        if reason is not None:
            self.state.fall_back(reason)
            return False
        return True


def _caller(self: torch.nn.Module) -> Callable[..., Any]:
    """A function that calls the module, which Dynamo then knows by the name it has in its own methods."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return self._call_impl(*args, **kwargs)

    return call


def _plain_tensors(weight: torch.Tensor) -> list[torch.Tensor]:
    flatten = getattr(weight, "__tensor_flatten__", None)
    names, _ = flatten() if flatten is not None else ((), None)
    if not names:
        return [weight]
    return [t for name in names for t in _plain_tensors(getattr(weight, name))]


def _is_being_traced() -> bool:
    """Whether somebody traces the model right now and wants its operations, not ours."""
    return is_jit_tracing() or get_proxy_mode() is not None


def compiled_denoiser(module: object) -> CompiledDenoiser | None:
    """The wrapper of a compiled module, or ``None``."""
    wrapper = getattr(module, "_compiled_call_impl", None)
    return wrapper if isinstance(wrapper, CompiledDenoiser) else None


def prepare_denoiser(
    module: torch.nn.Module,
    name: str,
    settings: Settings,
    labels: dict[str, str] | None = None,
    loop: Loop | None = None,
) -> CompiledDenoiser:
    """Check everything about ``module`` and make its wrapper, without touching the module.

    ``loop`` says what is known of the loop around the module.

    Raises:
        TypeError: ``module`` is no ``nn.Module``.
        ValueError: it was compiled by ``torch.compile`` or ``torch.jit``, has parameters without a shape, ``labels``
            name what does not exist, or weights that are to be released cannot be.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    if isinstance(module, torch._dynamo.OptimizedModule):
        raise ValueError(f"{name} was wrapped by torch.compile; pass the original module (its ._orig_mod)")
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(f"{name} was compiled by torch.jit; pass the module it was made from")
    if any(map(is_lazy, module.parameters())):
        raise ValueError(f"{name} has parameters without a shape; call it once before it is compiled")
    aside = WeightHooks(module).reason() if settings.release_weights else None
    if aside is not None:
        raise ValueError(f"release_weights={settings.release_weights!r} cannot be had for {name}: {aside}")
    settings.check_release(name, {p.device.type for p in module.parameters()})
    arguments = forward_arguments(module)
    chosen = argument_labels(type(module).__name__, arguments, parse_labels(labels, arguments))
    weight_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    paddings = PADDING.get(type(module).__name__) if settings.numerics == "fast" else None
    trim = Trim(paddings, arguments) if paddings else None
    state = DenoiserState(name, settings, chosen, arguments, weight_bytes, loop, labels or (), trim)
    return CompiledDenoiser(module, state)


@suggest_arguments
def compile_denoiser(
    module: torch.nn.Module,
    labels: dict[str, str] | None = None,
    *,
    backend: Backend = "inductor",
    numerics: Numerics = "exact",
    dynamic: bool | None = None,
    strict: bool = False,
    release_weights: bool | str = False,
    max_cached_bytes: int | None = None,
) -> torch.nn.Module:
    """Compile a denoiser in place, for a loop of your own.

    Args:
        module: called once a step under ``torch.no_grad()`` or ``torch.inference_mode()``, in ``eval`` mode.
        labels: when each argument of ``forward`` changes, by name: ``"model"``, ``"request"``, ``"schedule"``
            or ``"step"``. Arguments left out follow the family's labels or the default rule. A wrong label
            costs speed, never a number.
        backend: compiles the stages: ``"inductor"``, ``"eager"`` (same bits as the untouched module) or
            anything else ``torch.compile`` accepts.
        numerics: ``"exact"``, or ``"fast"``: all rows of a schedule are made as one batch, so that modulation weights
            are read once a picture instead of once a step, and padding of prompts is skipped; last bits may differ.
        dynamic: as in ``torch.compile``.
        strict: raise where the default falls back to the untouched module with a warning.
        release_weights: let weights that the loop does not read leave memory after the first call, and stay readable:
            from a CPU to the ``"disk"``, a file mapped where they were (on Linux); from a CUDA device to the
            ``"cpu"``, memory that the device can read; ``True`` is whichever applies. :func:`restore` brings them
            back.
        max_cached_bytes: bound on held values; ``None`` is a quarter of the weights, at least 256 MiB.

    Returns:
        ``module`` itself. Calling this again with the same options changes nothing.

    Raises:
        TypeError: ``module`` is no module, or ``backend`` neither a name nor a callable.
        ValueError: an option or label that does not exist; the message names the close ones.
    """
    settings = Settings(backend, numerics, dynamic, strict, release_weights, max_cached_bytes)
    replace_denoisers([prepare_denoiser(module, type(module).__name__, settings, labels)])
    return module


def replace_denoisers(wrappers: list[CompiledDenoiser]) -> None:
    """Install wrappers, each in the place of an earlier one of ours; keep an equal earlier one."""
    for wrapper in wrappers:
        earlier = compiled_denoiser(wrapper.module)
        if earlier is not None:
            same = earlier.state.settings == wrapper.state.settings
            if same and earlier.state.labels == wrapper.state.labels:
                earlier.state.loop.join(wrapper.state.loop)
                continue
            earlier.remove()
        wrapper.install()
