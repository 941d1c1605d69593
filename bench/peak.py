"""Peak memory of one variant's loop, in a process of its own.

    python -m bench.peak CASE VARIANT [--device NAME]

Prints one line of JSON: most bytes in use during a warm generation with a new prompt. On a CPU these are all bytes
resident, interpreter and libraries included; on a device, those allocated there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import variants
from .cases import Case
from .machine import NAMES, Machine, machine
from .workload import Workload, load

_WARM = 2


def peak(workload: Workload, variant: str, where: Machine) -> int:
    """Most bytes in use during the third generation; each has a new prompt."""
    return warm_generation(variants.build(variant, workload.module), workload, where)[0]


@torch.no_grad()
def warm_generation(module: nn.Module, workload: Workload, where: Machine) -> tuple[int, list[float]]:
    """Most bytes in use during the third generation, and the seconds of its steps; each has a new prompt."""
    for seed in range(_WARM):
        for call in workload.calls(seed):
            module(**call)
    calls = workload.calls(_WARM)
    where.synchronise()
    where.reset_peak()
    stopwatch = where.stopwatch()
    stopwatch.mark()
    for call in calls:
        module(**call)
        stopwatch.mark()
    laps = stopwatch.laps()
    return where.peak(), laps


def peak_elsewhere(case: Case, variant: str, device: str, cache: Path | None = None) -> int:
    """:func:`peak` in a new process.

    Args:
        case: what to run.
        variant: how.
        device: where.
        cache: compile cache to read kernels from, so that they need not be compiled again.

    Raises:
        RuntimeError: the process failed; the message is its last line.
    """
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache)} if cache else {}
    return int(elsewhere("peak", [case.id, variant, "--device", device], environment)["peak"])


def elsewhere(program: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The line of JSON that a program of this package prints last, run in a process of its own.

    Raises:
        RuntimeError: the process failed; the message is its last line.
    """
    command = [sys.executable, "-m", f"{__package__}.{program}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | (environment or {}))
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise RuntimeError(said[-1] if said else f"exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the peak of one case and variant; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.peak", description="peak memory of one variant's loop")
    parser.add_argument("case", type=Case.from_id, help="id of a case, as python -m bench --list prints it")
    parser.add_argument("variant", choices=variants.VARIANTS)
    parser.add_argument("--device", choices=NAMES, default="cpu")
    options = parser.parse_args(arguments)
    where = machine(options.device)
    found = peak(load(options.case, options.device), options.variant, where)
    print(json.dumps({"case": options.case.id, "variant": options.variant, "peak": found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
