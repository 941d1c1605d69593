"""The masks of real denoisers: which are padding, which are segments, and why the others are neither."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from torch import fx

from dithoist.models.small import DENOISERS, Sizes, build_denoiser, example_calls
from dithoist.passes import PASSES, PassContext, attention_mask, find_attention_masks
from dithoist.runtime.hollow import capture


@dataclass(frozen=True)
class Masks:
    """Of one family.

    Attributes:
        padding: attentions whose mask is key padding.
        segments: attentions whose mask keeps segments apart.
        tables: names of the nodes that are key masks or segment ids.
        refused: why other masks are neither, as far as it matters.
    """

    padding: int = 0
    segments: int = 0
    tables: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


NOT_EXACT = "(aten.mul.Tensor) may be other numbers than 0 and -inf"
FAMILIES = {
    "ideogram-4": Masks(segments=2, tables=("segment_ids",)),
    "qwen-image": Masks(2, tables=("cat_6",)),
    "bria-fibo": Masks(4, tables=("joint_attention_kwargs",)),
    "krea-2": Masks(3, tables=("cat_1", "encoder_attention_mask")),
    "ernie-image": Masks(2, tables=("cat_5",)),
    "prx": Masks(2, tables=("cat_5",)),
    "kandinsky-6": Masks(6, tables=("encoder_attention_mask",)),
    "longcat-audio": Masks(4, tables=("attention_mask", "encoder_attention_mask")),
    "motif-video": Masks(4, tables=("constant_pad_nd",)),
    # The refiner's mask hides padded queries as well, all but their first key.
    "hunyuan-video": Masks(4, tables=("masked_fill",), refused=("(aten.select_scatter.default) depends on the query",)),
    # (1 - mask) * -10000.
    "pixart": Masks(refused=(NOT_EXACT,)),
    "sana": Masks(refused=(NOT_EXACT,)),
    "ltx-video": Masks(refused=(NOT_EXACT,)),
    # A product of float masks, added to the scores: it hides nothing.
    "chroma": Masks(refused=(NOT_EXACT,)),
    "kandinsky-prior": Masks(refused=("causal_attention_mask is given as numbers, which may be any",)),
    "ace-step": Masks(refused=("e+38 is not -inf: a row of such keys alone still attends to them",)),
    "sd3": Masks(),
    "wan": Masks(),
}


def analysed(name: str) -> tuple[fx.GraphModule, PassContext]:
    """The graph of a call, after the passes and the analysis."""
    module = build_denoiser(name)
    call = example_calls(name, module, Sizes(batch=2), steps=1)[0]
    gm, inputs = capture(module, call, DENOISERS[name].class_name)
    context = PassContext({i.node: i.label for i in inputs}, verify=True)
    for run in PASSES:
        run(gm, context)
    context.notes.clear()
    find_attention_masks(gm, context)
    return gm, context


@pytest.mark.parametrize("name", FAMILIES)
def test_masks_of_a_family(name: str) -> None:
    gm, context = analysed(name)
    expected = FAMILIES[name]
    masks = [mask for mask in map(attention_mask, gm.graph.nodes) if mask is not None]
    kinds = Counter(mask.kind for mask in masks)
    assert (kinds["key padding"], kinds["segments"]) == (expected.padding, expected.segments)
    tables = sorted({read.node.name for mask in masks for read in mask.keys + mask.segments})
    assert tables == sorted(expected.tables)
    assert len(context.notes) == len(expected.refused)
    assert all(reason in note for reason, note in zip(expected.refused, context.notes, strict=True)), context.notes
