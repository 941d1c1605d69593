"""Whether a CUDA graph is being captured: the state that decides which body of a denoiser runs.

While a graph is captured the host must not read the device and every shape must be static, so the functional body
runs; otherwise the one lowered to writes in place (:mod:`dithoist.passes.masked_fill`). Engines that capture a
forward in segments (*breakable* CUDA graphs) run parts of it eagerly between replays; they say so here:

    with breakable_cuda_graph():
        transformer(...)            # the body for capture
        with breakable_cuda_graph(False):
            transformer(...)        # an eager segment between replays

The state is a context variable: each thread and each asyncio task has its own, and it is what it was when the
block ends, also by an exception.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_in_breakable_cuda_graph: ContextVar[bool] = ContextVar("in_breakable_cuda_graph", default=False)


def is_in_breakable_cuda_graph() -> bool:
    """Whether the innermost :func:`breakable_cuda_graph` around us says that a graph is captured."""
    return _in_breakable_cuda_graph.get()


@contextmanager
def breakable_cuda_graph(active: bool = True) -> Iterator[None]:
    """Declare that a CUDA graph is captured inside the block (or, with ``active=False``, that it is not).

    Args:
        active: the state inside the block; blocks nest.
    """
    token = _in_breakable_cuda_graph.set(active)
    try:
        yield
    finally:
        _in_breakable_cuda_graph.reset(token)


def is_capturing() -> bool:
    """Whether to run what may be captured: the declared state, or a capture on the current CUDA stream."""
    if _in_breakable_cuda_graph.get():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
