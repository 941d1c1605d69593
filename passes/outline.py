"""Outlining: a block that repeats becomes one function, called once for each time it occurs.

A denoiser is the same block many times over, and after the split its body still is. A back end that compiles the
body whole compiles that block as often as it occurs; here it gets it once, with weights and rows as arguments.
(``compile_repeated_blocks`` of diffusers does this by module; here the graph itself tells, as in the outlining of
code-size compilers.)

How: calls that are no views are numbered by what they do, so that equal numbers mean equal operator, constants,
layout, and views on the way to the arguments. A repetition is a stretch of that sequence which equals itself shifted
by a period. It is cut where the fewest bytes cross, which in a transformer is between blocks.

Legality: a region is a contiguous stretch of the graph and the calls stay in order, so every value is made before it
is read and effects keep their order. Regions share a function only if they make the same calls, with the same
constants, on arguments of the same layout, wired alike. Views never cross: who reads a value through views takes
them itself, so no result of a region shares memory with another or with an argument. Graphs that write an argument
or have dynamic shapes are left whole.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Iterable
from typing import NamedTuple

import torch
from torch import fx
from torch.fx.node import map_arg

from .context import PassContext
from .cost import is_operation, tensor_bytes
from .cse import call_key
from .edit import needed_nodes, placeholder_for
from .effects import effect, is_size, is_view, view_base, writes_argument

MIN_REPEATS = 3
MIN_OPERATIONS = 12
"""A region with fewer operations costs more in calls than it spares in compilation."""


class _Repeat(NamedTuple):
    """``times`` regions of ``period`` calls each, the first at position ``start``."""

    start: int
    period: int
    times: int

    @property
    def regions(self) -> list[range]:
        return [range(s, s + self.period) for s in range(self.start, self.stop, self.period)]

    @property
    def stop(self) -> int:
        return self.start + self.period * self.times


def outline_repeats(gm: fx.GraphModule, context: PassContext) -> int:
    """Make ``gm`` call a submodule for each repeated stretch and for what lies between, in place.

    Returns how many operations a back end is spared; where that is 0, ``gm`` is as it was.
    """
    calls = _calls(gm)
    if not calls:
        return 0
    sequence = _Sequence(calls)
    repeats = sequence.find_repeats(0, len(calls))
    if repeats:
        _rebuild(gm, sequence, repeats)
    spared = sum((r.times - 1) * sequence.size(r) for r in repeats)
    context.count("outline_repeats", spared)
    return spared


def _calls(gm: fx.GraphModule) -> list[fx.Node]:
    """The calls that are no views, in order; none if the graph is to be left whole."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        dynamic = isinstance(value, torch.Tensor) and not all(isinstance(s, int) for s in value.shape)
        if dynamic or is_size(node) or writes_argument(node):
            return []
        if is_view(node) and len(node.all_input_nodes) != 1:
            return []
        if node.op == "get_attr" and not isinstance(getattr(gm, str(node.target), None), torch.Tensor):
            return []  # A graph for a higher-order operator, which must stay beside it.
    return [n for n in gm.graph.nodes if n.op == "call_function" and not is_view(n)]


class _Sequence:
    """The calls of a graph, what each does and reads, and when its result is read last."""

    def __init__(self, calls: list[fx.Node]) -> None:
        self.calls = calls
        self.position = {node: i for i, node in enumerate(calls)}
        numbers: dict[Hashable, int] = {}
        self.kinds = [numbers.setdefault(_kind(node), len(numbers)) for node in calls]
        self.reads = [_reads(node) for node in calls]
        self.last_reader = _last_readers(calls, self.position, self.reads)
        self.crossing_bytes = _crossing_bytes(calls, self.last_reader)

    def find_repeats(self, start: int, stop: int) -> list[_Repeat]:
        """Between two positions the repeat that spares most, and those before and after it, in order."""
        best = self._best_repeat(start, stop)
        if best is None:
            return []
        return [*self.find_repeats(start, best.start), best, *self.find_repeats(best.stop, stop)]

    def _best_repeat(self, start: int, stop: int) -> _Repeat | None:
        found = map(self._wired_alike, self._candidates(start, stop))
        worthwhile = [r for r in found if r.times >= MIN_REPEATS and self.size(r) >= MIN_OPERATIONS]
        return max(worthwhile, key=lambda r: ((r.times - 1) * self.size(r), -r.period), default=None)

    def size(self, repeat: _Repeat) -> int:
        """Operations in one of the regions."""
        return sum(map(is_operation, self.calls[repeat.start : repeat.start + repeat.period]))

    def _candidates(self, start: int, stop: int) -> Iterable[_Repeat]:
        """For each period the longest stretch that equals itself shifted, begun where the fewest bytes cross."""
        kinds = self.kinds[start:stop]
        for period in range(MIN_OPERATIONS, len(kinds) // MIN_REPEATS + 1):
            first, length = _longest_run(map(operator.eq, kinds, kinds[period:]))
            if length >= period * (MIN_REPEATS - 1):
                first += start
                begin = min(range(first, first + period), key=self.crossing_bytes.__getitem__)
                yield _Repeat(begin, period, (first + length + period - begin) // period)

    def _wired_alike(self, repeat: _Repeat) -> _Repeat:
        """The longest part of ``repeat`` whose regions are wired alike."""
        groups = [len(list(group)) for _, group in itertools.groupby(map(self._wiring, repeat.regions))]
        longest = groups.index(max(groups))
        return _Repeat(repeat.start + repeat.period * sum(groups[:longest]), repeat.period, groups[longest])

    def _wiring(self, region: range) -> Hashable:
        """Where each argument comes from: a call of the region, or which of the region's inputs."""
        inputs: dict[fx.Node, int] = {}

        def wire(source: fx.Node) -> Hashable:
            position = self.position.get(source)
            if position is not None and position in region:
                return position - region.start
            return "input", inputs.setdefault(source, len(inputs)), _layout(source)

        return tuple(tuple(map(wire, self.reads[i])) for i in region)


def _kind(node: fx.Node) -> Hashable:
    """What a call does: operator, constants, views on the way to its arguments, layout of its result."""

    def spell(source: fx.Node) -> Hashable:
        return call_key(source, spell) if is_view(source) else "value"

    return call_key(node, spell), _layout(node)


def _layout(node: fx.Node) -> Hashable:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.device
    return str(type(value))


def _reads(node: fx.Node) -> list[fx.Node]:
    """What a call reads, at the far end of views, as often as it is an argument."""
    found: list[fx.Node] = []
    map_arg((node.args, node.kwargs), lambda n: found.append(view_base(n)))
    return found


def _last_readers(calls: list[fx.Node], position: dict[fx.Node, int], reads: list[list[fx.Node]]) -> list[int]:
    """For each call the position of the last call that reads its result; the graph's output comes after all."""
    last = list(range(len(calls)))
    (output,) = calls[0].graph.find_nodes(op="output")
    for i, sources in enumerate([*reads, _reads(output)]):
        for source in sources:
            if source in position:
                last[position[source]] = i
    return last


def _crossing_bytes(calls: list[fx.Node], last_reader: list[int]) -> list[float]:
    """For each position the bytes of the values made before it that are read from there on."""
    changes = [0.0] * (len(calls) + 2)
    forbidden = set()  # A call with several results is taken apart in its own region.
    for i, (node, last) in enumerate(zip(calls, last_reader, strict=True)):
        if isinstance(node.meta.get("val"), torch.Tensor):
            size = tensor_bytes([node])
            changes[i + 1] += size
            changes[last + 1] -= size
        else:
            forbidden |= set(range(i + 1, last + 1))
    return [float("inf") if i in forbidden else b for i, b in enumerate(itertools.accumulate(changes))]


def _longest_run(same: Iterable[bool]) -> tuple[int, int]:
    """Start and length of the longest run of ``True``."""
    best, start = (0, 0), 0
    for value, group in itertools.groupby(same):
        length = len(list(group))
        if value and length > best[1]:
            best = start, length
        start += length
    return best


def _rebuild(gm: fx.GraphModule, sequence: _Sequence, repeats: list[_Repeat]) -> None:
    """Put calls of submodules in the place of the graph's own calls."""
    graph = fx.Graph()
    values = {n: graph.node_copy(n) for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")}
    for name, regions in _parts(repeats, len(sequence.calls)):
        # A function has one set of results: what one of its regions gives away all do.
        leaving = sorted({i - r.start for r in regions for i in r if sequence.last_reader[i] >= r.stop})
        for region in regions:
            inside = sequence.calls[region.start : region.stop]
            outputs = [inside[i] for i in leaving]
            inputs, needed = _boundary(inside, outputs)
            if region is regions[0]:
                gm.add_submodule(name, fx.GraphModule(gm, _extract(inputs, needed, outputs), class_name=name))
            results = graph.call_module(name, tuple(values[n] for n in inputs))
            for i, node in enumerate(outputs):
                values[node] = graph.call_function(operator.getitem, (results, i))
                values[node].meta = dict(node.meta)
    (output,) = gm.graph.find_nodes(op="output")
    for node in sorted(needed_nodes([output], set(values)) - set(values)):  # The views on the way to the outputs.
        values[node] = graph.node_copy(node, values.__getitem__)
    graph.lint()
    gm.graph = graph


def _parts(repeats: list[_Repeat], length: int) -> Iterable[tuple[str, list[range]]]:
    """Name and regions of each submodule, in order."""
    position = 0
    for number, repeat in enumerate([*repeats, _Repeat(length, 1, 0)]):
        if position < repeat.start:
            yield f"between_{number}", [range(position, repeat.start)]
        if repeat.times:
            yield f"repeated_{number}", repeat.regions
        position = repeat.stop


def _boundary(inside: list[fx.Node], outputs: list[fx.Node]) -> tuple[list[fx.Node], set[fx.Node]]:
    """What a region reads from outside, in the order of reading, and all its function is made of."""
    outside = {source for node in inside for source in _reads(node)} - set(inside)
    needed = needed_nodes([*outputs, *(n for n in inside if effect(n) is not None)], outside)
    reads = (source for node in inside if node in needed for source in _reads(node))
    return list({source: None for source in reads if source in outside}), needed


def _extract(inputs: list[fx.Node], needed: set[fx.Node], outputs: list[fx.Node]) -> fx.Graph:
    """The function of a region: ``inputs`` in, the tuple ``outputs`` out."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        values[node] = placeholder_for(node, graph)
    for node in sorted(needed - set(inputs)):
        values[node] = graph.node_copy(node, values.__getitem__)
    graph.output(tuple(values[n] for n in outputs))
    graph.lint()
    return graph
