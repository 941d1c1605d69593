"""Modules and tensors that take no memory, and the graph of a call on them: what a model would compile to, without it.

A hollow tensor is a CPU tensor whose storage is empty. Dynamo and AOTAutograd ask a tensor for its metadata alone, so
they capture what they would capture of the real one; only running it is out of the question, and nothing here does.
(On meta tensors they would not: attention, for one, picks its kernel by device.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from ..models.families import argument_labels
from ..models.small.common import set_dtype
from . import env
from .backend import CapturedInput, capturing_backend, forward_arguments, graph_inputs
from .denoiser import DYNAMO_CONFIG
from .own_code import with_own_code
from .settings import Settings
from .staged import GraphInput
from .state import DenoiserState


class _Captured(Exception):
    """Ends a compilation when there is a graph: it is not to run."""


def hollow_module(build: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """The module ``build`` makes, hollow, in eval mode; what its checkpoint holds is in ``dtype``.

    Parts that the class keeps in float32 when a checkpoint loads stay so.
    """
    with torch.device("meta"):
        module = build().eval()
    set_dtype(module, dtype, keep=getattr(module, "_keep_in_fp32_modules", None) or ())
    module._apply(_hollow)
    for part in module.modules():
        for name, value in vars(part).items():  # Tables that are no buffers.
            if isinstance(value, torch.Tensor):
                setattr(part, name, _hollow(value))
    return module


def hollow_call(make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The arguments that ``make`` makes, their tensors hollow.

    Raises:
        RuntimeError: they cannot be made at this size, or not without the values of tensors.
    """
    try:
        with FakeTensorMode():
            call = dict(make())
    except (RuntimeError, ValueError, DynamicOutputShapeException) as error:
        raise RuntimeError(f"the arguments of a call cannot be made: {error}") from error
    hollow: dict[str, Any] = tree_map_only(FakeTensor, _hollow, call)
    return hollow


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    hollow = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    hollow.untyped_storage().resize_(0)
    return hollow


def _forward(self: nn.Module, /, **kwargs: Any) -> Any:
    # An eager run would read memory that is not there; the names are those by which inputs are recognised.
    if not torch.compiler.is_compiling():
        raise RuntimeError(
            "torch.compile is switched off, so nothing can be captured; unset TORCHDYNAMO_DISABLE and the like"
        )
    return self(**kwargs)


def capture(module: nn.Module, call: Mapping[str, Any], family: str) -> tuple[fx.GraphModule, list[GraphInput]]:
    """AOTAutograd's inference graph of ``module(**call)``, both hollow, and its labelled inputs.

    Args:
        module: in eval mode.
        call: arguments by name.
        family: class name under which :mod:`dithoist.models.families` knows the module.

    Raises:
        RuntimeError: the call does not become one graph; the message has Dynamo's reason.
    """
    if env.disabled():  # The back end would run the graph as it is, and there is no memory behind it.
        raise RuntimeError("DITHOIST_DISABLE is set, so nothing can be captured; unset it")
    arguments = forward_arguments(module)
    labels = argument_labels(family, arguments, {})
    state = DenoiserState(type(module).__name__, Settings("eager"), labels, arguments)
    found: list[tuple[fx.GraphModule, list[CapturedInput]]] = []

    def keep(aot: fx.GraphModule, captured: list[CapturedInput]) -> Any:
        found.append((aot, captured))
        raise _Captured

    options = {**DYNAMO_CONFIG, "suppress_errors": False, "disable": False}
    backend = capturing_backend(state, keep)
    compiled = torch.compile(with_own_code(_forward), backend=backend, fullgraph=True, dynamic=False)
    try:
        with torch.no_grad(), torch.compiler.set_stance("default"), dynamo_config.patch(options):
            compiled(module, **call)
    except BackendCompilerFailed as error:
        if not found:
            raise RuntimeError(f"{state.name} was not captured: {error}") from error
    except TorchDynamoException as error:
        raise RuntimeError(f"{state.name} does not become one graph: {error}") from error
    aot, captured = found[0]
    return aot, graph_inputs(aot, captured)
