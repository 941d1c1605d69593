"""A run as if it had been measured: one family that gains, one that loses, one that failed."""

from __future__ import annotations

from dithoist.bench.cases import Case
from dithoist.bench.results import CaseResult, Overhead, Run, VariantResult

MIB = 2**20


def stored_run() -> Run:
    """Two cases at 256 tokens; in the second a step of ours takes 5 % longer than with ``torch.compile``."""
    run = Run("cpu", "a processor, 2 threads, torch 2", 3)
    run.results = [case_result(Case("flux"), ours=0.80), case_result(Case("sd3"), ours=1.05)]
    run.results[1].unsupported = {"regional": "SD3Transformer2DModel names no repeated blocks"}
    run.failed = {"wan-256t-64p-20s": "RuntimeError: out of luck"}
    run.skipped = ["pixart-256t-64p-20s"]
    run.overhead = [Overhead(10, 1e-5, 4e-5, 1e-3), Overhead(1000, 1e-4, 5e-5, 2e-3)]
    return run


def case_result(case: Case, ours: float) -> CaseResult:
    """Eager takes 1.2 s a step, ``torch.compile`` 1 s, ours ``ours`` s and its body 1 % less."""
    return CaseResult(
        case,
        depth=6,
        variants={
            "eager": _variant(1.2, 0.5, peak=100 * MIB),
            "torch.compile": _variant(1.0, 20.0, peak=110 * MIB, error=1e-6),
            "regional": _variant(1.0, 10.0, peak=110 * MIB, error=1e-6),
            "dithoist-eager": _variant(1.1, 3.0, peak=101 * MIB),
            "dithoist-inductor": _variant(ours, 18.0, peak=108 * MIB, error=5e-7),
        },
        floor=[0.99 * ours * drift for drift in _DRIFT],
        operations=400,
        body_operations=280,
        body_host_reads=0,
        bytes_held=8 * MIB,
    )


_DRIFT = (1.0, 1.1, 0.95)


def _variant(step: float, first_call: float, *, peak: int, error: float = 0.0) -> VariantResult:
    steps = [step * drift for drift in _DRIFT]
    pictures = [20 * seconds for seconds in steps]
    return VariantResult(first_call, steps, pictures, error, graphs=1, peak=peak)
