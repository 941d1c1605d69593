"""``explain``: what would be hoisted out of a published denoiser's loop, with no weights and no run.

The module is built without memory, captured as ``compile_denoiser`` would capture it on a CPU, and taken through the
same passes. What the program costs is then read off its graphs.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import fx, nn

from ..passes import TIMES, BindingTime, PassContext, Program, build_program
from ..passes import cost as costs
from ..passes.binding_time import HOISTED, binding_time
from ..passes.cut import is_input
from ..passes.effects import view_base
from . import env
from .backend import module_path
from .choose import Choice, choose
from .report import human
from .settings import suggest_arguments

LARGEST = 10


@dataclass(frozen=True)
class TimeWork:
    """The work of one binding time.

    Attributes:
        operations: calls that do work (no views).
        flops: of matrix products, convolutions and attention, each time it runs.
        parameters_read: elements of parameters and buffers that it reads.
        parameters_last_read: of these, the elements that no later time reads. For the hoisted times they are not
            needed inside the loop; for the body they are all that is.
        bytes_held: of what it makes for later times; for times that depend on the schedule, of one step.
        bytes_held_uncut: the same if every value that a later time reads were held as it is.
    """

    operations: int
    flops: int
    parameters_read: int
    parameters_last_read: int
    bytes_held: int
    bytes_held_uncut: int


@dataclass(frozen=True)
class HoistedWork:
    """Hoisted work of one submodule, or of all that differ only in the number of their block.

    Attributes:
        module: its path, with ``*`` for the number of the block where there are several.
        binding_time: when it runs.
        modules: how many there are.
        operations: of all of them.
        flops: of all of them.
    """

    module: str
    binding_time: str
    modules: int
    operations: int
    flops: int


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` returns. ``str()`` prints tables.

    Attributes:
        name: what was asked for.
        module: class name of the denoiser.
        height: of the picture, in pixels.
        width: in pixels.
        frames: of the video; 1 for a picture.
        tokens: latent tokens.
        batch: pictures in one call.
        prompt: text tokens, padding included.
        dtype: of the parameters and of most inputs.
        parameters: elements of all parameters and buffers.
        parameters_unread: elements that the call does not read at all.
        bytes_released: of the parameters and buffers that only hoisted work reads.
        captured_operations: operations of one call as captured.
        captured_flops: their FLOPs.
        by_time: the work by binding time (``"model"``, ``"request"``, ... ``"step"``).
        body_host_syncs: calls left in the body that make the host wait.
        largest: hoisted work with the most FLOPs.
        notes: what a pass could not do, and why.
    """

    name: str
    module: str
    height: int
    width: int
    frames: int
    tokens: int
    batch: int
    prompt: int
    dtype: str
    parameters: int
    parameters_unread: int
    bytes_released: int
    captured_operations: int
    captured_flops: int
    by_time: dict[str, TimeWork]
    body_host_syncs: list[str]
    largest: list[HoistedWork]
    notes: list[str]

    @property
    def body_parameters(self) -> int:
        """Elements of parameters and buffers that have to stay while the loop runs."""
        return self.by_time[BindingTime.STEP.label].parameters_last_read

    @property
    def schedule_share(self) -> float:
        """Share of the parameters that only work reads that depends on the timestep and not on the latents."""
        return self._share(BindingTime.SCHEDULE, BindingTime.REQUEST_SCHEDULE)

    @property
    def request_share(self) -> float:
        """Share of the parameters that only work reads that depends on neither."""
        return self._share(BindingTime.MODEL, BindingTime.REQUEST)

    @property
    def hoisted_flops_share(self) -> float:
        """Share of a call's FLOPs that the body does not do any more."""
        return 1 - self.by_time[BindingTime.STEP.label].flops / max(1, self.captured_flops)

    @property
    def bytes_per_step(self) -> int:
        """Bytes that one step of the schedule table holds."""
        return sum(self._row(t).bytes_held for t in HOISTED if t & BindingTime.SCHEDULE)

    def _share(self, *times: BindingTime) -> float:
        return sum(self._row(t).parameters_last_read for t in times) / max(1, self.parameters)

    def _row(self, time: BindingTime) -> TimeWork:
        return self.by_time.get(time.label, TimeWork(0, 0, 0, 0, 0, 0))

    def to_dict(self) -> dict[str, Any]:
        """The whole tree as plain dictionaries and lists."""
        return dataclasses.asdict(self)

    def to_json(self, indent: int | None = 2) -> str:
        """The whole tree as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=112, record=True)
        _print(console, self)
        return "\n".join(line.rstrip() for line in console.export_text().rstrip().splitlines())


@suggest_arguments
def explain(
    model: str | Path | Mapping[str, Any],
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    batch: int = 1,
    prompt: int | None = None,
) -> Explanation:
    """What dithoist would hoist out of a denoiser's loop, without its weights.

    Args:
        model: a published model (:data:`dithoist.models.published.PUBLISHED`), a ``config.json`` of a diffusers
            transformer or what is in it, or a class as ``"package.module.Class"``: one of diffusers, or derived from
            one.
        config: configuration of such a class, where it is not the class's defaults.
        height: of the picture in pixels; default as for the published model of that class.
        width: in pixels.
        frames: of the video, 1 for a picture.
        batch: pictures in one call.
        prompt: text tokens, padding included.

    Raises:
        ValueError: no such model or class, or a size it cannot have; the message names the known ones.
        RuntimeError: the class does not become one graph.
        ModuleNotFoundError: diffusers is not installed.
    """
    choice = choose(model, config, height=height, width=width, frames=frames, batch=batch, prompt=prompt)
    from .hollow import capture, hollow_call, hollow_module  # Needs diffusers.

    module = hollow_module(choice.build, torch.bfloat16)
    granted = choice.prepare(module)
    aot, inputs = capture(module, hollow_call(lambda: choice.call(module)), choice.family)
    captured = costs.operations(aot), costs.flops(aot)
    context = PassContext({i.node: i.label for i in inputs}, verify=env.verify())
    if granted:
        context.note("capture", granted)
    program = build_program(aot, context)
    return _explanation(choice, module, aot, {i.node: i.name for i in inputs}, program, context, captured)


def _explanation(
    choice: Choice,
    module: nn.Module,
    analysed: fx.GraphModule,
    names: Mapping[str, str],
    program: Program,
    context: PassContext,
    captured: tuple[int, int],
) -> Explanation:
    weights = dict([*module.named_parameters(), *module.named_buffers()])
    last: dict[str, BindingTime] = {}
    for stage in (*program.stages, program.body):
        last |= {names[i]: stage.time for i in stage.inputs if names.get(i) in weights}
    hoisted = [weights[n] for n, time in last.items() if time != BindingTime.STEP]
    total = sum(w.numel() for w in weights.values())
    return Explanation(
        name=choice.name,
        module=type(module).__name__,
        height=choice.height,
        width=choice.width,
        frames=choice.frames,
        tokens=choice.sizes.tokens,
        batch=choice.sizes.batch,
        prompt=choice.sizes.prompt,
        dtype=str(torch.bfloat16).removeprefix("torch."),
        parameters=total,
        parameters_unread=total - sum(weights[n].numel() for n in last),
        bytes_released=sum(w.numel() * w.element_size() for w in hoisted),
        captured_operations=captured[0],
        captured_flops=captured[1],
        by_time=_by_time(program, analysed, {i: weights[n].numel() for i, n in names.items() if n in weights}, last, names),
        body_host_syncs=costs.host_reads(program.body.module),
        largest=_largest(program),
        notes=list(context.notes),
    )


def _by_time(
    program: Program,
    analysed: fx.GraphModule,
    sizes: Mapping[str, int],
    last: Mapping[str, BindingTime],
    names: Mapping[str, str],
) -> dict[str, TimeWork]:
    stages = {s.time: s for s in (*program.stages, program.body)}
    uncut = _uncut(analysed)
    rows = {}
    for time in TIMES:
        nodes = [n for n in uncut if binding_time(n) == time]
        stage = stages.get(time)
        if stage is None:
            if nodes:  # Nothing is held: later times make it again.
                rows[time.label] = TimeWork(0, 0, 0, 0, 0, costs.tensor_bytes(nodes))
            continue
        read = [i for i in stage.inputs if i in sizes]
        held = stage.module.graph.find_nodes(op="output")[0].all_input_nodes if stage.outputs else []
        rows[time.label] = TimeWork(
            operations=costs.operations(stage.module),
            flops=costs.flops(stage.module),
            parameters_read=sum(sizes[i] for i in read),
            parameters_last_read=sum(sizes[i] for i in read if last[names[i]] == time),
            bytes_held=costs.tensor_bytes(held),
            bytes_held_uncut=costs.tensor_bytes(nodes),
        )
    return rows


def _uncut(analysed: fx.GraphModule) -> list[fx.Node]:
    """The values that would be held if each were held that a later time reads."""

    def read_later(node: fx.Node) -> bool:
        return any(u.op == "output" or binding_time(u) != binding_time(node) for u in node.users)

    hoisted = (n for n in analysed.graph.nodes if n.op == "call_function" and binding_time(n) != BindingTime.STEP)
    return [n for n in hoisted if not is_input(view_base(n)) and read_later(n)]


def _largest(program: Program) -> list[HoistedWork]:
    found: dict[tuple[str, BindingTime], list[fx.Node]] = {}
    for stage in program.stages:
        for node in filter(costs.is_operation, stage.module.graph.nodes):
            found.setdefault((_any_block(_module(node)), stage.time), []).append(node)
    works = []
    for (path, time), nodes in found.items():
        modules = {_module(n) for n in nodes}
        work = HoistedWork(
            module=path if len(modules) > 1 else next(iter(modules)),
            binding_time=time.label,
            modules=len(modules),
            operations=len(nodes),
            flops=sum(map(costs.node_flops, nodes)),
        )
        works.append(work)
    return sorted(works, key=lambda w: (w.flops, w.operations), reverse=True)[:LARGEST]


def _any_block(path: str) -> str:
    """``blocks.*.norm.linear`` for ``blocks.3.norm.linear``; a number at the end of a longer path is no block's."""
    return re.sub(r"\.\d+(?=\.)|(?<=^)(\w+)\.\d+$", lambda m: f"{m[1] or ''}.*", path)


def _module(node: fx.Node) -> str:
    """Path of the submodule a node comes from; empty for the denoiser itself."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    path = module_path(stack[-1][0]) if stack else ""
    return "" if path == "L['self']" else path


def _print(console: Console, found: Explanation) -> None:
    frames = f"{found.frames} frames, " if found.frames > 1 else ""
    console.print(
        f"[bold]{found.name}[/] ({found.module}, {found.dtype}), {found.width} x {found.height}, {frames}"
        f"{found.tokens} tokens, prompt {found.prompt}, batch {found.batch}",
        highlight=False,
    )
    table = Table()
    table.add_column("binding time")
    for column in ("operations", "FLOPs", "parameters read", "held", "held uncut"):
        table.add_column(column, justify="right")
    for label, row in found.by_time.items():
        step = " a step" if "schedule" in label else ""
        table.add_row(
            "body (step)" if label == BindingTime.STEP.label else label,
            str(row.operations),
            human(row.flops, 1000, ""),
            human(row.parameters_read, 1000, ""),
            human(row.bytes_held) + step,
            human(row.bytes_held_uncut) + step,
        )
    console.print(table)
    body = found.by_time[BindingTime.STEP.label]
    console.print(
        f"  of {_billions(found.parameters)} parameters the body needs {_billions(found.body_parameters)}; "
        f"only schedule work reads {found.schedule_share:.1%}, only request work {found.request_share:.1%}\n"
        f"  {human(found.bytes_released)} of weights could be released inside the loop\n"
        f"  {found.captured_operations} operations a step before, {body.operations} now; "
        f"{found.hoisted_flops_share:.2%} of the FLOPs hoisted\n"
        f"  host reads left in the body: {', '.join(found.body_host_syncs) or 'none'}",
        highlight=False,
    )
    largest = Table(title="largest hoisted work", title_justify="left")
    largest.add_column("module", overflow="fold")
    largest.add_column("binding time")
    for column in ("modules", "operations", "FLOPs"):
        largest.add_column(column, justify="right")
    for work in found.largest:
        cells = (str(work.modules), str(work.operations), human(work.flops, 1000, ""))
        largest.add_row(work.module or "(the denoiser's own)", work.binding_time, *cells)
    console.print(largest)
    for line in found.notes:
        console.print(f"  note: {line}", highlight=False)


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} B"
