"""A Hypothesis strategy for small functional ATen graphs, in the form AOTAutograd's inference path gives.

A graph starts as a drawn program in plain PyTorch. Each line runs on real tensors as it is drawn, so the
next picks operands that fit. The program is then traced with the functionalization AOTAutograd uses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import reject
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

INT_BOUND = 5  # int inputs lie in [0, INT_BOUND): every dimension is at most this
DTYPES = (torch.float32, torch.int64, torch.bool, torch.float32, torch.bfloat16, torch.float64, torch.float32)
SPECIAL = ((), (), (), (math.nan, -0.0), (math.inf,), (-math.inf, -0.0, math.nan))
SCOPE: dict[str, Any] = {"torch": torch, "F": F, "math": math, "sdpa": F.scaled_dot_product_attention}


# In each kind the simplest comes first: that is where shrinking goes. A hole {name} is filled by
# _Program.hole. The first hole of a template is its main operand: {o} repeats it, {p} the hole before.
POINTWISE = """-{n} | {x} + {b} | {n} - {b} | {n} * {b} | {n} * {k} | {n} + {c} | {f} / {b} | {f}.exp()
    | {f}.tanh() | {f}.sigmoid() | F.silu({f}) | F.gelu({f}, approximate='tanh') | {n}.relu() | {f}.sin()
    | {f}.cos() | ({f}.abs() + 0.1).rsqrt() | {f}.pow(2) | {f} ** {k} | {n}.abs() | {n}.clamp(-1, 1)
    | torch.maximum({n}, {b}) | {f}.log() | {k} / {f} | {n}.remainder({c}) | {f}.nan_to_num()"""
LOGIC = """{x} == {b} | {n} < {b} | {n} >= {k} | torch.logical_and({x}, {b}) | ~{m} | {m} & {b} | {i} & {c}
    | {f}.isnan() | torch.where({m}, {b}, {k}) | torch.where({n} > 0, {o}, {s}) | {f}.masked_fill({mt}, {k})
    | {f}.masked_fill({o} > 0.5, -math.inf) | {x1}.any({d}) | {x}.all() | {f}.where({mt}, {k})
    | {x2}.mT.contiguous().mT.where({o} == 1, {k}) | {i} * {mt}"""
CASTS = """{x}.to({ft}) | {x}.to(torch.bool) | {m}.to(torch.int64) | {x}.to({f}.dtype) | {x}.type_as({f})
    | {f}.nan_to_num().clamp(-9, 9).to(torch.int64)"""
VIEWS = """{x}.unsqueeze(0) | {x}.unsqueeze(-1) | {x}.squeeze() | {x2}.transpose(0, -1) | {x2}.mT
    | {x2}.permute({perm}) | {x}.reshape({rs}) | {x1}.select({d}, 0) | {x1}[..., :1] | {x1}[..., 1:]
    | {x1}[1:] | {x1}[::2] | {x}.expand(2, *{o}.shape) | {x}.expand_as({big}) | {x}.view_as({s})
    | {x1}.unbind({d}) | {x1}.split(1, {d}) | {x1}.split([1, {o}.shape[0] - 1]) | {x2}.flatten(-2)
    | {x1}.squeeze({d}) | {x}.clone() | {x}.detach()"""
CREATORS = """torch.zeros_like({x}) | torch.ones_like({x}) | torch.full_like({f}, {k}) | torch.full((2,), {k})
    | torch.zeros({x}.shape, dtype={ft}) | torch.arange({x1}.shape[{d}], dtype={ft})
    | {f}.new_full(({c},), {k}) | torch.ones({x2}.shape, dtype=torch.bool).tril()
    | torch.cat([{x1}, {s}], {d}) | torch.stack([{x}, {s}]) | torch.cat([{f}.flatten(), {f}.flatten()])
    | F.pad({x1}, (1, 1))"""
REDUCTIONS = """{x}.sum() | {x1}.sum({d}) | {f1}.mean({d}, keepdim=True) | {f}.mean() | {x1}.amax({d})
    | {f1}.var({d}, correction=0) | {f1}.softmax({d}) | {f1}.log_softmax({d}) | {x1}.cumsum({d})
    | F.layer_norm({f1}, {o}.shape[-1:]) | F.layer_norm({f1}, {o}.shape[-1:], {lw}, {lw}) | {x1}.argmax({d})
    | F.rms_norm({f1}, {o}.shape[-1:]) | {n1}.sort({d}) | {n1}.prod({d})
    | torch.var_mean({f1}, {d}, correction=0) | torch.aminmax({n})"""
MATMULS = """{q2} @ {o}.mT | {f1} @ {mm} | F.linear({f1}, {w}) | F.linear({f1}, {w}, {p}[:, 0])
    | torch.bmm({q3}, {o}.mT) | torch.addmm({q2}[0, :1], {o}, {o}.t())
    | torch.einsum('...i,...i->...', {f1}, {sd}) | sdpa({q2}[None, None], {sd}[None, None], {sd}[None, None])
    | sdpa({q4}, {sd}, {sd}) | sdpa({q3}, {sd}, {sd}, is_causal=True)
    | sdpa({q3}[None], {sd}[None], {sd}[None], attn_mask=({o} @ {o}.mT)[None] > 0)"""
INDEXING = """{x1}[{ix}] | F.embedding(weight={q2}, input={ix}) | {x1}.index_select(0, {ix}.reshape(-1))
    | {x1}[..., {ixl}] | {x1}.index_select(-1, {ixl}.reshape(-1)) | {x1}.gather(0, {ixt})
    | torch.index_put({x1}, ({ix},), {o}[0]) | torch.index_put({x1}, ({ix},), {o}[-1], accumulate=True)
    | {f1}.scatter(0, {ixt}, {k}) | {f1}.scatter_add(0, {ixt}, {sd})"""
RANDOM = """torch.rand_like({f}) | torch.randn_like({f}) | F.dropout({f}, 0.5, True)
    | torch.bernoulli({f}.nan_to_num().sigmoid()) | torch.randn({x}.shape) | torch.randint(0, 5, (3,))
    | torch.native_dropout({f}, 0.5, True) | {v}.uniform_() | {v}.bernoulli_(0.5) | {v}.normal_()"""
# Instructions on a value that no input shares memory with.
MUTATIONS = """{v}.add_({to}) | {v}.mul_({k}) | {v}.fill_({k}) | {v}.copy_({to}) | {v}.masked_fill_({mt}, {k})
    | {v}.zero_() | {v1}[..., 1:] = {sd}[..., 1:] | {v1}[:1] = {k} | {v1}[1:] = {o}[:1].clone()
    | {v1}.select({d}, 0).mul_({k}) | {v1}.transpose(0, -1).add_({k}) | {v}.clamp_(-1, 1)
    | {v1}[{ix}] = {o}[0].clone() | {v1}.index_put_(({ix},), {o}.clone()[0], accumulate=True)"""
# x[mask] has a size that only the data tells, so it is used up within the instruction.
MASKED = """{x1}[{lm}].sum(0) | {n1}[{lm}].float().mean() | {v1}[{lm}] *= {k} | {v1}[{lm}] = {k}
    | {v1}[{lm}] += {o}[{p}] | {v1}[{lm}] = {o}[0].flatten()[0].clone()"""
KINDS = 3 * [POINTWISE, VIEWS, MUTATIONS] + 2 * [REDUCTIONS, MATMULS, INDEXING, LOGIC, CASTS] + [CREATORS]


@dataclass(frozen=True)
class InputSpec:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parameter: bool = False  # plays a weight: the same on every step
    transposed: bool = False  # its strides are those of a transposed tensor
    special: tuple[float, ...] = ()  # values scattered among a float input's
    density: float = 0.5  # of True in a mask

    def make(self, generator: torch.Generator) -> Tensor:
        shape = self.shape[::-1] if self.transposed else self.shape
        if self.dtype == torch.bool:
            value = torch.rand(shape, generator=generator) < self.density
        elif self.dtype == torch.int64:
            value = torch.randint(0, INT_BOUND, shape, generator=generator)
        else:
            value = torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)
            for number in self.special:
                value[torch.rand(shape, generator=generator) < 0.2] = number
        return value.permute(*reversed(range(value.ndim))) if self.transposed else value


@dataclass(frozen=True, repr=False)
class RandomGraph:
    gm: torch.fx.GraphModule
    inputs: tuple[InputSpec, ...]
    source: str

    def make_inputs(self, seed: int) -> list[Tensor]:
        """The inputs for one seed. An input's values do not depend on the other inputs."""
        return [spec.make(torch.Generator().manual_seed(1000 * seed + k)) for k, spec in enumerate(self.inputs)]

    def __repr__(self) -> str:
        return f"\n{self.source}"


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """Same dtype, shape and bits: 0.0 differs from -0.0, and a NaN equals itself."""
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(word), b.view(word))


def _broadcasts(a: Tensor, b: Tensor) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(a.shape[::-1], b.shape[::-1], strict=False))


def _expands(a: Tensor, b: Tensor) -> bool:
    return a.ndim <= b.ndim and all(m in (1, n) for m, n in zip(a.shape[::-1], b.shape[::-1], strict=False))


def _kind(t: Tensor) -> int:
    return 2 if t.is_floating_point() else int(t.dtype != torch.bool)


# The tensors t that fit a hole, given the main operand o.
RELATION: dict[str, Callable[[Tensor, Tensor], bool]] = {
    "b": _broadcasts,
    "mt": lambda t, o: _kind(t) == 0 and _expands(t, o),
    "lm": lambda t, o: _kind(t) == 0 and t.ndim > 0 and t.shape == o.shape[: t.ndim],
    "s": lambda t, o: t.shape == o.shape,
    "sd": lambda t, o: (t.dtype, t.shape) == (o.dtype, o.shape),
    "to": lambda t, o: _expands(t, o) and _kind(t) <= _kind(o),  # no NaN into an integer
    "big": lambda t, o: _expands(o, t),
    "mm": lambda t, o: (t.dtype, t.ndim, t.shape[:1]) == (o.dtype, 2, o.shape[-1:]),
    "w": lambda t, o: (t.dtype, t.ndim, t.shape[1:]) == (o.dtype, 2, o.shape[-1:]),
    "lw": lambda t, o: (t.dtype, t.shape) == (o.dtype, o.shape[-1:]),
    "ix": lambda t, o: _kind(t) == 1,
    "ixt": lambda t, o: _kind(t) == 1 and _expands(t, o),
}
# Others name a kind and the least rank ("q": the exact one).
KIND = {"x": (0, 1, 2), "n": (1, 2), "f": (2,), "q": (2,), "i": (1,), "m": (0,), "v": (0, 1, 2)}
OPTIONS: dict[str, Callable[[Tensor], Iterable[object]]] = {
    "k": lambda o: (2.0, 0.5, -1.5, 0.0, 3.0),
    "c": lambda o: (2, 1, 3),
    "ft": lambda o: (torch.float32, torch.bfloat16, torch.float64),
    "d": lambda o: range(-1, o.ndim - 1),
    "perm": lambda o: ((*range(1, o.ndim), 0), tuple(range(o.ndim))[::-1]),
    "rs": lambda o: ((-1,), (1, *o.shape), (*o.shape, 1), tuple(o.shape)[::-1], (*o.shape[1:], *o.shape[:1])),
}
INSTEAD = {  # where no tensor fits
    "ix": "torch.arange({o}.shape[0])",
    "ixl": "torch.arange({o}.shape[-1])",
    "ixt": "{o}.argsort(0)",
    "m": "(x0 > 0)",
    "mt": "({o} == {o}.amax())",
    "lm": "({o}.reshape({o}.shape[0], -1) != 0).any(-1)",
    "w": "{o}.new_ones(2, {o}.shape[-1])",
    "mm": "{o}.new_ones({o}.shape[-1], 2)",
}


class _Program:
    """The program as it is drawn, with a real value for each of its variables."""

    def __init__(self, draw: st.DrawFn, inputs: Sequence[InputSpec]) -> None:
        self.draw = draw
        self.values = {spec.name: spec.make(torch.Generator().manual_seed(0)) for spec in inputs}
        self.raw = frozenset(self.values)
        self.borrowed = {t.untyped_storage().data_ptr() for t in self.values.values()}
        self.used = set(self.raw)
        self.lines: list[str] = []

    def choose(self, options: Sequence[Any]) -> Any:
        return options[self.draw(st.integers(0, len(options) - 1)) if len(options) > 1 else 0]

    def fits(self, key: str, t: Tensor, o: Tensor | None) -> bool:
        if o is not None and (relation := RELATION.get(key.removesuffix("l"))):
            return relation(t, o)
        if key[0] == "v" and (t.untyped_storage().data_ptr() in self.borrowed or 0 in t.stride()):
            return False
        rank = int(key[1:] or 0)
        return _kind(t) in KIND[key[0]] and (t.ndim == rank if key[0] == "q" else t.ndim >= rank)

    def hole(self, key: str, main: str) -> str:
        """What fills a hole, given the main operand; a LookupError where nothing does."""
        o: Any = self.values.get(main)
        if key in OPTIONS:
            return str(self.choose(list(OPTIONS[key](o))))
        names = [name for name, t in self.values.items() if self.fits(key, t, o)]
        if not names:
            return INSTEAD[key].format(o=main)
        # Results that nothing uses yet come more often, for programs that hang together.
        name = str(self.choose(names + 4 * [name for name in names if name not in self.used]))
        self.used.add(name)
        if not key.startswith("ix"):
            return name
        # Whatever the inputs hold, the index must be safe for this dimension.
        size = o.shape[-1 if key == "ixl" else 0]
        options = [name] if name in self.raw and size >= INT_BOUND else []
        index = self.choose([*options, f"{name}.remainder({size})", f"{name}.clamp(0, {size - 1})"])
        if key == "ixt":
            return f"{index}.expand({list(o.shape)})"
        # PyTorch reads a 0-d index on the host, which a trace cannot.
        return index if self.values[name].ndim else f"{index}.reshape(1)"

    def fill(self, template: str) -> str:
        parts = re.split(r"\{(\w+)\}", template)
        filled: list[str] = []
        for k, key in list(enumerate(parts))[1::2]:
            if key not in ("o", "p"):
                filled.append(self.hole(key, filled[0] if filled else ""))
            parts[k] = filled[0 if key == "o" else -1]
        return "".join(parts)

    def run(self, template: str) -> None:
        """Adds one instruction, unless PyTorch refuses it for these operands."""
        try:
            code = self.fill(template)
            if template.startswith("{v"):
                exec(code, SCOPE | self.values)
                self.lines.append(code)
                return
            value = eval(code, SCOPE | self.values)
        except (RuntimeError, LookupError, ValueError, TypeError):
            return
        values = [value] if isinstance(value, Tensor) else list(value)
        if all(t.ndim <= 4 and 0 < t.numel() <= 256 for t in values):
            names = [f"v{len(self.values) + k}" for k in range(len(values))]
            self.values |= dict(zip(names, values, strict=True))
            self.lines.append(f"{', '.join(names)}{',' * (value is not values[0])} = {code}")

    def outputs(self) -> list[str]:
        names = list(self.values)[::-1]
        chosen: list[str] = []
        for _ in range(self.choose((1, 2, 3, 4, 3, 4))):
            unused = [name for name in names if name not in self.used and name not in chosen]
            chosen.append(self.choose(4 * unused + names))
        views = ("", "", "", ".unsqueeze(0)", ".reshape(-1)", ".squeeze()", ".detach()")
        return [name + self.choose(views) for name in chosen]


@st.composite
def _instruction(draw: st.DrawFn, program: _Program, kinds: list[str]) -> bool:
    """Whether the program goes on after this. One strategy, so that shrinking can drop it as a whole."""
    if draw(st.integers(0, 24)) == 0:
        return False
    template = program.choose(re.split(r"\s+\| ", program.choose(kinds)))
    if template.startswith("{v") and draw(st.booleans()):
        program.run("{x}.clone()")
    program.run(template)
    return True


@st.composite
def _input(draw: st.DrawFn, name: str, dims: list[int]) -> InputSpec:
    dtype = torch.float32 if name == "x0" else draw(st.sampled_from(DTYPES))  # for most holes to find one
    rank = draw(st.sampled_from([1, 2, 2, 3, 4] if name == "x0" else [1, 2, 2, 2, 3, 4, 0]))
    shape = tuple(draw(st.sampled_from(dims)) for _ in range(rank))
    special = draw(st.sampled_from(SPECIAL)) if dtype.is_floating_point else ()
    density = draw(st.sampled_from([0.5, 0.1, 0.95, 0.02, 1.0])) if dtype == torch.bool else 0.5
    transposed = rank > 1 and draw(st.integers(0, 6)) == 6
    parameter = dtype.is_floating_point and draw(st.booleans())
    return InputSpec(name, dtype, shape, parameter, transposed, special, density)


@st.composite
def random_graphs(
    draw: st.DrawFn, max_ops: int = 14, boolean_masks: bool = False, random_ops: bool = True
) -> RandomGraph:
    """boolean_masks lets in x[mask] and x[mask] = v, whose graphs hold values of data-dependent shape."""
    dims = draw(st.lists(st.integers(1, INT_BOUND), min_size=2, max_size=3))
    inputs = tuple(draw(_input(f"x{k}", dims)) for k in range(draw(st.sampled_from([1, 2, 3, 4, 5, 3, 4]))))
    program = _Program(draw, inputs)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        kinds = KINDS + [RANDOM] * random_ops + [MASKED] * boolean_masks
        all(draw(_instruction(program, kinds)) for _ in range(max_ops))  # up to the first that says to stop
        lines = [*program.lines, f"return ({', '.join(program.outputs())},)"]
        source = f"def program({', '.join(spec.name for spec in inputs)}):\n    " + "\n    ".join(lines)
        exec(source, scope := dict(SCOPE))
        with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True) as mode:
            fakes = [mode.from_tensor(program.values[spec.name]) for spec in inputs]
            try:
                gm = make_fx(dispatch_functionalize(scope["program"], FunctionalTensorMode()))(*fakes)
            except (RuntimeError, ValueError):  # rare: not every view of a mutated value can be replayed
                reject()
    if draw(st.integers(0, 3)) < 3:
        gm.graph.eliminate_dead_code()  # as AOTAutograd does
        gm.recompile()
    return RandomGraph(gm, inputs, "\n".join([*(f"# {spec}" for spec in inputs), source]))
