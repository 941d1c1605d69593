"""Zero the rows a mask names: five ways, side by side in one run.

    python bench/masked_fill.py [--quick] [--json FILE] [--markdown FILE]

Each case times every variant in turn (A B C D E A B C D E ...) on a fresh copy of the same tensor, so that drift
of the machine hits all alike; the table gives medians as ratios over out-of-place ``masked_fill``, and in the last
column ours over the best of the others. Everything a serving loop would have made once per request (row indices,
keep mask) is made before the clock starts. Multiplying does not keep the bits (NaN stays NaN, negative numbers
become -0.0); it is here for its speed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from dithoist.bench.sheet import Sheet  # And the package, which registers dithoist::index_fill_.

SHAPES = ((2, 1024, 2560), (2, 4096, 4096))
DTYPES = (torch.float32, torch.bfloat16)
SHARES = (0.0, 0.05, 0.5, 1.0)
WANTED = 2.87
"""The seed project's speed-up for the stage that held the copy."""


def variants(mask: torch.Tensor, dtype: torch.dtype) -> dict[str, Callable[[torch.Tensor], object]]:
    """The ways to zero the rows ``mask`` ``[B, S]`` names in ``x`` ``[B, S, D]``."""
    wide = mask.unsqueeze(-1)
    keep = (~wide).to(dtype)
    rows = torch.ops.dithoist.masked_rows(wide, [*mask.shape, 1], 2)

    def boolean(x: torch.Tensor) -> None:
        x[mask] *= 0

    return {
        "masked_fill": lambda x: x.masked_fill(wide, 0.0),
        "x[mask] *= 0": boolean,
        "masked_fill_": lambda x: x.masked_fill_(wide, 0.0),
        "x * keep": lambda x: x * keep,
        "x *= keep": lambda x: x.mul_(keep),
        "dithoist": lambda x: torch.ops.dithoist.index_fill_(x, rows, 2, 0.0),
    }


def measure(
    shape: tuple[int, int, int], dtype: torch.dtype, share: float, repeats: int, device: torch.device
) -> dict[str, float]:
    """Median milliseconds of each variant; the share of rows named is ``share``, at random places."""
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(shape[:2], generator=generator) < share).to(device)
    x = torch.randn(shape, generator=generator).to(device, dtype)
    ways = variants(mask, dtype)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            copy = x.clone()
            _wait(device)
            start = time.perf_counter()
            way(copy)
            _wait(device)
            if repeat:  # The first round warms up.
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(found) for name, found in times.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_PREFACE = """Written by `python bench/masked_fill.py --markdown docs/masked_fill.md`: one run, variants in turn,
medians. *rows* is the share of rows the mask names, at random places. The two products do not keep the bits (NaN
stays NaN, negative numbers become -0.0)."""


def _verdict(rows: list[dict[str, Any]]) -> str:
    sparse = [r["ms"]["masked_fill"] / r["ms"]["dithoist"] for r in rows if r["share"] < 1]
    others = [[v for k, v in r["ms"].items() if k != "dithoist" and "keep" not in k] for r in rows]
    exact = [min(found) / r["ms"]["dithoist"] for found, r in zip(others, rows, strict=True)]
    return (
        f"Least speed-up where up to half of the rows are named: {min(sparse):.2f}x (wanted: {WANTED}x). "
        f"Least against the best other that keeps the bits: {min(exact):.2f}x."
    )


def _cells(row: dict[str, Any]) -> list[str]:
    ms: dict[str, float] = row["ms"]
    base = ms["masked_fill"]
    best = min(v for k, v in ms.items() if k != "dithoist")
    ratios = [f"{base / v:.2f}x" for k, v in ms.items() if k != "masked_fill"]
    shape = "x".join(map(str, row["shape"]))
    return [shape, row["dtype"], f"{row['share']:.0%}", f"{base:.2f} ms", *ratios, f"{best / ms['dithoist']:.2f}x"]


def main() -> None:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description="masked_fill, five ways")
    parser.add_argument("--quick", action="store_true", help="the smaller shape only, fewer repeats")
    parser.add_argument("--repeats", type=int, default=15, help="timed rounds per case (default: 15)")
    parser.add_argument("--json", type=Path, help="write the medians here")
    parser.add_argument("--markdown", type=Path, help="write the table here, as docs/masked_fill.md is written")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes, repeats = (SHAPES[:1], 5) if options.quick else (SHAPES, options.repeats)
    cases = list(itertools.product(shapes, DTYPES, SHARES))
    console = Console(width=130)
    rows: list[dict[str, Any]] = []
    for shape, dtype, share in track(cases, "measuring", console=console, transient=True):
        rows.append({
            "shape": list(shape), "dtype": str(dtype).removeprefix("torch."), "share": share,
            "ms": measure(shape, dtype, share, repeats, device),
        })  # fmt: skip

    machine = f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    header = ["shape", "dtype", "rows", "masked_fill", *list(rows[0]["ms"])[1:], "against the best other"]
    sheet = Sheet(f"Speed-up over out-of-place masked_fill ({machine})", header, [_cells(row) for row in rows])
    sheet.print(console)
    console.print(_verdict(rows))
    if options.markdown:
        parts = [f"# {sheet.title}", "", _PREFACE, _verdict(rows), "", *sheet.markdown()]
        options.markdown.write_text("\n".join(parts) + "\n")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
