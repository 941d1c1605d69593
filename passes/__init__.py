"""Passes over ``torch.fx`` graphs of functional ATen operations, and the order they run in.

Read :data:`PASSES` first. A pass is one file with one public function
``(GraphModule, PassContext) -> int`` that edits the graph in place and returns how much it changed; its module
docstring argues why that is legal. Nothing here knows of diffusers or of run time.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from .binding_time import TIMES, BindingTime, binding_times, format_binding_times
from .canonicalize import canonicalize_graph
from .context import PassContext
from .copies import eliminate_copies
from .cse import eliminate_common_subexpressions
from .dead_code import eliminate_dead_code
from .masked_fill import lower_masked_fill
from .outline import outline_repeats
from .pack_attention import pack_attention
from .split import Program, Stage, split_by_binding_time
from .verify import VerificationError, verify_graph, verify_program

Pass = Callable[[fx.GraphModule, PassContext], int]

PASSES: tuple[Pass, ...] = (
    canonicalize_graph,
    eliminate_copies,
    eliminate_common_subexpressions,
    eliminate_dead_code,
    binding_times,
    pack_attention,
)
"""What runs over a captured graph, in order; then it is split, and the body lowered."""


def build_program(gm: fx.GraphModule, context: PassContext, passes: tuple[Pass, ...] = PASSES) -> Program:
    """Run the passes over ``gm`` in place and split it by binding time.

    Args:
        gm: a functional graph of ATen operations whose nodes carry fake values in ``meta["val"]``, such as
            AOTAutograd's inference graph.
        context: labels of the placeholders, and where to report.

    Raises:
        VerificationError: with ``context.verify``, if a pass broke an invariant.
    """
    for run in passes:
        name = run.__name__
        if context.dump:
            context.dump(f"{name}_before", gm)
        context.count(name, run(gm, context))
        if context.dump:
            context.dump(f"{name}_after", gm)
        if context.verify:
            verify_graph(gm, after=name)
    program = lower_masked_fill(split_by_binding_time(gm, context), context)
    if context.dump:
        for stage in (*program.stages, program.body):
            context.dump(f"split_{stage.time.label}{'' if stage.capture_safe else '_rows'}", stage.module)
        if program.eager_body:
            context.dump("lower_masked_fill", program.eager_body.module)
    if context.verify:
        verify_program(program)
    return program


__all__ = [
    "PASSES",
    "TIMES",
    "BindingTime",
    "Pass",
    "PassContext",
    "Program",
    "Stage",
    "VerificationError",
    "binding_times",
    "build_program",
    "canonicalize_graph",
    "eliminate_common_subexpressions",
    "eliminate_copies",
    "eliminate_dead_code",
    "format_binding_times",
    "lower_masked_fill",
    "outline_repeats",
    "pack_attention",
    "split_by_binding_time",
    "verify_graph",
    "verify_program",
]
