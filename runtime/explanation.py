"""What :func:`dithoist.explain` returns, and how it prints."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from ..passes import BindingTime
from ..passes.binding_time import HOISTED
from .report import Printable, human


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
class Explanation(Printable):
    """What :func:`dithoist.explain` returns. ``str()`` prints tables.

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
        backend: the program is for.
        parameters: elements of all parameters and buffers.
        parameters_unread: elements that the call does not read at all.
        bytes_released: of the parameters and buffers that only hoisted work reads.
        captured_operations: operations of one call as captured.
        captured_flops: their FLOPs.
        captured_host_syncs: calls among them that make the host wait.
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
    backend: str
    parameters: int
    parameters_unread: int
    bytes_released: int
    captured_operations: int
    captured_flops: int
    captured_host_syncs: list[str]
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

    def _tables(self, console: Console) -> None:
        """The work by binding time, what could be released, and the largest hoisted work."""
        _print(console, self)


def _print(console: Console, found: Explanation) -> None:
    frames = f"{found.frames} frames, " if found.frames > 1 else ""
    console.print(
        f"[bold]{found.name}[/] ({found.module}, {found.dtype}, backend={found.backend}), "
        f"{found.width} x {found.height}, {frames}{found.tokens} tokens, prompt {found.prompt}, batch {found.batch}",
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
        f"  host reads found: {', '.join(found.captured_host_syncs) or 'none'}; "
        f"left in the body: {', '.join(found.body_host_syncs) or 'none'}",
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
