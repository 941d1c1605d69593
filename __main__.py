"""The command line: ``python -m dithoist`` or ``dithoist``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="dithoist", description="A compiler for the denoising loop of DiTs.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="run two small real pipelines before and after compile_pipeline")
    demo.add_argument("--out", type=Path, default=Path("out"), help="folder for pictures and chart (default: out)")
    demo.add_argument("--steps", type=_at_least_two, default=20, help="denoising steps per picture (default: 20)")
    demo.add_argument("--repeats", type=_positive, default=2, help="timed rounds (default: 2)")
    demo.add_argument("--backend", action="append", help="back end, repeatable (default: eager and inductor)")
    commands.add_parser("bench", help="denoisers compiled against eager and torch.compile", add_help=False)
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["bench"]:  # It has a parser of its own, which also serves python -m bench.
        return _bench(given[1:])
    return _demo(parser.parse_args(given))


def _bench(arguments: list[str]) -> int:
    try:
        from .bench.__main__ import main as bench
    except ModuleNotFoundError as error:
        print(f"the benchmark needs {error.name}: pip install 'dithoist[demo]'")
        return 1
    return bench(arguments, prog="dithoist bench")


def _demo(options: argparse.Namespace) -> int:
    try:
        from .runtime.demo import BACKENDS, run_demo
    except ModuleNotFoundError as error:
        print(f"the demo needs {error.name}: pip install 'dithoist[demo]'")
        return 1
    backends = tuple(options.backend or BACKENDS)
    outcomes = run_demo(options.out, backends=backends, steps=options.steps, repeats=options.repeats)
    exact = all(o.largest_error == 0 for found in outcomes.values() for o in found if o.backend == "eager")
    return 0 if exact else 1


def _positive(text: str) -> int:
    return _at_least(text, 1)


def _at_least_two(text: str) -> int:
    return _at_least(text, 2)


def _at_least(text: str, least: int) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
