"""Properties that bite: a deliberately wrong variant of each pass and rule, and the tests that catch it.

Each mutant breaks one rule that legality rests on; the case beside it must fail with the mutant in place and
hold without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import test_equivalence_property as equivalence
import torch
from graphs import capture, context, staged_graph
from hypothesis import HealthCheck, find, settings
from hypothesis.errors import NoSuchExample
from random_graphs import bits_equal
from torch import nn
from twins import TinyDit, Twins, tiny_inputs

from dithoist import passes
from dithoist.passes import (
    binding_time,
    canonicalize,
    copies,
    cse,
    cut,
    dead_code,
    effects,
    masked_fill,
    operators,
    outline,
    split,
)  # fmt: skip
from dithoist.runtime import identity, staged

_stage = split._stage


def _forgetful_stage(*args: Any) -> split.Stage:
    return dataclasses.replace(_stage(*args), depends=())


_unverified = mock.patch.object(passes, "verify_program", return_value=None)


def property_fails(examples: int = 300) -> bool:
    """Whether the equivalence property finds a counterexample."""

    def wrong(case: equivalence.Case) -> bool:
        try:
            equivalence.assert_same_history(case, equivalence.stage(case))
        except Exception:
            return True
        return False

    options = settings(
        max_examples=examples, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck), phases=[p for p in settings().phases if p.name == "generate"],
    )  # fmt: skip
    try:
        find(equivalence.cases(), wrong, settings=options)
    except NoSuchExample:
        return False
    return True


def fails(check: Callable[[], None]) -> bool:
    try:
        check()
    except (AssertionError, RuntimeError):
        return True
    return False


@pytest.mark.parametrize(
    "mutant",
    [
        mock.patch.object(effects, "is_random", return_value=False),
        mock.patch.object(split, "_copy_held_outputs", return_value=None),
        mock.patch.object(identity.InputIdentity, "token", return_value=0),
        mock.patch.object(split, "_stage", _forgetful_stage),
    ],
    ids=[
        "random work is hoisted",
        "held outputs leave uncopied",
        "every request is the same",
        "keys leave out the inputs",
    ],
)
def test_the_equivalence_property_catches(mutant: Any) -> None:
    with _unverified, mutant:
        assert property_fails()


def fill_of(function: Callable[..., torch.Tensor], **mutant: Any) -> Callable[[], None]:
    """Canonicalise and compare with the model on NaN, infinities and zeros of both signs."""
    x = torch.tensor([[float("nan"), float("inf"), -1.0], [-0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    mask = torch.tensor([True, True, False])

    def check() -> None:
        gm = capture(function, x, mask)
        canonicalize.canonicalize_graph(gm, context())
        gm.recompile()
        assert bits_equal(gm(x, mask)[0], function(x, mask))

    return check


def scale(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y[m] *= 0.0
    return y


def accumulated(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return (x + 1).index_put((m,), torch.ones(()), accumulate=True)


def scale_becomes_fill(values: Any, x: Any, indices: Any) -> Any:
    return None if _exact_chain(values, x, indices) is None else []


_exact_chain = canonicalize._exact_chain


def test_canonicalisation_that_turns_a_scale_into_nothing() -> None:
    check = fill_of(scale)
    check()
    with mock.patch.object(canonicalize, "_exact_chain", scale_becomes_fill):
        assert fails(check)


def test_canonicalisation_that_overlooks_accumulation() -> None:
    check = fill_of(accumulated)
    check()
    with mock.patch.object(canonicalize, "any", return_value=False, create=True):
        assert fails(check)


def run_pass(run: Callable[..., int], function: Callable[..., Any], *args: torch.Tensor) -> Callable[[], None]:
    def check() -> None:
        gm = capture(function, *args)
        run(gm, context())
        gm.recompile()
        outputs = []
        for call in (gm, function):
            torch.manual_seed(0)
            outputs.append([call(*args)] if call is function else gm(*args))
        for a, b in zip(*outputs, strict=True):
            assert bits_equal(a, b)

    return check


def test_cse_that_compares_constants_by_equality() -> None:
    check = run_pass(
        passes.eliminate_common_subexpressions,
        lambda x: torch.stack([1 / (x * 0.0), 1 / (x * -0.0)]),
        torch.ones(2),
    )
    check()
    with mock.patch.object(cse, "call_key", lambda n: str((n.target, n.args)).replace("-0.0", "0.0")):
        assert fails(check)


def test_cse_that_merges_random_draws() -> None:
    check = run_pass(
        passes.eliminate_common_subexpressions, lambda x: torch.rand_like(x) - torch.rand_like(x), torch.ones(2)
    )
    check()
    with mock.patch.object(cse, "effect", return_value=None):
        assert fails(check)


def test_dead_code_elimination_that_drops_a_draw() -> None:
    """The dropped draw shifts what every later one gives."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def model(x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        return x + torch.rand(2)

    def check() -> None:
        gm = make_fx(model, tracing_mode="fake")(torch.ones(2))
        passes.eliminate_dead_code(gm, context())
        gm.recompile()
        torch.manual_seed(0)
        expected = model(torch.ones(2))
        torch.manual_seed(0)
        assert bits_equal(gm(torch.ones(2)), expected)

    check()
    with mock.patch.object(dead_code, "_impure", lambda node: node.op in ("placeholder", "output")):
        assert fails(check)


def loop(edit: Callable[[nn.Module], object] | None = None, **options: Any) -> Callable[[], None]:
    """Two generations of the tiny DiT, weights edited between them."""

    def check() -> None:
        twins = Twins(TinyDit(), **options)
        for seed in (0, 1):
            for step in (2.0, 1.0):
                twins.check(**tiny_inputs(seed, step))
            if edit is not None:
                with torch.no_grad():
                    twins.both(edit)
        for step in (2.0, 1.0):
            twins.check(**tiny_inputs(0, step))

    return check


def edit_data(module: nn.Module) -> None:
    module.text_proj.weight.data.add_(1)  # type: ignore[operator, union-attr]


@pytest.mark.parametrize(
    ("check", "mutant"),
    [
        (loop(edit_data), mock.patch.object(identity, "_contents", side_effect=lambda weights: [0] * len(weights))),
        (
            loop(lambda m: m.text_proj.weight.mul_(2)),
            mock.patch.object(staged.WeightsIdentity, "check", return_value=[]),
        ),
        (loop(), mock.patch.object(identity, "same_bits", side_effect=lambda a, b: a.shape == b.shape)),
    ],
    ids=["no hash of the weights", "no check of the weights", "snapshots compared by shape"],
)
def test_identity_rules_are_needed(check: Callable[[], None], mutant: Any) -> None:
    check()
    with mutant, mock.patch.object(identity, "SMALL_BYTES", 0):
        assert fails(check)


def test_copies_that_only_look_like_the_original() -> None:
    check = run_pass(
        passes.eliminate_copies, lambda x: (s := x.sin(), torch.cat([s[1:], s[:1]]).cos())[1], torch.arange(6.0)
    )
    check()
    with mock.patch.object(copies, "_covers", return_value=True):
        assert fails(check)


def test_outlining_that_does_not_look_at_wires() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        for i in range(4):
            a, b = x.sin(), x.cos()
            x = (a - b if i % 2 else b - a).exp()
        return x

    check = run_pass(passes.outline_repeats, model, torch.linspace(0, 1, 6))
    with mock.patch.object(outline, "MIN_OPERATIONS", 2):
        check()
        with mock.patch.object(outline._Sequence, "_wiring", return_value=()):
            assert fails(check)


def test_a_cut_that_recomputes_more_than_views_changes_no_number_but_is_counted() -> None:
    """Making matrix products again is legal and useless: the counts, not the bits, must catch it."""
    twins = Twins(TinyDit())
    twins.check(**tiny_inputs())
    kept = twins.report.graphs[0].by_time["step"].operations
    with mock.patch.object(cut, "is_view", lambda node: not cut.is_input(node)):
        lazy = Twins(TinyDit())
        lazy.check(**tiny_inputs())
        assert lazy.report.graphs[0].by_time["step"].operations > kept


def in_place(function: Callable[..., torch.Tensor]) -> Callable[[], None]:
    """Lower with a mask known before the step, run, and compare; the input must not be written."""
    x, mask = torch.arange(48.0).view(2, 3, 8), torch.tensor([[True, False, True], [False, False, True]])

    def check() -> None:
        ctx = context(x="step", m="request")
        ctx.in_place = True
        gm = capture(function, x, mask)
        arguments = {"x": x.clone(), "m": mask}
        actual = staged_graph(gm, ctx)([arguments[n.name] for n in gm.graph.find_nodes(op="placeholder")])[0]
        assert bits_equal(actual, function(x, mask))
        assert bits_equal(arguments["x"], x)

    return check


_leading = masked_fill._leading


@pytest.mark.parametrize(
    ("check", "mutant"),
    [
        (
            in_place(lambda x, m: (y := x + 1).masked_fill(m.unsqueeze(-1), 0.0) + y),
            mock.patch.object(masked_fill, "_illegal", return_value=None),
        ),
        (
            in_place(lambda x, m: x.masked_fill(m.unsqueeze(-1), 0.0) + 1),
            mock.patch.object(masked_fill, "_illegal", return_value=None),
        ),
        (
            in_place(lambda x, m: (x + 1).masked_fill(m[:1].unsqueeze(-1), 0.0) + 1),
            mock.patch.object(masked_fill, "_leading", side_effect=lambda mask, shape: _leading(mask, shape) - 1),
        ),
        (
            in_place(lambda x, m: (x + 1).masked_fill(m.unsqueeze(-1), 0.0) + 1),
            mock.patch.object(operators, "_as_rows", side_effect=lambda x, leading: x.view(-1, 4)),
        ),
    ],
    ids=["last use ignored", "inputs written", "wrong leading dimensions", "wrong rows"],
)
def test_in_place_fills_that_break_a_rule(check: Callable[[], None], mutant: Any) -> None:
    check()
    with _unverified, mutant:
        assert fails(check)


def test_the_verifier_catches_a_write_to_an_input() -> None:
    check = in_place(lambda x, m: x.masked_fill(m.unsqueeze(-1), 0.0) + 1)
    with (
        mock.patch.object(masked_fill, "_illegal", return_value=None),
        pytest.raises(passes.VerificationError, match="writes x, which is not its own"),
    ):
        check()


def test_the_verifier_catches_impure_work_in_a_hoisted_stage() -> None:
    gm = capture(lambda x, p: x + torch.rand_like(p), torch.ones(2), torch.ones(2))
    with (
        mock.patch.object(binding_time, "pinned_reason", return_value=None),
        pytest.raises(passes.VerificationError, match="must not be hoisted: random"),
    ):
        passes.build_program(gm, context(x="step", p="request"))
