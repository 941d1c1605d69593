"""Padded prompts: masked attention, packed tokens and trimmed tokens, side by side in one run.

    python -m bench.varlen [--quick] [--rounds N] [--json FILE] [--markdown FILE]

Each case is one small denoiser with the proportions of a checkpoint, in eager mode, and a prompt that fills part of
what is padded. The variants take turns: *untouched*, as diffusers runs it; *exact*, compiled, masks as they are;
*packed*, numerics="fast" without trimming; *trimmed*, numerics="fast". Times are medians of a step, after a first
generation that captured. Errors are the largest of a step against the same denoiser in float64, where callers may
read, over that of the untouched.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from dithoist import compile_denoiser, report
from dithoist.bench.sheet import Sheet
from dithoist.models.padding import PADDING
from dithoist.models.small import DENOISERS, Sizes, as_dtype, build_denoiser, example_calls, readable, with_prompts
from dithoist.runtime.denoiser import compiled_denoiser

TOKENS = 256
STEPS = 3
CASES = (
    ("ideogram-4", 2048, (20, 200, 1000, 2048)),
    ("hunyuan-video", 256, (26, 128, 256)),
    ("qwen-image", 512, (51, 256, 512)),
    ("pixart", 300, (30, 150, 300)),
)
"""Denoiser, text tokens with padding, and how many of them a prompt fills."""


def _without_trimming(module: nn.Module) -> None:
    compile_denoiser(module, backend="eager", numerics="fast")
    wrapper = compiled_denoiser(module)
    assert wrapper is not None
    wrapper.state.trim = None


VARIANTS: dict[str, Callable[[nn.Module], object]] = {
    "untouched": lambda module: None,
    "exact": lambda module: compile_denoiser(module, backend="eager"),
    "packed": _without_trimming,
    "trimmed": lambda module: compile_denoiser(module, backend="eager", numerics="fast"),
}


def measure(family: str, prompt: int, length: int, rounds: int) -> dict[str, Any]:
    """One case: milliseconds a step, error, and tokens run, by variant."""
    module = build_denoiser(family, "bench")
    paddings = PADDING[DENOISERS[family].class_name]
    calls = [
        with_prompts(call, paddings, [length], prompt)
        for call in example_calls(family, module, Sizes(tokens=TOKENS, prompt=prompt), steps=STEPS)
    ]
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    twins = {name: copy.deepcopy(module, dict(shared)) for name in VARIANTS}
    for name, twin in twins.items():
        VARIANTS[name](twin)
    results = {name: [readable(twin(**call), call, paddings) for call in calls] for name, twin in twins.items()}
    exact = copy.deepcopy(module).double()
    expected = readable(exact(**as_dtype(calls[0], torch.float64)), calls[0], paddings)
    del exact
    errors = {name: _error(first, expected) for name, (first, *_) in results.items()}
    times: dict[str, list[float]] = {name: [] for name in twins}
    for _ in range(rounds):
        for name, twin in twins.items():
            for call in calls:
                start = time.perf_counter()
                twin(**call)
                times[name].append(1e3 * (time.perf_counter() - start))
    (of_trimmed,) = report(twins["trimmed"]).denoisers
    return {
        "family": family, "prompt": prompt, "length": length,
        "tokens": round(of_trimmed.tokens_run / of_trimmed.tokens_given, 3),
        "ms": {name: statistics.median(found) for name, found in times.items()},
        "error": errors,
    }  # fmt: skip


def _error(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a.double() - b).abs().max()) for a, b in zip(found, expected, strict=True))


def _cells(row: dict[str, Any]) -> list[str]:
    ms, error = row["ms"], row["error"]
    cells = [row["family"], f"{row['length']} of {row['prompt']}", f"{row['tokens']:.0%}", f"{ms['untouched']:.0f} ms"]
    cells += [f"{ms['untouched'] / ms[name]:.2f}x" for name in ("exact", "packed", "trimmed")]
    return cells + [f"{error[name] / error['untouched']:.2f}" for name in ("packed", "trimmed")]


_PREFACE = """Written by `python -m bench.varlen --markdown docs/padding.md`.
*tokens run* is the share of padded tokens that trimming leaves. Speed-ups are over *untouched*: medians of a step,
variants in turn. Errors are the largest of a step against float64, over that of the untouched denoiser."""
HEADER = [
    "denoiser", "prompt", "tokens run", "untouched", "exact", "packed", "trimmed", "error packed", "error trimmed"
]  # fmt: skip


def main() -> None:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description="masked, packed and trimmed prompts")
    parser.add_argument("--quick", action="store_true", help="the last denoiser only, one round")
    parser.add_argument("--rounds", type=int, default=5, help="timed generations of three steps (default: 5)")
    parser.add_argument("--json", type=Path, help="write the medians here")
    parser.add_argument("--markdown", type=Path, help="write the table here, as docs/padding.md is written")
    options = parser.parse_args()
    cases = [(family, prompt, length) for family, prompt, lengths in CASES for length in lengths]
    if options.quick:
        cases = [case for case in cases if case[0] == CASES[-1][0]]
    console = Console(width=130)
    with torch.no_grad():
        rows = [
            measure(*case, 1 if options.quick else options.rounds)
            for case in track(cases, "measuring", console=console, transient=True)
        ]
    machine = f"cpu, {torch.get_num_threads()} threads, torch {torch.__version__}, {TOKENS} picture tokens"
    sheet = Sheet(f"Speed-up over the untouched denoiser ({machine})", HEADER, [_cells(row) for row in rows])
    sheet.print(console)
    if options.markdown:
        parts = [f"# {sheet.title}", "", _PREFACE, "", *sheet.markdown()]
        options.markdown.write_text("\n".join(parts) + "\n")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
