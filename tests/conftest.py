"""Shared set-up: Hypothesis profiles, the verifier on for every test, a clean compiler before each."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60, suppress_health_check=_SLOW)
settings.register_profile("fuzz", deadline=None, max_examples=3000, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Small operations on several threads spend their time waiting for each other when the machine is shared.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--coverage-table", metavar="PATH", help="write what test_coverage.py finds here")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every pass is verified; no test sees another's compiled code or random state."""
    monkeypatch.setenv("DITHOIST_VERIFY", "1")
    for name in ("DITHOIST_DISABLE", "DITHOIST_DUMP"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning, message="dithoist.*")
        yield
    torch.compiler.reset()
