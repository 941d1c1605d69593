"""Every environment variable dithoist reads, read at the time of use so that a test may set one; and where it logs."""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger("dithoist")
"""``INFO``: what is captured, staged anew, released and freed; ``DEBUG``: weights that changed. Neither by default."""

VARIABLES = {
    "DITHOIST_DISABLE": "unless it is 0, everything runs as if never compiled",
    "DITHOIST_DUMP": "the program before and after every pass is written there",
    "DITHOIST_VERIFY": "unless it is 0, the graph is checked after every pass",
    "TORCHDYNAMO_DISABLE": "of PyTorch: if it is 1, nothing can be captured",
    "TORCH_COMPILE_DISABLE": "of PyTorch: if it is 1, nothing can be captured",
}
"""Those that change what we do, ours and PyTorch's; for people."""


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no")


def disabled() -> bool:
    """``DITHOIST_DISABLE=1``: every compiled denoiser runs as the untouched module."""
    return _flag("DITHOIST_DISABLE")


def verify() -> bool:
    """``DITHOIST_VERIFY=1``: check the graph after every pass; a failure is an error of ours."""
    return _flag("DITHOIST_VERIFY")


def dump_dir() -> Path | None:
    """``DITHOIST_DUMP=dir``: write each pass's program before and after as readable Python into ``dir``."""
    value = os.environ.get("DITHOIST_DUMP", "").strip()
    return Path(value) if value else None
