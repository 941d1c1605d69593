"""Every environment variable dithoist reads, read at the time of use so that a test may set one."""

from __future__ import annotations

import os
from pathlib import Path


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
