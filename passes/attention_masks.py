"""Which attention masks only say where padding is, and which only keep segments apart.

Through such a mask padded rows see the very keys that packed tokens see without one. This pass finds them and changes
nothing: it writes an :class:`AttentionMask` into the metadata of each attention whose mask is known with the model or
the request, and a note for each mask that is neither.

**What a claim says.** With ``[B, H, Q, K]`` the shape of the scores, query ``q`` of row ``b`` sees key ``k``, in every
head, exactly where each of ``keys`` holds at ``(b, k)`` and each of ``segments`` has one value at ``(b, q)`` and
``(b, k)``. Without segments it is *key padding*, otherwise *segments*.

**Why it is true**, for every value of the inputs of a functional graph:

* *Indices*. The element of a mask at ``(b, h, q, k)`` is followed back to the elements it is made of: through
  operations that move elements, each with the rule by which it does, and through operations that work element by
  element (``torch.Tag.pointwise``), whose operands are read at the same place, or at 0 of a dimension they are
  broadcast over. Whatever else made a value is not looked into: it is a leaf, of which every element may differ. So
  what a mask depends on can only be overestimated, and a mask that neither ``h`` nor ``q`` leads into is the same for
  all of them.
* *Exactness*. A key is seen as if there were no mask, or not at all: the mask is a boolean, or a number to add that can
  only be 0 or ``-inf``. That holds of constants that are such numbers, of what moves, selects or casts them, and of
  their sums. ``(1 - m) * -10000`` is refused: a key it marks keeps the weight ``exp(score - 10000 - max)``, which is 0
  only where the row sees another key, and ``m`` may be any number. So is the smallest finite number, since a row it
  covers attends to all its keys and one that ``-inf`` covers to none, and so is ``(1 - m) * -inf``, which is NaN where
  ``m`` is 1.
* *Segments*. The two sides of an equality are the same expression of the same leaves once ``q`` and ``k`` trade places;
  what is random or has effects is a leaf. Its values are integers or booleans: NaN would not even equal itself.
* *Conjunctions* of these are taken apart: ``&``, a product of booleans, a sum of masks to add, a fill or selection with
  the value that hides a key, and the negation of ``|``.

A row whose keys are all hidden stays one; what attention gives for it is for those to decide who act on the claim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .binding_time import BindingTime, binding_time
from .context import PassContext
from .cse import call_key
from .effects import effect, schema_argument

aten = torch.ops.aten


class Digit(NamedTuple):
    """A position along a dimension, or along one of those that were merged into it.

    Attributes:
        axis: of the scores, ``b``, ``h``, ``q`` or ``k``, whose position counts; empty if none does.
        size: how many positions there are.
        offset: added to it.
    """

    axis: str
    size: Any
    offset: int = 0


Index = tuple[tuple[Digit, ...], ...]
"""For each dimension the digits of the position read, most significant first; none where there is but one position."""

_AXES = "bhqk"
_ROW_AND_KEY = frozenset("bk")


@dataclass(frozen=True)
class Read:
    """``[B, K]`` values that are elements of one node.

    Attributes:
        node: the tensor.
        index: where its element for row ``b`` and key ``k`` is.
        inverted: of a key mask, whether a key is hidden where the node says it is seen.
        direct: whether the node is ``[B, K]`` as it stands.
    """

    node: fx.Node
    index: Index
    inverted: bool
    direct: bool

    def of(self, value: torch.Tensor, batch: int, keys: int) -> torch.Tensor:
        """The ``[batch, keys]`` elements, given the node's ``value``."""
        axes = {"b": torch.arange(batch).unsqueeze(1), "k": torch.arange(keys).unsqueeze(0)}
        positions = []
        for digits in self.index:
            position = torch.zeros((), dtype=torch.int64)
            for digit in digits:
                position = position * digit.size + axes.get(digit.axis, 0) + digit.offset
            positions.append(position.to(value.device))
        return value[tuple(positions)].expand(batch, keys)

    def seen(self, value: torch.Tensor, batch: int, keys: int) -> torch.Tensor:
        """Of a key mask, given the node's ``value``: boolean ``[batch, keys]``, true where the key is seen."""
        found = self.of(value, batch, keys)
        return (found if found.dtype == torch.bool else found == 0) ^ self.inverted


@dataclass(frozen=True)
class AttentionMask:
    """What is claimed of the mask of ``attention``; the module's docstring says what it means."""

    attention: fx.Node
    mask: fx.Node
    keys: tuple[Read, ...]
    segments: tuple[Read, ...]

    @property
    def kind(self) -> str:
        """``key padding`` or ``segments``."""
        return "segments" if self.segments else "key padding"

    def truth(self, value: Callable[[fx.Node], torch.Tensor]) -> torch.Tensor:
        """Boolean ``[B, 1, 1, K]`` or ``[B, 1, Q, K]``, true where a key is seen, given the values of nodes."""
        batch, _, _, keys = (int(size) for size in _scores(self.attention))
        table = torch.ones(batch, 1, 1, keys, dtype=torch.bool)
        for read in self.keys:
            table = table & read.seen(value(read.node), batch, keys)[:, None, None, :]
        for read in self.segments:
            ids = read.of(value(read.node), batch, keys)
            table = table & (ids.unsqueeze(1) == ids.unsqueeze(2)).unsqueeze(1)
        return table


def attention_mask(node: fx.Node) -> AttentionMask | None:
    """What :func:`find_attention_masks` found of the mask of ``node``, if that is an attention with one."""
    return node.meta.get("attention_mask")


def find_attention_masks(gm: fx.GraphModule, context: PassContext) -> int:
    """Write an :class:`AttentionMask` to ``node.meta["attention_mask"]`` of each attention that has one.

    Binding times are known by then. Returns how many were found.
    """
    claims: dict[Any, _Claim | None] = {}
    refused: dict[str, None] = {}
    found = 0
    for node in gm.graph.nodes:
        mask = _mask(node)
        if mask is None:
            continue
        shape = _scores(node)
        key = mask, str(shape), schema_argument(node, "is_causal")
        if key not in claims:
            try:
                claims[key] = _claim(node, mask, shape)
            except _Refused as refusal:
                claims[key] = None
                refused[f"{mask.name} is neither padding nor segments: {refusal}"] = None
        claim = claims[key]
        if claim is not None:
            node.meta["attention_mask"] = AttentionMask(node, mask, *claim)
            found += 1
    for message in refused:
        context.note("attention_masks", message)
    return found


_Claim = tuple[tuple[Read, ...], tuple[Read, ...]]


class _Refused(Exception):
    """Says why nothing is claimed."""


def _mask(node: fx.Node) -> fx.Node | None:
    """The mask of an attention of ATen."""
    if not isinstance(node.target, OpOverload) or "scaled_dot_product" not in node.target.name():
        return None
    masks = (schema_argument(node, "attn_mask"), schema_argument(node, "attn_bias"))
    return next((mask for mask in masks if isinstance(mask, fx.Node)), None)


def _scores(attention: fx.Node) -> tuple[Any, ...]:
    query, key = (schema_argument(attention, name).meta["val"] for name in ("query", "key"))
    return (*query.shape[:-1], key.shape[-2])


def _claim(attention: fx.Node, mask: fx.Node, shape: tuple[Any, ...]) -> _Claim:
    time = binding_time(mask)
    if time not in (BindingTime.MODEL, BindingTime.REQUEST):
        raise _Refused(f"it is known with {time.label}")
    if schema_argument(attention, "is_causal"):
        raise _Refused("the attention is causal besides")
    if len(shape) != 4:
        raise _Refused("the scores are not [B, H, Q, K]")
    _check_exact(mask)
    parts = _Parts(shape)
    parts.take(*_broadcast(mask, parts.scores), inverted=False)
    return tuple(parts.keys), tuple(parts.segments)


# Where elements come from.


def _one(size: Any) -> bool:
    return statically_known_true(size == 1)


def _behind(shape: Any, index: Index) -> Index:
    """Where a tensor of ``shape`` is read when what it is broadcast to is read at ``index``."""
    aligned = index[len(index) - len(shape) :]
    return tuple(() if _one(size) else digits for size, digits in zip(shape, aligned, strict=True))


def _broadcast(node: fx.Node, index: Index) -> tuple[fx.Node, Index]:
    return node, _behind(node.meta["val"].shape, index)


def _same(node: fx.Node, shape: Any, index: Index) -> Index:
    return index


def _expand(node: fx.Node, shape: Any, index: Index) -> Index:
    return _behind(shape, index)


def _repeat(node: fx.Node, shape: Any, index: Index) -> Index | None:
    times: Any = node.args[1]
    pairs = zip(times[len(times) - len(shape) :], shape, strict=True)
    return _behind(shape, index) if all(_one(n) or _one(size) for n, size in pairs) else None


def _unsqueeze(node: fx.Node, shape: Any, index: Index) -> Index:
    dim = schema_argument(node, "dim") % len(index)
    return index[:dim] + index[dim + 1 :]


def _permute(node: fx.Node, shape: Any, index: Index) -> Index:
    dims = [dim % len(shape) for dim in schema_argument(node, "dims")]
    return tuple(index[dims.index(dim)] for dim in range(len(shape)))


def _transpose(node: fx.Node, shape: Any, index: Index) -> Index | None:
    if not shape:
        return None
    one, other = (schema_argument(node, name) % len(shape) for name in ("dim0", "dim1"))
    swapped = list(index)
    swapped[one], swapped[other] = swapped[other], swapped[one]
    return tuple(swapped)


def _select(node: fx.Node, shape: Any, index: Index) -> Index | None:
    dim, position = schema_argument(node, "dim") % len(shape), schema_argument(node, "index")
    size = shape[dim]
    if not isinstance(position, int) or not isinstance(size, int):
        return None
    return (*index[:dim], () if size == 1 else (Digit("", size, position % size),), *index[dim:])


def _slice(node: fx.Node, shape: Any, index: Index) -> Index | None:
    dim, start = schema_argument(node, "dim") % len(shape), schema_argument(node, "start") or 0
    size = shape[dim]
    if schema_argument(node, "step") != 1 or len(index[dim]) > 1:
        return None
    if start != 0:
        if not isinstance(start, int) or not isinstance(size, int):
            return None
        start = min(max(start + size, 0) if start < 0 else start, size)
    axis, _, offset = index[dim][0] if index[dim] else Digit("", 1)
    return (*index[:dim], () if _one(size) else (Digit(axis, size, offset + start),), *index[dim + 1 :])


def _view(node: fx.Node, shape: Any, index: Index) -> Index | None:
    """A view keeps the order of elements: the same digits, grouped into other dimensions."""
    digits = [digit for position in index for digit in position if not _one(digit.size)]
    found = []
    for size in shape:
        group: list[Digit] = []
        while digits and not _is_product(group, size):
            group.append(digits.pop(0))
        if not _is_product(group, size):
            return None
        found.append(tuple(group))
    return None if digits else tuple(found)


def _is_product(digits: list[Digit], size: Any) -> bool:
    return statically_known_true(math.prod(digit.size for digit in digits) == size)


_MOVES: dict[Any, Callable[[fx.Node, Any, Index], Index | None]] = {
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.clone.default: _same,
    aten.expand.default: _expand,
    aten.repeat.default: _repeat,
    aten.unsqueeze.default: _unsqueeze,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.squeeze.default: _view,
    aten.squeeze.dim: _view,
    aten.squeeze.dims: _view,
}
"""Operations whose result holds elements of their first argument, and where: given that one's shape."""


def _moved(node: fx.Node, index: Index) -> tuple[fx.Node, Index] | None:
    """The element that the element of ``node`` at ``index`` is, one operation earlier, if ``node`` only moves."""
    if node.target not in _MOVES:
        return None
    source = _argument(node, 0)
    moved = _MOVES[node.target](node, source.meta["val"].shape, index)
    return None if moved is None else (source, moved)


def _argument(node: fx.Node, position: int) -> fx.Node:
    argument = node.args[position]
    assert isinstance(argument, fx.Node)
    return argument


def _operands(node: fx.Node, index: Index) -> list[tuple[fx.Node, Index]] | None:
    """The elements that the element of ``node`` at ``index`` is a function of; ``None`` of a leaf."""
    moved = _moved(node, index)
    if moved is not None:
        return [moved]
    if not isinstance(node.target, OpOverload) or effect(node) is not None:
        return None
    by_element = torch.Tag.pointwise in node.target.tags or node.target is aten._to_copy.default
    sources = node.all_input_nodes
    if not by_element or not all(isinstance(source.meta.get("val"), torch.Tensor) for source in sources):
        return None
    return [_broadcast(source, index) for source in sources]


def _parts_of_cat(node: fx.Node, index: Index) -> list[tuple[fx.Node, Index]] | None:
    """Where the parts of a concatenation are read; which of them it is depends on the position between them."""
    parts: Any = node.args[0]
    dim = schema_argument(node, "dim") % len(index)
    if len(index[dim]) != 1 or any(part.meta["val"].ndim != len(index) for part in parts):
        return None
    (digit,) = index[dim]
    sizes = [part.meta["val"].shape[dim] for part in parts]
    indices = [(*index[:dim], () if _one(n) else (digit._replace(size=n),), *index[dim + 1 :]) for n in sizes]
    return list(zip(parts, indices, strict=True))


def _axes_in(index: Index) -> frozenset[str]:
    return frozenset(digit.axis for digits in index for digit in digits if digit.axis)


# What values mean.

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_AND = (aten.bitwise_and.Tensor, aten.logical_and.default, aten.mul.Tensor)
_OR = (aten.bitwise_or.Tensor, aten.logical_or.default)
_NOT = (aten.bitwise_not.default, aten.logical_not.default)


def _are_floats(*nodes: Any) -> bool:
    return all(isinstance(node, fx.Node) and node.meta["val"].dtype in _FLOATS for node in nodes)


def _are_boolean(*nodes: Any) -> bool:
    return all(isinstance(node, fx.Node) and node.meta["val"].dtype == torch.bool for node in nodes)


def _number(node: fx.Node) -> bool | int | float | None:
    """The number that every element of a constant is."""
    number: Any = None
    while node.target in _MOVES:
        node = _argument(node, 0)
    if node.target is aten.full.default:
        number = schema_argument(node, "fill_value")
    elif node.target is aten.scalar_tensor.default:
        number = node.args[0]
    elif node.target in (aten.zeros.default, aten.ones.default):
        number = int(node.target is aten.ones.default)
    return number if isinstance(number, (bool, int, float)) else None


def _shows(value: Any, dtype: torch.dtype) -> bool | None:
    """Whether a mask of ``dtype`` that holds ``value``, a number or a constant, shows the key or hides it; ``None`` if
    that is not known, or neither."""
    number = _number(value) if isinstance(value, fx.Node) else value
    if number is None or dtype == torch.bool:
        return None if number is None else bool(number)
    return True if number == 0 else False if number == -math.inf else None


def _choice(node: fx.Node) -> tuple[fx.Node, Any, Any] | None:
    """Of a selection the condition, what it gives where that holds, and what elsewhere."""
    if node.target is aten.where.self:
        return _argument(node, 0), node.args[1], node.args[2]
    if node.target is aten.masked_fill.Scalar:
        return _argument(node, 1), node.args[2], node.args[0]
    return None


def _is_sum(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor and not node.kwargs and _are_floats(*node.args)


def _check_exact(mask: fx.Node) -> None:
    """Every element hides its key, or leaves the score as it is."""
    seen: set[Any] = set()
    stack: list[Any] = [] if _are_boolean(mask) else [mask]
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        if isinstance(value, fx.Node) and not _are_floats(value):
            raise _Refused(f"{value.name} is {value.meta['val'].dtype} and becomes a number to add")
        number = _number(value) if isinstance(value, fx.Node) else value
        if number is not None:
            if _shows(number, torch.float64) is None:
                raise _Refused(f"{number} is not -inf: a row of such keys alone still attends to them")
        elif value.target in _MOVES or (value.target is aten._to_copy.default and _are_floats(value.args[0])):
            stack.append(value.args[0])
        elif choice := _choice(value):
            stack += choice[1:]
        elif value.target is aten.cat.default:
            stack += value.args[0]
        elif _is_sum(value):
            stack += value.args
        elif value.op == "placeholder":
            raise _Refused(f"{value.name} is given as numbers, which may be any")
        else:
            raise _Refused(f"{value.name} ({value.target}) may be other numbers than 0 and -inf")


# Taking a mask apart.


class _Parts:
    """The conditions of a conjunction. What was looked at once is remembered, since graphs share."""

    def __init__(self, shape: tuple[Any, ...]) -> None:
        self.scores: Index = tuple((Digit(axis, size),) for axis, size in zip(_AXES, shape, strict=True))
        self.keys: list[Read] = []
        self.segments: list[Read] = []
        self._direct = str(_behind(shape[::3], self.scores[::3]))
        self._taken: set[Any] = set()
        self._axes: dict[Any, frozenset[str]] = {}
        self._spelled: dict[Any, int] = {}
        self._expressions: dict[Any, int] = {}

    def take(self, node: fx.Node, index: Index, inverted: bool) -> None:
        """Add the conditions under which the mask ``node``, or its negation, shows the key."""
        key = node, str(index), inverted
        if key in self._taken:
            return
        self._taken.add(key)
        step = _earlier(node, index, inverted)
        dtype = node.meta["val"].dtype
        if self.axes(node, index) <= _ROW_AND_KEY:
            read = self._read(node, index, inverted, _earlier)
            if _shows(read.node, read.node.meta["val"].dtype) is not (not read.inverted):  # That shows every key.
                self.keys.append(read)
        elif step is not None:
            self.take(*step)
        elif (node.target in (_OR if inverted else _AND) and _are_boolean(*node.args)) or _is_sum(node):
            for part in node.args:
                assert isinstance(part, fx.Node)
                self.take(*_broadcast(part, index), inverted)
        elif node.target is (aten.ne.Tensor if inverted else aten.eq.Tensor):
            self._take_equality(node, index)
        elif choice := _choice(node):
            condition, chosen, other = choice
            if _shows(other, dtype) is inverted:
                shown, negated = chosen, False
            elif _shows(chosen, dtype) is inverted:
                shown, negated = other, True
            else:
                raise self._depends(node, index)
            if not isinstance(shown, fx.Node):
                raise self._depends(node, index)
            self.take(*_broadcast(condition, index), negated)
            self.take(*_broadcast(shown, index), inverted)
        else:
            raise self._depends(node, index)

    def _take_equality(self, node: fx.Node, index: Index) -> None:
        sides = [_broadcast(_argument(node, position), index) for position in (0, 1)]
        if "q" in self.axes(*sides[1]):
            sides.reverse()
        of_query, of_key = sides
        if self.axes(*of_query) - {"b", "q"} or self.axes(*of_key) - _ROW_AND_KEY:
            raise self._depends(node, index)
        if any(source.meta["val"].dtype.is_floating_point or source.meta["val"].is_complex() for source, _ in sides):
            raise _Refused(f"{node.name} compares numbers that may be NaN, which equals nothing")
        if self._spell(*of_query, {"q": "k"}) != self._spell(*of_key, {}):
            raise _Refused(f"{node.name} compares something of the query with something else of the key")
        self.segments.append(self._read(*of_key, False, _earlier_copy))

    def axes(self, node: fx.Node, index: Index) -> frozenset[str]:
        """The axes of the scores that the element may depend on."""
        key = node, str(index)
        if key not in self._axes:
            operands = _operands(node, index)
            which: frozenset[str] = frozenset()
            if operands is None and node.target is aten.cat.default:
                operands = _parts_of_cat(node, index)
                which = _axes_in((index[schema_argument(node, "dim")],))
            if _number(node) is not None:
                self._axes[key] = frozenset()
            elif operands is None:
                self._axes[key] = _axes_in(index)
            else:
                self._axes[key] = which.union(*(self.axes(*operand) for operand in operands))
        return self._axes[key]

    def _spell(self, node: fx.Node, index: Index, names: dict[str, str]) -> int:
        """A number that two elements share only if they are equal whatever the leaves hold."""
        moved = _moved(node, index)
        if moved is not None:
            return self._spell(*moved, names)
        renamed = str([[digit._replace(axis=names.get(digit.axis, digit.axis)) for digit in d] for d in index])
        if (node, renamed) not in self._spelled:
            operands = _operands(node, index)
            expression: Any = node, renamed
            if operands is not None:
                spelled = {source: self._spell(source, at, names) for source, at in operands}
                expression = call_key(node, spelled.__getitem__)
            self._spelled[node, renamed] = self._expressions.setdefault(expression, len(self._expressions))
        return self._spelled[node, renamed]

    def _read(self, node: fx.Node, index: Index, inverted: bool, earlier: _Earlier) -> Read:
        """The earliest node that says the same, but none before one that is ``[B, K]`` as it stands."""
        while True:
            numbers = earlier is _earlier and not _are_boolean(node)
            direct = str(index) == self._direct and not inverted and not numbers
            step = None if direct else earlier(node, index, inverted)
            if step is None:
                break
            node, index, inverted = step
        # Neither the head nor the query makes a difference, so the first of them do.
        kept = tuple(tuple(d if d.axis in _ROW_AND_KEY else d._replace(axis="") for d in digits) for digits in index)
        return Read(node, kept, inverted, str(kept) == self._direct)

    def _depends(self, node: fx.Node, index: Index) -> _Refused:
        axis = "head" if "h" in self.axes(node, index) else "query"
        return _Refused(f"{node.name} ({node.target}) depends on the {axis}")


_Earlier = Callable[[fx.Node, Index, bool], tuple[fx.Node, Index, bool] | None]


def _earlier(node: fx.Node, index: Index, inverted: bool) -> tuple[fx.Node, Index, bool] | None:
    """What shows a key exactly where ``node`` does, one operation earlier."""
    copy = _earlier_copy(node, index, inverted)
    if copy is not None:
        return copy
    source = node.args[0] if node.args else None
    if node.target in _NOT and _are_boolean(source):
        return (*_broadcast(_argument(node, 0), index), not inverted)
    if node.target is aten._to_copy.default and (_are_boolean(source, node) or _are_floats(source, node)):
        return (*_broadcast(_argument(node, 0), index), inverted)
    choice = _choice(node)
    if choice is not None:
        shown = tuple(_shows(value, node.meta["val"].dtype) for value in choice[1:])
        if shown in ((True, False), (False, True)):
            return (*_broadcast(choice[0], index), inverted == shown[0])
    return None


def _earlier_copy(node: fx.Node, index: Index, inverted: bool) -> tuple[fx.Node, Index, bool] | None:
    moved = _moved(node, index)
    return None if moved is None else (*moved, inverted)
