"""Where the tokens of padded rows lie once they are packed: what variable-length attention is given beside q, k and v.

Packed tokens stand one sequence after another without padding. All of it is made on the host and sent from there: a key
mask or segment ids on a device cost one wait, for the mask itself; lengths and ranges, which the host knows, cost none.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Varlen:
    """Packed sequences of tokens of ``B`` rows, each padded to ``S``. A flat position is ``row * S + column``.

    Attributes:
        cu_seqlens: int32 ``[n_sequences + 1]``, where each sequence starts among the packed tokens, and at the end
            their number. By mask, lengths or ranges a row is a sequence, so ``[B + 1]``; one of a row without tokens is
            empty.
        indices: int64 ``[n_valid]``, the flat position of each packed token.
        inverse: int32 ``[B * S]``, the packed token at each flat position, -1 for padding.
        max_seqlen: tokens of the longest sequence, a number of the host; 0 if there are none.
    """

    cu_seqlens: torch.Tensor
    indices: torch.Tensor
    inverse: torch.Tensor
    max_seqlen: int


def from_key_mask(mask: torch.Tensor) -> Varlen:
    """By a boolean ``[B, S]``, true for tokens and false for padding.

    Raises:
        TypeError: ``mask`` is not boolean. Numbers could be a mask to add, which has its zeros elsewhere.
        ValueError: ``mask`` has other dimensions, or more elements than int32 counts.
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be boolean, true for tokens, but is {mask.dtype}")
    _check_shape("mask", mask.shape)
    host = mask.cpu()
    return _varlen(host.sum(dim=1).tolist(), host.flatten().nonzero().squeeze(1), host.numel(), mask.device)


def from_lengths(lengths: Sequence[int], width: int, device: torch.device | str = "cpu") -> Varlen:
    """By the number of tokens each row starts with; ``width`` is ``S``.

    Raises:
        ValueError: an element of ``lengths`` is none of a row of ``width``, or int32 cannot count the positions.
    """
    for row, length in enumerate(lengths):
        if not 0 <= length <= width:
            raise ValueError(f"lengths[{row}] must be 0 to width={width}, but is {length}")
    return from_ranges([(0, length) for length in lengths], width, device)


def from_ranges(ranges: Sequence[tuple[int, int]], width: int, device: torch.device | str = "cpu") -> Varlen:
    """By the columns each row's tokens begin at and end before; ``width`` is ``S``.

    Raises:
        ValueError: an element of ``ranges`` is none of a row of ``width``, or int32 cannot count the positions.
    """
    _check_shape("ranges and width", (len(ranges), width))
    for row, (start, stop) in enumerate(ranges):
        if not 0 <= start <= stop <= width:
            raise ValueError(f"ranges[{row}] must be 0 <= start <= stop <= width={width}, but is ({start}, {stop})")
    flat = [torch.arange(row * width + start, row * width + stop) for row, (start, stop) in enumerate(ranges)]
    indices = torch.cat(flat) if flat else torch.empty(0, dtype=torch.int64)
    return _varlen([stop - start for start, stop in ranges], indices, len(ranges) * width, device)


def from_segment_ids(ids: torch.Tensor, *, padding: int | None = None) -> Varlen:
    """By integers ``[B, S]``: tokens of a row with the same id are a sequence, wherever they stand.

    Sequences are ordered by row and then by id, the tokens of one by position. Tokens whose id is ``padding`` are none.

    Raises:
        TypeError: ``ids`` are not integers. NaN would be in no segment, not even its own.
        ValueError: ``ids`` has other dimensions, or more elements than int32 counts.
    """
    if ids.dtype.is_floating_point or ids.dtype.is_complex:
        raise TypeError(f"ids must be integers, but are {ids.dtype}")
    _check_shape("ids", ids.shape)
    by_id, columns = ids.cpu().sort(dim=1, stable=True)
    rows = torch.arange(len(ids)).unsqueeze(1).expand_as(columns)
    flat = (rows * ids.shape[1] + columns).flatten()
    segments = torch.stack([rows.flatten(), by_id.flatten().long()])
    if padding is not None:
        kept = segments[1] != padding
        flat, segments = flat[kept], segments[:, kept]
    _, lengths = segments.unique_consecutive(dim=1, return_counts=True)
    return _varlen(lengths.tolist(), flat, ids.numel(), ids.device)


def _check_shape(name: str, shape: Sequence[int]) -> None:
    if len(shape) != 2:
        raise ValueError(f"{name} must be of shape [B, S], but is of {list(shape)}")
    if shape[0] * shape[1] > torch.iinfo(torch.int32).max:
        raise ValueError(f"{name} name {shape[0]} x {shape[1]} positions, more than int32 counts")


def _varlen(lengths: list[int], indices: torch.Tensor, positions: int, device: torch.device | str) -> Varlen:
    inverse = torch.full((positions,), -1, dtype=torch.int32)
    inverse[indices] = torch.arange(len(indices), dtype=torch.int32)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return Varlen(
        _sent(cu_seqlens, device), _sent(indices, device), _sent(inverse, device), max_seqlen=max(lengths, default=0)
    )


def _sent(part: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    # From memory that is not pinned it is copied before this returns, so nobody has to keep it until it has arrived.
    return part.to(device, non_blocking=True)


HIDDEN = -9984.0
"""A number added to a score that hides a key as well as ``-inf`` does, as long as the row sees another: what is left
of its weight is ``exp`` of about this, which is 0 in every dtype. It is the -10000 of many models in bfloat16."""


def mask_segments(mask: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Segments such that a query sees the keys of its own and no others, if ``mask`` says nothing else.

    That covers key padding (a row is a segment, hidden keys are in none), block-diagonal masks, and both at once; it
    does not cover causal masks, masks by head, or numbers that make a key less likely. The values decide, however the
    mask was made.

    Args:
        mask: what ``scaled_dot_product_attention`` takes: boolean, true where a key is seen, or numbers to add, 0
            there and :data:`HIDDEN` or less elsewhere; of a shape that broadcasts to ``shape``.
        shape: of the scores, ``[B, H, Q, K]``.

    Returns:
        int64 ``[B, Q]`` and ``[B, K]`` on the host, the segment of each query and of each key, -1 for a query that sees
        no key and for a key that no query sees; or ``None``.
    """
    batch, _, queries, keys = shape
    host = mask.cpu().reshape([1] * (4 - mask.ndim) + list(mask.shape))
    first = host[:, :1]
    if not all(shape) or (host.shape[1] > 1 and host.stride(1) != 0 and not torch.equal(host, first.expand_as(host))):
        return None
    seen = _seen(first[:, 0])
    if seen is None:
        return None
    seen = seen.expand(-1, -1, keys)
    found = [_segments_of_row(row) for row in seen]
    if any(row is None for row in found):
        return None
    of_queries, of_keys = (torch.stack(side) for side in zip(*(row for row in found if row is not None), strict=True))
    return of_queries.expand(batch, queries), of_keys.expand(batch, keys)


def _seen(mask: torch.Tensor) -> torch.Tensor | None:
    """Boolean ``[B, Q, K]`` of a mask without heads; ``None`` if it does more than show and hide."""
    if mask.dtype == torch.bool:
        return mask
    shown, hidden = mask == 0, mask <= HIDDEN
    if not (shown | hidden).all():  # NaN is neither.
        return None
    # A row of one number takes nothing from any key, in theory: next to a large one, scores are rounded away.
    blind = ~shown.any(dim=-1, keepdim=True)
    return None if (blind & (mask != -torch.inf)).any() else shown


def _segments_of_row(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Of boolean ``[Q, K]``, the segment of each query and of each key."""
    starts = torch.ones(len(seen), dtype=torch.bool)
    starts[1:] = (seen[1:] != seen[:-1]).any(dim=1)  # Neighbours mostly agree, which leaves little to sort.
    kinds, kind_of_start = seen[starts].unique(dim=0, return_inverse=True)
    if (kinds.sum(dim=0) > 1).any():
        return None
    of_queries = kind_of_start[starts.cumsum(0) - 1]
    of_queries = torch.where(kinds.any(dim=1)[of_queries], of_queries, -1)
    of_keys = torch.where(kinds.any(dim=0), kinds.int().argmax(dim=0), -1)
    return of_queries, of_keys
