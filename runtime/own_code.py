"""Code of its own for each function that is captured.

Dynamo files what it compiled, how often, and what it gave up, by code object, and the sizes it has seen by name and
line. Captures of two models would share one: all modules are called by ``nn.Module._call_impl``. With code of its own,
nothing of others counts against a capture's limits, no thread looks among another's captures, and all goes when it
goes. (``torch.compile(isolate_recompiles=True)`` is for that too, but PyTorch 2.13 keeps which one is running in a
variable of the process: two threads compile anew what the other has them look for in the wrong place.)
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch._dynamo.eval_frame import remove_from_cache

_numbers = itertools.count(1)


def with_own_code(function: Callable[..., Any]) -> FunctionType:
    """A copy of a Python function whose code Dynamo does not know yet, named after it with a number."""
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}_{next(_numbers)}")
    copy = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    weakref.finalize(copy, remove_from_cache, code).atexit = False  # Nobody is in it any more then.
    return copy
