"""Columns of padding that no row needs are cut off, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dithoist import compile_denoiser, report
from dithoist.models.padding import PADDING, Padding
from dithoist.models.small import Sizes, build_denoiser, example_calls, with_prompts
from dithoist.runtime import trim
from dithoist.runtime.trim import PARTS, Trim

TEXT = Padding("mask", ("text",))
GIVEN_POSITIONS = Padding("mask", ("text", "positions"), leading=True, result=True)


def tokens(*rows: str) -> Tensor:
    """``1`` for a token, ``.`` for padding."""
    return torch.tensor([[c == "1" for c in row] for row in rows])


def cut(padding: Padding, mask: Any, **others: Any) -> tuple[dict[str, Any], Any, Trim]:
    trimmer = Trim([padding], [])
    (args, kwargs), finish = trimmer((), {"mask": mask, **others})
    assert args == ()
    return kwargs, finish, trimmer


@given(st.lists(st.lists(st.booleans(), min_size=40, max_size=40), min_size=1, max_size=3), st.booleans())
def test_no_token_is_lost_and_little_padding_is_left_property(rows: list[list[bool]], leading: bool) -> None:
    mask = torch.tensor(rows)
    text = torch.arange(mask.numel() * 2).view(*mask.shape, 2)
    kwargs, finish, _ = cut(Padding("mask", ("text",), leading=leading, result=True), mask, text=text)
    assert kwargs["mask"].shape == kwargs["text"].shape[:2]
    assert torch.equal(kwargs["text"][kwargs["mask"]], text[mask])
    if mask.any(dim=1).all():
        columns = mask.any(dim=0).nonzero()
        needed = int(columns[-1]) + 1 - (int(columns[0]) if leading else 0)
        assert needed <= kwargs["mask"].shape[1] < needed + -(-40 // PARTS)
    back = finish(kwargs["text"]) if finish else kwargs["text"]
    assert back.shape == text.shape
    assert torch.equal(back[mask], text[mask])


def test_text_is_cut_behind_the_longest_prompt() -> None:
    mask, text = tokens("11......", "1111...."), torch.randn(2, 8, 3)
    kwargs, finish, trimmer = cut(TEXT, mask, text=text, latents="as they are")
    assert torch.equal(kwargs["text"], text[:, :4])
    assert kwargs["mask"].tolist() == tokens("11..", "1111").tolist()
    assert kwargs["latents"] == "as they are"
    assert (trimmer.tokens_run, trimmer.tokens_given) == (4, 8)
    result = torch.randn(2, 4, 3)
    assert finish(result) is result


def test_where_positions_are_given_it_is_cut_in_front_too_and_the_result_has_zeros_there() -> None:
    mask, text = tokens("....1111", "..111111"), torch.randn(2, 8, 3)
    kwargs, finish, _ = cut(GIVEN_POSITIONS, mask, text=text, positions=None)
    assert torch.equal(kwargs["text"], text[:, 2:])
    (result,) = finish((kwargs["text"],))
    assert torch.equal(result, torch.cat([torch.zeros(2, 2, 3), text[:, 2:]], dim=1))


LEFT_ALONE = {
    "no mask": None,
    "a mask for each query": torch.zeros(2, 8, 8, dtype=torch.bool),
    "all of them tokens": tokens("11111111", "1......1"),
    "a row of padding alone": tokens("11......", "........"),
    "another length than the text": tokens("11....", "1....."),
    "numbers to add": torch.where(tokens("11......", "1111...."), 0.0, -1e4),
    "an empty mask": torch.zeros(2, 0),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_is_left_alone(case: str) -> None:
    text = torch.randn(2, 8, 3)
    kwargs, finish, _ = cut(TEXT, LEFT_ALONE[case], text=text)
    assert finish is None
    assert kwargs["mask"] is LEFT_ALONE[case]
    assert kwargs["text"] is text


def test_arguments_may_be_given_by_position() -> None:
    trimmer = Trim([TEXT], ["latents", "text", "mask"])
    (args, kwargs), _ = trimmer((0, torch.randn(1, 8, 3), tokens("11......")), {"more": 1})
    assert (args[0], args[1].shape, args[2].shape, kwargs) == (0, (1, 2, 3), (1, 2), {"more": 1})


def test_on_an_accelerator_a_mask_is_read_once_and_parts_are_known_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trim, "reads_wait", lambda device: True)
    reads: list[Tensor] = []
    columns = trim._columns
    monkeypatch.setattr(trim, "_columns", lambda m, leading: reads.append(m) or columns(m, leading))
    trimmer = Trim([TEXT], [])
    branches = [{"mask": tokens(row), "text": torch.randn(1, 8, 3)} for row in ("11......", "1.......")]
    first = [trimmer((), dict(call))[0][1] for call in branches]
    again = [trimmer((), dict(call))[0][1] for call in branches]
    assert len(reads) == 2
    assert all(a[name] is b[name] for a, b in zip(first, again, strict=True) for name in a)
    branches[0]["mask"][:, 5] = True
    ((_, changed), _) = trimmer((), dict(branches[0]))
    assert (len(reads), changed["mask"].tolist()) == (3, tokens("11...1").tolist())
    trimmer.forget()
    assert trimmer((), dict(branches[1]))[0][1]["text"] is not first[1]["text"]
    with torch.inference_mode():  # Without a version counter nothing says that it is as it was.
        call = {"mask": tokens("11......"), "text": torch.randn(1, 8, 3)}
    before = len(reads)
    for _ in range(2):
        trimmer((), dict(call))
    assert len(reads) == before + 2


class NoMask(AttnProcessor2_0):  # type: ignore[misc]
    """A kernel that takes no mask, as users write them."""

    def __call__(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def unmasked_forward(module: Any) -> None:
    forward = type(module).forward
    module.forward = lambda **kwargs: forward(module, **kwargs | {"encoder_attention_mask": None})


def scaling_hook(module: Any) -> None:
    def scale(_: Any, args: Any, kwargs: Any) -> Any:
        text = kwargs["encoder_hidden_states"]
        return args, kwargs | {"encoder_hidden_states": text * torch.arange(8.0)[None, :, None]}

    module.register_forward_pre_hook(scale, with_kwargs=True)


@pytest.mark.parametrize(
    "change",
    [lambda module: module.set_attn_processor(NoMask()), unmasked_forward, scaling_hook],
    ids=["attention without masks", "a forward of its own", "a hook that knows the length"],
)
def test_a_denoiser_that_runs_other_code_than_its_class_is_not_trimmed(change: Any) -> None:
    """Before the first call, and between calls: the promise was its class's."""
    module, late, early = (build_denoiser("pixart") for _ in range(3))
    (call,) = example_calls("pixart", module, Sizes(), steps=1)
    call = with_prompts(call, PADDING["PixArtTransformer2DModel"], [2], 8)
    change(early)
    for compiled in (late, early):
        compile_denoiser(compiled, backend="eager", numerics="fast", strict=True)
    with torch.no_grad():
        late(**call)
        assert report(late).denoisers[0].tokens_run == 2
        change(module)
        change(late)
        (expected,), (of_late,), (of_early,) = (m(**call) for m in (module, late, early))
        (again,) = late(**call)
    for found in (of_late, of_early, again):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert report(early).denoisers[0].not_trimmed
    assert "padding is not cut off" in str(report(late))
