"""The verifier: what must hold after every pass and of every program, checked rather than trusted.

Runs under ``DITHOIST_VERIFY=1`` and in the tests. A failure is a bug in a pass, never in the model.
"""

from __future__ import annotations

import torch
from torch import fx

from .binding_time import BindingTime
from .effects import pinned_reason, storage_owner, writes_argument, written_memory
from .split import Program, Stage


class VerificationError(AssertionError):
    """A pass broke an invariant; the message names the node."""


def verify_graph(gm: fx.GraphModule, after: str) -> None:
    """Well-formed, and every tensor node has a fake value.

    Raises:
        VerificationError: naming the pass and the node.
    """
    try:
        gm.graph.lint()
    except RuntimeError as error:
        raise VerificationError(f"after {after}: {error}") from error
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.users and "val" not in node.meta:
            raise VerificationError(f"after {after}: {node.name} has no fake value")


def verify_program(program: Program) -> None:
    """The invariants of a split program.

    Each hoisted operation is pure; a stage reads only graph inputs no later than itself and values that
    earlier stages hold; no value is held that nobody reads; no held value, nor a view of one, leaves the body.

    Raises:
        VerificationError: naming the stage and the node.
    """
    available = set(program.placeholders)
    read: set[str] = set()
    made: set[str] = set()
    for stage in (*program.stages, program.body):
        where = f"in the {stage.time.label} stage"
        for name in stage.inputs:
            if name not in available:
                raise VerificationError(f"{where}: {name} is not known yet")
            label = program.labels.get(name, BindingTime.MODEL)
            if label | stage.time != stage.time:
                raise VerificationError(f"{where}: reads {name}, which is known later ({label.label})")
        if stage is not program.body:
            for node in stage.module.graph.nodes:
                reason = pinned_reason(node)
                if reason is not None:
                    raise VerificationError(f"{where}: {node.name} must not be hoisted: {reason}")
        read.update(stage.inputs)
        made.update(stage.outputs)
        available.update(stage.outputs)
    if program.eager_body is not None:
        _verify_writes(program.eager_body, available)
        read.update(program.eager_body.inputs)
    if unread := made - read:
        raise VerificationError(f"held and never read: {sorted(unread)}")
    (output,) = program.body.module.graph.find_nodes(op="output")
    for node in output.all_input_nodes:
        owner = storage_owner(node)
        if owner.op == "placeholder" and owner.name in made and isinstance(owner.meta["val"], torch.Tensor):
            raise VerificationError(f"in the body: output {node.name} shares memory with held {owner.name}")


def _verify_writes(body: Stage, available: set[str]) -> None:
    """Everything written in place was allocated in the body."""
    for name in body.inputs:
        if name not in available:
            raise VerificationError(f"in the lowered body: {name} is not known")
    for node in body.module.graph.nodes:
        if writes_argument(node):
            owner = written_memory(node)
            if owner.op != "call_function":
                raise VerificationError(f"in the lowered body: {node.name} writes {owner.name}, which is not its own")
