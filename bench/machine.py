"""The device at hand: its clock, its memory, and the calls that make the host wait."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import platform
import resource
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

HOST_READS = ("aten::_local_scalar_dense", "aten::nonzero")
_KIB = 1024


class Stopwatch(Protocol):
    """Marks moments; the laps between them are read when everything is over."""

    def mark(self) -> None:
        """Now, in the order of the device's work."""

    def laps(self) -> list[float]:
        """Seconds between the marks; waits for the device."""


class Cpu:
    """The processor, by the wall clock."""

    name = "cpu"

    def synchronise(self) -> None:
        """Nothing to wait for."""

    def stopwatch(self) -> Stopwatch:
        """A clock that has not started."""
        return _WallClock()

    def reset_peak(self) -> None:
        """Let the high-water mark begin at what is resident now, as far as the system can."""
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:  # What a compiler has freed and the allocator kept is no part of the loop.
            trim(0)
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            warnings.warn("the high-water mark cannot be reset; it includes compilation", stacklevel=2)

    def peak(self) -> int:
        """Most bytes resident since :meth:`reset_peak`, code and interpreter included."""
        try:
            status = Path("/proc/self/status").read_text()
        except OSError:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        return int(fields["VmHWM"].split()[0]) * _KIB

    def host_reads(self, call: Callable[[], object]) -> int:
        """How often ``call`` hands a value of a tensor, or a size that depends on one, to the host."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Else it writes to the terminal at every start.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            call()
        return sum(event.name in HOST_READS for event in profile.events() or ())

    def describe(self) -> str:
        """What runs here, in a line."""
        return f"{_processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


class Accelerator:
    """A CUDA device, or an NPU, whose module has the same functions."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._module: Any = torch.get_device_module(name)

    def synchronise(self) -> None:
        """Wait until the device has done everything."""
        self._module.synchronize()

    def stopwatch(self) -> Stopwatch:
        """A clock that has not started."""
        return _EventClock(self._module)

    def reset_peak(self) -> None:
        """Let the high-water mark begin at what is allocated now."""
        gc.collect()
        self._module.empty_cache()
        self._module.reset_peak_memory_stats()

    def peak(self) -> int:
        """Most bytes allocated on the device since :meth:`reset_peak`."""
        return int(self._module.max_memory_allocated())

    def host_reads(self, call: Callable[[], object]) -> int:
        """How often ``call`` made the host wait for the device, by the device's own account."""
        mode = self._module.get_sync_debug_mode()
        self.synchronise()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self._module.set_sync_debug_mode("warn")
            try:
                call()
            finally:
                self._module.set_sync_debug_mode(mode)
        return sum("synchroniz" in str(warning.message) for warning in caught)

    def describe(self) -> str:
        """What runs here, in a line."""
        return f"{self._module.get_device_name()}, torch {torch.__version__}; host {_processor()}"


Machine = Cpu | Accelerator
NAMES = ("cpu", "cuda", "npu")


def available(name: str) -> bool:
    """Whether this machine has the device."""
    if name == "cpu":
        return True
    module = getattr(torch, name, None)  # torch.npu is there once its extension is imported.
    return module is not None and bool(module.is_available())


def machine(name: str | None = None) -> Machine:
    """The device by name, or the best at hand.

    Raises:
        ValueError: no such device here.
    """
    name = name or next(n for n in ("cuda", "npu", "cpu") if available(n))
    if name not in NAMES:
        raise ValueError(f"no platform {name!r} (known: {', '.join(NAMES)})")
    if not available(name):
        raise ValueError(f"no {name} device here")
    return Cpu() if name == "cpu" else Accelerator(name)


class _WallClock:
    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def laps(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self._marks)]


class _EventClock:
    def __init__(self, module: Any) -> None:
        self._module = module
        self._events: list[Any] = []

    def mark(self) -> None:
        event = self._module.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def laps(self) -> list[float]:
        self._module.synchronize()
        return [1e-3 * a.elapsed_time(b) for a, b in itertools.pairwise(self._events)]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
