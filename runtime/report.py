"""``report``: what was moved, what it saves, what fell back and why."""

from __future__ import annotations

import dataclasses
import io
import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ..passes import TIMES, BindingTime, Stage, format_binding_times
from ..passes import cost as costs
from .denoiser import Compiled
from .pipeline import compiled_denoisers
from .staged import StagedGraph


@dataclass(frozen=True)
class TimeReport:
    """The work of one binding time in one graph.

    Attributes:
        operations: calls that do work (no views).
        flops: of matrix products, convolutions and attention.
        weights_read: bytes of parameters and buffers read.
        bytes_held: bytes of one set of the values that later stages read.
        runs: how often it ran; for the body, once a call.
    """

    operations: int
    flops: int
    weights_read: int
    bytes_held: int
    runs: int


@dataclass(frozen=True)
class GraphReport:
    """One captured graph of a denoiser.

    Attributes:
        captured_operations: operations in the graph as captured, all of which ran at every step.
        by_time: the work by binding time (``"model"``, ``"request"``, ... ``"step"``).
        inputs: binding time of each argument, as found out.
        demoted: arguments and weights that turned out to change from step to step.
        promoted: arguments of the step that turned out to stay.
        hoisted_weights: bytes of weights that only hoisted work reads.
        body_host_syncs: calls left in the body that make the host wait.
        notes: what a pass could not do, and why.
        text: the analysed graph, one line a node, with binding times.
    """

    calls: int
    captured_operations: int
    by_time: dict[str, TimeReport]
    inputs: dict[str, str]
    demoted: list[str]
    promoted: list[str]
    hoisted_weights: int
    body_host_syncs: list[str]
    notes: list[str]
    text: str = dataclasses.field(repr=False)


@dataclass(frozen=True)
class DenoiserReport:
    """One denoiser. ``bytes_held`` is what is held now, private input copies included; ``bytes_released`` are those of
    weights that left memory for the loop (``release_weights``), ``bytes_read_back`` how many hoisted work has read from
    there since. ``tokens_run`` of ``tokens_given`` padded tokens a row, of all calls, were not cut off
    (``numerics="fast"``); ``not_trimmed`` says why none are."""

    name: str
    module: str
    backend: str
    graphs: list[GraphReport]
    fallbacks: list[str]
    recompiles: int
    graph_breaks: int
    bytes_held: int
    bytes_released: int
    bytes_read_back: int
    cache_hits: int
    cache_misses: int
    cache_evictions: int
    host_reads: int
    tokens_given: int
    tokens_run: int
    not_trimmed: str | None


@dataclass(frozen=True)
class Printable:
    """A dataclass for people (``str()``) and for programs."""

    def to_dict(self) -> dict[str, Any]:
        """The whole tree as plain dictionaries and lists."""
        return dataclasses.asdict(self)

    def to_json(self, indent: int | None = 2) -> str:
        """The whole tree as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def _tables(self, console: Console) -> None:
        """Print tables."""
        raise NotImplementedError

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=112, record=True)
        self._tables(console)
        return "\n".join(line.rstrip() for line in console.export_text().rstrip().splitlines())


@dataclass(frozen=True)
class Report(Printable):
    """What :func:`report` returns. ``str()`` prints tables."""

    denoisers: list[DenoiserReport]

    def graph(self) -> str:
        """Every graph, one line a node, each with the time when its value is first known."""
        parts = [
            f"# {denoiser.name}, graph {i}\n{graph.text}"
            for denoiser in self.denoisers
            for i, graph in enumerate(denoiser.graphs)
        ]
        return "\n\n".join(parts)

    def _tables(self, console: Console) -> None:
        """A table for each graph, and what was released, held and fell back."""
        for denoiser in self.denoisers:
            _print_denoiser(console, denoiser)


def report(target: Any) -> Report:
    """What dithoist did to a compiled pipeline or module.

    Args:
        target: what was passed to ``compile_pipeline`` or ``compile_denoiser``, or what ``compile_step`` returned.
            Graphs appear with the first call.

    Raises:
        TypeError: ``target`` is none of these.
        ValueError: it was not compiled.
    """
    return Report([_denoiser_report(wrapper) for wrapper in compiled_denoisers(target)])


def _denoiser_report(wrapper: Compiled) -> DenoiserReport:
    state = wrapper.state
    graphs = sorted(state.graphs, key=lambda g: g.number)
    backend = state.settings.backend
    return DenoiserReport(
        name=state.name,
        module=wrapper.title,
        backend=backend if isinstance(backend, str) else getattr(backend, "__name__", repr(backend)),
        graphs=[_graph_report(g) for g in graphs],
        fallbacks=list(state.fallbacks),
        recompiles=state.recompiles,
        graph_breaks=state.graph_breaks,
        bytes_held=state.held.bytes,
        bytes_released=state.released.bytes(wrapper.weights()),
        bytes_read_back=state.released.bytes_read_back,
        cache_hits=state.held.hits,
        cache_misses=state.held.misses,
        cache_evictions=state.held.evictions,
        host_reads=sum(g.host_reads for g in graphs),
        tokens_given=state.trim.tokens_given if state.trim else 0,
        tokens_run=state.trim.tokens_run if state.trim else 0,
        not_trimmed=state.trim.untrusted if state.trim else None,
    )


def _graph_report(graph: StagedGraph) -> GraphReport:
    body = graph.program.eager_body or graph.program.body
    stages = {s.time: s for s in (*graph.program.stages, body) if s.capture_safe}
    weights = {n for n, label in graph.labels.items() if label == BindingTime.MODEL}
    hoisted_only = {w for s in graph.program.stages for w in weights & set(s.inputs)}
    hoisted_only -= set(body.inputs)
    return GraphReport(
        calls=graph.calls,
        captured_operations=costs.operations(graph.source),
        by_time={t.label: _time_report(stages[t], weights, graph) for t in TIMES if t in stages},
        inputs={i.name: graph.labels[i.node].label for i in graph.inputs.values() if i.node not in weights},
        demoted=list(graph.demoted),
        promoted=list(graph.promoted),
        hoisted_weights=_weight_bytes(graph, hoisted_only),
        body_host_syncs=costs.host_reads(body.module),
        notes=list(graph.context.notes),
        text=format_binding_times(graph.analysed),
    )


def _time_report(stage: Stage, weights: set[str], graph: StagedGraph) -> TimeReport:
    (output,) = stage.module.graph.find_nodes(op="output")
    return TimeReport(
        operations=costs.operations(stage.module),
        flops=costs.flops(stage.module),
        weights_read=_weight_bytes(graph, weights & set(stage.inputs)),
        bytes_held=costs.tensor_bytes(output.all_input_nodes) if stage.outputs else 0,
        runs=graph.stage_runs[stage.time],
    )


def _weight_bytes(graph: StagedGraph, names: set[str]) -> int:
    return costs.tensor_bytes(n for n in graph.source.graph.find_nodes(op="placeholder") if n.name in names)


def _print_denoiser(console: Console, denoiser: DenoiserReport) -> None:
    console.print(f"[bold]{denoiser.name}[/] ({denoiser.module}, backend={denoiser.backend})")
    if not denoiser.graphs:
        console.print("  nothing captured yet: call it once")
    for number, graph in enumerate(denoiser.graphs):
        table = Table(title=f"graph {number}, called {graph.calls} times", title_justify="left")
        table.add_column("binding time")
        for column in ("operations", "FLOPs", "weights read", "held", "ran"):
            table.add_column(column, justify="right")
        for label, row in graph.by_time.items():
            cells = (
                str(row.operations), human(row.flops, 1000, ""), human(row.weights_read), human(row.bytes_held),
                str(row.runs),
            )  # fmt: skip
            table.add_row("body (step)" if label == BindingTime.STEP.label else label, *cells)
        console.print(table)
        body = graph.by_time[BindingTime.STEP.label].operations
        console.print(
            f"  {graph.captured_operations} operations a step before, {body} now; "
            f"{human(graph.hoisted_weights)} of weights are read by hoisted work alone"
        )
        syncs = ", ".join(graph.body_host_syncs) or "none"
        console.print(f"  host reads left in the body: {syncs}")
        found = [f"{name}: changes from step to step" for name in graph.demoted]
        found += [f"{name}: stays from step to step" for name in graph.promoted]
        for line in [*found, *graph.notes]:
            console.print(f"  note: {line}", highlight=False)
    for reason in denoiser.fallbacks:
        console.print(f"  fell back: {reason}", highlight=False)
    if denoiser.tokens_run < denoiser.tokens_given:
        console.print(f"  {denoiser.tokens_run} of {denoiser.tokens_given} padded tokens were run")
    if denoiser.not_trimmed:
        console.print(f"  padding is not cut off: {denoiser.not_trimmed}", highlight=False)
    released = f", {human(denoiser.bytes_released)} of weights released" if denoiser.bytes_released else ""
    released += f" ({human(denoiser.bytes_read_back)} read back)" if released else ""
    console.print(
        f"  held now {human(denoiser.bytes_held)}{released}; {denoiser.cache_hits} hits, "
        f"{denoiser.cache_misses} misses, {denoiser.cache_evictions} evictions; "
        f"recompiles: {denoiser.recompiles}; graph breaks: {denoiser.graph_breaks}\n"
    )


def human(amount: float, base: int = 1024, unit: str = "B") -> str:
    """``12.3 MiB`` (base 1024) or ``12.3 M`` (base 1000)."""
    prefixes = ("", "Ki", "Mi", "Gi", "Ti") if base == 1024 else ("", "k", "M", "G", "T", "P")
    for prefix in prefixes[:-1]:
        if amount < base:
            return f"{amount:.0f} {prefix}{unit}".rstrip() if not prefix else f"{amount:.1f} {prefix}{unit}"
        amount /= base
    return f"{amount:.1f} {prefixes[-1]}{unit}"
