"""``python -m bench``, ``dithoist bench``, ``make bench``: every variant of every case, and the tables."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from . import plots, tables, variants
from .cases import CASES, FIELDS, QUICK, Case, select, unique
from .machine import NAMES, available, machine
from .overhead import PARAMETERS
from .results import Run
from .runner import Plan, run

_WIDTH = 190


def main(arguments: Sequence[str] | None = None, prog: str = "python -m bench") -> int:
    """Run the chosen cases; returns the exit status: 1 if a case failed."""
    parser = _parser(prog)
    options = parser.parse_args(arguments)
    console = Console()
    console.width = max(console.width, _WIDTH)  # A pipe has no width; the tables need one.
    wanted = {name: getattr(options, name) for name in FIELDS}
    try:
        cases = _cases(options, wanted)
        chosen = variants.check(options.variant or list(variants.VARIANTS))
    except ValueError as error:
        parser.error(str(error))
    if options.resume and not options.json:
        parser.error("--resume goes on with the run in --json; name its file")
    if options.list:
        console.print("\n".join(case.id for case in cases), highlight=False)
        return 0
    if options.device and not available(options.device):
        console.print(f"skipped: no {options.device} device here")
        return 0
    if options.results:
        found = _load(options.results, parser)
    else:
        earlier = _load(options.json, parser) if options.resume else None
        try:
            found = run(cases, _plan(options, chosen), console, keep=options.json, earlier=earlier)
        except ValueError as error:
            parser.error(str(error))
    tables.show(found, console)
    for path in filter(None, (options.markdown, options.png)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if options.markdown:
        options.markdown.write_text(tables.markdown(found))
    if options.png:
        plots.draw(found, options.png)
    return 1 if found.failed else 0


def _load(path: Path, parser: argparse.ArgumentParser) -> Run:
    try:
        return Run.load(path)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def _plan(options: argparse.Namespace, chosen: list[str]) -> Plan:
    return Plan(
        tuple(dict.fromkeys(chosen)),
        rounds=options.rounds or (3 if options.quick else 7),
        colds=options.colds,
        device=machine(options.device).name,
        memory=not (options.no_memory or options.quick),
        overhead=() if options.no_overhead else PARAMETERS[:2] if options.quick else PARAMETERS,
        minutes=options.minutes,
    )


def _cases(options: argparse.Namespace, wanted: dict[str, Any]) -> list[Case]:
    if options.case and (options.quick or any(wanted.values())):
        raise ValueError("--case names whole cases; leave out the other choices")
    if options.case:
        return unique(Case.from_id(text) for text in options.case)
    return _quick(wanted.pop("family"), **wanted) if options.quick else select(CASES, **wanted)


def _quick(families: list[str] | None, **sizes: list[object] | None) -> list[Case]:
    given = [name for name, values in sizes.items() if values]
    if given:
        raise ValueError(f"--quick sets the sizes itself; leave out --{', --'.join(given)}")
    known = select(CASES, family=families or [QUICK.family])
    return unique(dataclasses.replace(QUICK, family=case.family) for case in known)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description="Denoisers compiled by dithoist against eager and torch.compile, in turns."
    )
    chosen = parser.add_argument_group("which cases (each option may be repeated; all cases without any)")
    chosen.add_argument("--family", action="append", help="name of a denoiser, such as flux")
    chosen.add_argument("--tokens", action="append", type=int, help="picture tokens")
    chosen.add_argument("--prompt", action="append", type=int, help="prompt tokens")
    chosen.add_argument("--steps", action="append", type=int, help="steps per picture")
    chosen.add_argument("--blocks", action="append", type=int, help="depth, of the cases that set one")
    chosen.add_argument("--dtype", action="append", help="of weights and inputs")
    chosen.add_argument("--case", action="append", help="a case by its id, in the list or not")
    chosen.add_argument("--quick", action="store_true", help="one small case, 3 rounds, no memory: about 3 minutes")
    chosen.add_argument("--list", action="store_true", help="print the ids of the cases and stop")
    how = parser.add_argument_group("how")
    how.add_argument("--variant", action="append", help=f"repeatable: {', '.join(variants.VARIANTS)} (default: all)")
    how.add_argument("--rounds", type=_positive, help="timed pictures of each variant (default: 7)")
    how.add_argument("--colds", type=_positive, default=1, help="cold first calls, the fastest counts (default: 1)")
    how.add_argument("--device", choices=NAMES, help="where (default: the best at hand)")
    how.add_argument("--no-memory", action="store_true", help="skip peak memory, which takes a process per variant")
    how.add_argument("--no-overhead", action="store_true", help="skip the cost of a call besides its work")
    how.add_argument("--minutes", type=float, help="begin no case that would end later, by the slowest so far")
    how.add_argument("--resume", action="store_true", help="go on with the run in --json: what it has stays")
    how.add_argument("--results", type=Path, help="measure nothing; show a run that --json wrote")
    out = parser.add_argument_group("what is written")
    out.add_argument("--json", type=Path, help="everything, for bench.baselines")
    out.add_argument("--markdown", type=Path, help="the tables, as docs/performance.md is written")
    out.add_argument("--png", type=Path, help="plots over families, steps, tokens and depth")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
