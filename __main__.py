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
    explain = commands.add_parser("explain", help="what would be hoisted out of a published model's loop, no weights")
    _explain_arguments(explain)
    doctor = commands.add_parser("doctor", help="what works on this machine, and what to do about what does not")
    doctor.add_argument("--json", action="store_true", help="print it as JSON")
    doctor.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="for compiling with inductor; 0 leaves it out (default: 120)"
    )
    commands.add_parser("bench", help="denoisers compiled against eager and torch.compile", add_help=False)
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["bench"]:  # It has a parser of its own, which also serves python -m bench.
        return _bench(given[1:])
    options = parser.parse_args(given)
    if options.command == "demo":
        return _demo(options)
    if options.command == "doctor":
        return _doctor(options)
    if not options.list and options.model is None:
        explain.error("name a model, or --list")
    return _explain(options)


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


def _doctor(options: argparse.Namespace) -> int:
    from .runtime.doctor import TIMEOUT, examine

    found = examine(TIMEOUT if options.timeout is None else options.timeout)
    print(found.to_json() if options.json else found)
    return 0 if found.works else 1


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="name (see --list), a config.json, or a class as package.Class")
    parser.add_argument("--list", action="store_true", help="list the published models")
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration of a class (default: its defaults)")
    for name, unit in {"height": "pixels", "width": "pixels", "frames": "frames", "prompt": "text tokens"}.items():
        parser.add_argument(f"--{name}", type=_positive, metavar="N", help=f"{unit} (default: as the model's pipeline)")
    parser.add_argument("--batch", type=_positive, default=1, metavar="N", help="pictures in one call (default: 1)")
    parser.add_argument("--backend", default="inductor", help="back end the loop's body is for (default: inductor)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the chart there")


def _explain(options: argparse.Namespace) -> int:
    from .models.published import PUBLISHED
    from .runtime.explain import explain

    if options.list:
        print("\n".join(f"{name:<18}{published.title}" for name, published in PUBLISHED.items()))
        return 0
    sizes = {name: getattr(options, name) for name in ("height", "width", "frames", "batch", "prompt")}
    try:
        found = explain(options.model, options.config, backend=options.backend, **sizes)
        print(found)
        if options.json:
            options.json.write_text(found.to_json() + "\n")
        if options.png:
            from .runtime.chart import draw

            draw(found, options.png)
    except ModuleNotFoundError as error:
        extra = "demo" if error.name == "matplotlib" else "diffusers"
        print(f"explain needs {error.name}: pip install 'dithoist[{extra}]'", file=sys.stderr)
        return 1
    except (ValueError, RuntimeError, OSError) as error:
        print(f"explain: {error}", file=sys.stderr)
        return 1
    return 0


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
