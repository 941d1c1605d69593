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
from collections.abc import Sequence
from pathlib import Path

import torch

from . import variants
from .cases import Case
from .machine import NAMES, Machine, machine
from .workload import Workload, load

_WARM = 2


@torch.no_grad()
def peak(workload: Workload, variant: str, where: Machine) -> int:
    """Most bytes in use during the third generation; each has a new prompt."""
    module = variants.build(variant, workload.module)
    for seed in range(_WARM + 1):
        calls = workload.calls(seed)
        if seed == _WARM:
            where.reset_peak()
        for call in calls:
            module(**call)
        where.synchronise()
    return where.peak()


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
    command = [sys.executable, "-m", f"{__package__}.peak", case.id, variant, "--device", device]
    environment = os.environ | ({"TORCHINDUCTOR_CACHE_DIR": str(cache)} if cache else {})
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise RuntimeError(said[-1] if said else f"exit code {done.returncode}")
    return int(json.loads(done.stdout.strip().splitlines()[-1])["peak"])


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
