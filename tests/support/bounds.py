"""How far a compiled optimizer may be from the same optimizer in float64: a bound for each element, derived as it runs.

`Bounds` watches the optimizer's own float64 step, operation by operation, and keeps beside each tensor a radius: the
compiled value lies within it of the float64 one. A radius is what the operands' radii become through the operation,
plus what the compiled operation may round. It knows the arithmetics (see passes/rewrite) by their
promises only:

* fp32: every operation, some of two or three steps, errs by a few units of 2**-24 of its terms (FP32 below leaves room
  for XLA, whose division and square root are not correctly rounded and which contracts a * b + c). What is added to the
  parameter is summed first, and may be as large as the parameter was: the same of that;
* bf16: every plain result is rounded once, 2**-8 of it; an expansion that is decayed and added to errs by 2**-15 of
  itself and a few roundings of what is added; whoever else reads an expansion reads its high word.

A comparison whose sides are within their radii is unsure, and what depends on it may be either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FP32 = 2.0**-21
"""Of the terms of an operation in fp32: at most three roundings of 2**-24, doubled for XLA, and a scalar's own."""
BF16 = 2.0**-8 * 1.01
"""Of a result rounded to bf16; a little more, since it is fp32 arithmetic's result that is rounded."""
PAIR = 2.0**-15
"""Of an expansion after `scale` or `grow`: products and sums of low words, each below 2**-8 of it, rounded to 2**-8."""
GROWN = 4 * BF16
"""Of what is added to an expansion: it is rounded, summed, rounded, and may be larger than what it is added to."""
FUNCTION = 2.0**-18
"""Of exp, log and pow in fp32: polynomials of a backend's own."""
CARRIES = ("clone", "detach", "alias", "copy", "_to_copy", "view", "_unsafe_view", "view_as", "expand", "lift_fresh")
"""Operations whose result is their operand."""
REDUCTIONS = ("sum", "mean", "linalg_vector_norm", "norm")
"""Operations that make one number of all elements, of which the compiled one is rounded once."""
STORED = {"bf16": BF16, "bf16x2": 2.0**-17, "fp32": 0.0, "bf16+fp32": 0.0}
"""What storing loses, of the value, by format: half an ulp of the last word."""


class Ball(NamedTuple):
    """A value `c` of the float64 run, and the radius `r` about it. For a mask r says where it is unsure."""

    c: Any
    r: Any
    moved: Any = None
    """For what bf16 arithmetic keeps as an expansion: the magnitude of what awaits being added to it."""
    is_sum: bool = False
    """Of an expansion: whether increments are summed before one of them is added, as the parameter's are."""
    is_new: bool = False
    """Of an expansion: a new tensor, filled with a number. If it is to be a state it is one, if not, a plain value."""
    off: Any = None
    """Of what derives from the parameter: the radius if it does not become the new one, but is read as plain values."""


class Unbounded(NotImplementedError):
    """An operation of a float64 run that no bound was derived for."""


Handler = Callable[..., Ball]
_HANDLERS: dict[str, Handler] = {}


def _handles(*names: str) -> Callable[[Handler], Handler]:
    def register(f: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(names, f))
        return f

    return register


class Bounds(TorchDispatchMode):
    """Run an optimizer's float64 step under this to have the radius of every tensor it leaves; see `ball`.

    `fill` is what a number loses with which a new state is filled: it is stored before the first step.
    """

    def __init__(self, arithmetic: str, fill: float = 0.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own signature
        self.bf16, self.fill = arithmetic == "bf16", fill
        self._balls: dict[int, Ball] = {}
        self._alive: list[Tensor] = []

    def start(self, t: Tensor, radius: Tensor | float = 0.0, pair: bool = False, is_param: bool = False) -> None:
        """`t` enters the step with this radius; `pair` if it is stored as an expansion."""
        moved = torch.zeros_like(t) if pair and self.bf16 else None
        r = torch.zeros_like(t) + radius
        self._set(t, Ball(t, r, moved, is_param, off=r if is_param and self.bf16 else None))

    def forget(self) -> None:
        """The step is over: what is to be known of its tensors enters the next one by `start`."""
        self._balls.clear()
        self._alive.clear()

    def ball(self, t: Tensor) -> Ball:
        """The value of `t` and its radius, now."""
        found = self._balls.get(t.untyped_storage()._cdata)
        value = t.detach().clone()
        if found is None:
            return Ball(value, torch.zeros(t.shape, dtype=torch.bool if t.dtype == torch.bool else torch.float64))
        if isinstance(found.r, Tensor) and found.r.shape != t.shape and found.r.numel() == t.numel():
            found = found._replace(r=found.r.reshape(t.shape))  # a view with dimensions of one element more or less
        return found._replace(c=value)

    def _set(self, t: Tensor, ball: Ball) -> None:
        self._alive.append(t)  # a freed storage's address would be used again
        self._balls[t.untyped_storage()._cdata] = ball

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name.startswith("_foreach_"):
            return self._each(func, name.removeprefix("_foreach_").rstrip("_"), args, kwargs)
        operands = tuple(map(self._operand, args))
        named = {k: self._operand(v) for k, v in kwargs.items() if k != "out"}
        out = func(*args, **kwargs)
        if name in ("unsqueeze", "squeeze"):
            return out
        is_bounded = name in REDUCTIONS or any(isinstance(x, Ball) and isinstance(x.c, Tensor) for x in operands)
        if isinstance(out, Tensor) and (out.dim() > 0 or is_bounded) and func.namespace == "aten":
            self._bound(name.rstrip("_"), out, operands, named)
        return out

    def _each(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """An operation on lists: the bound of each of its operations on tensors."""
        count = len(args[0])
        rows = [tuple(self._operand(a[i] if isinstance(a, (list, tuple)) else a) for a in args) for i in range(count)]
        named = [{k: self._operand(a[i] if isinstance(a, (list, tuple)) else a) for k, a in kwargs.items()}
                 for i in range(count)]  # fmt: skip
        outs = func(*args, **kwargs)
        for i, out in enumerate(args[0] if outs is None else outs):
            self._bound(name, out, rows[i], named[i])
        return outs

    def _bound(self, name: str, out: Tensor, operands: Sequence[Any], named: Mapping[str, Any]) -> None:
        if name not in _HANDLERS:
            raise Unbounded(name)
        ball = _HANDLERS[name](self, out, *operands, **named)
        if name not in CARRIES and any(isinstance(x, Ball) and x.off is not None for x in operands):
            plain = _HANDLERS[name](self, out, *map(self._plain, operands), **named)
            ball = ball._replace(r=torch.maximum(ball.r, plain.r)) if ball.moved is None else ball._replace(off=plain.r)
        self._set(out, ball)

    def _plain(self, x: Any) -> Any:
        """An operand as an operation sees it that is not on the way from the old parameter to the new one."""
        return self.read(x) if isinstance(x, Ball) and x.off is not None else x

    def _operand(self, x: Any) -> Any:
        """Tensors and numbers as balls; a number, or a 0-d tensor, is exact up to its own rounding."""
        if isinstance(x, Tensor):
            known = x.dim() > 0 or x.untyped_storage()._cdata in self._balls
            return self.ball(x) if known else _number(float(x))
        if isinstance(x, (list, tuple)):
            return [self._operand(y) for y in x]
        return _number(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else x

    def read(self, x: Ball) -> Ball:
        """What an operation that does not accumulate sees of `x`: a mask as 0 and 1, of an expansion the high word."""
        if isinstance(x.c, Tensor) and x.c.dtype == torch.bool:
            return Ball(x.c.double(), x.r.double())
        if x.off is not None:
            x = x._replace(r=torch.maximum(x.r, x.off))
        return Ball(x.c, x.r) if x.moved is None else Ball(x.c, x.r + BF16 * _size(x))

    def choice(self, x: Ball) -> Ball:
        """What a choice between two plain values sees of `x`: a number is rounded first."""
        return self.read(x) if isinstance(x.c, Tensor) or not self.bf16 else Ball(x.c, x.r + BF16 * abs(x.c))

    def rounded(self, out: Tensor, radius: Any, terms: Any) -> Ball:
        """A plain result: its radius before rounding, and the magnitude of the terms that were rounded in fp32."""
        radius = radius + FP32 * terms
        return Ball(out, radius + BF16 * (out.abs() + radius) if self.bf16 else radius)

    def plus(self, out: Tensor, x: Ball, inc: Ball) -> Ball:
        """x + inc; with care if x is an expansion."""
        if x.moved is None:
            return self.rounded(out, x.r + inc.r, _size(x) + _size(inc))._replace(is_sum=x.is_sum)
        moved = x.moved + _size(inc)
        size = torch.maximum(torch.as_tensor(_size(x)), out.abs())
        r = x.r + inc.r + GROWN * moved + PAIR * size
        if x.is_new:
            r = r + BF16 * out.abs()
        return Ball(out, r, moved if x.is_sum else torch.zeros_like(out), x.is_sum, x.is_new)


def _number(x: float) -> Ball:
    return Ball(float(x), abs(float(x)) * 2.0**-24)


def _size(x: Ball) -> Any:
    """The largest magnitude that the compiled value may have."""
    return abs(x.c) + x.r


def product(x: Ball, y: Ball) -> Ball:
    """x * y before rounding."""
    return Ball(x.c * y.c, abs(x.c) * y.r + abs(y.c) * x.r + x.r * y.r + FP32 * _size(x) * _size(y))


def quotient(x: Ball, y: Ball) -> Ball:
    """x / y before rounding; nothing is known where y may be zero."""
    c = torch.as_tensor(x.c / y.c)
    gap = abs(y.c) - y.r
    r = torch.as_tensor((x.r + abs(c) * y.r) / gap)
    r = torch.where(torch.as_tensor(gap > 0), r, torch.inf)
    return Ball(c, r + FP32 * (c.abs() + r))


ONE = Ball(1.0, 0.0)


@_handles("add")
def _add(m: Bounds, out: Tensor, x: Ball, y: Ball, alpha: Ball = ONE) -> Ball:
    if x.moved is None and y.moved is not None and alpha.c == 1:
        x, y = y, x
    return m.plus(out, x if x.moved is not None else m.read(x), product(m.read(y), alpha))


@_handles("sub")
def _sub(m: Bounds, out: Tensor, x: Ball, y: Ball, alpha: Ball = ONE) -> Ball:
    return m.plus(out, x if x.moved is not None else m.read(x), product(m.read(y), alpha))


@_handles("rsub")
def _rsub(m: Bounds, out: Tensor, x: Ball, y: Ball, alpha: Ball = ONE) -> Ball:
    return _sub(m, out, y, x, alpha)


@_handles("mul")
def _mul(m: Bounds, out: Tensor, x: Ball, y: Ball) -> Ball:
    if x.moved is None and y.moved is not None:
        x, y = y, x
    if x.moved is None:
        decay = _size(x) * abs(y.c - 1) if x.is_sum and isinstance(y.c, float) else 0.0  # x + x * (s - 1), see Sum
        return m.rounded(out, product(m.read(x), m.read(y)).r, out.abs() + decay)._replace(is_sum=x.is_sum)
    if isinstance(y.c, float) and x.is_sum:  # x + x.hi * (s - 1), and what was pending is added before
        step = abs(y.c - 1)
        inc = Ball(x.c * (y.c - 1), BF16 * _size(x) * step)
        return m.plus(out, Ball(x.c, x.r * abs(y.c), torch.zeros_like(out), True), inc)
    # A scalar is split into two words, 2**-17 of it, which PAIR has room for; any other factor is one bf16 number.
    y = Ball(y.c, 0.0) if isinstance(y.c, float) else m.read(y)
    r = product(x, y if isinstance(y.c, float) else Ball(y.c, y.r + BF16 * _size(y))).r
    r = r + (BF16 if x.is_new else PAIR) * (out.abs() + r)
    return Ball(out, r, torch.zeros_like(out), False, x.is_new)


@_handles("div")
def _div(m: Bounds, out: Tensor, x: Ball, y: Ball) -> Ball:
    if x.moved is not None and isinstance(y.c, float):
        return _mul(m, out, x, Ball(1 / y.c, 0.0))
    return m.rounded(out, quotient(m.read(x), m.read(y)).r, out.abs())


@_handles("addcmul")
def _addcmul(m: Bounds, out: Tensor, x: Ball, y: Ball, z: Ball, value: Ball = ONE) -> Ball:
    return m.plus(out, x, product(product(m.read(y), m.read(z)), value))


@_handles("addcdiv")
def _addcdiv(m: Bounds, out: Tensor, x: Ball, y: Ball, z: Ball, value: Ball = ONE) -> Ball:
    return m.plus(out, x, quotient(product(m.read(y), value), m.read(z)))


@_handles("lerp")
def _lerp(m: Bounds, out: Tensor, x: Ball, y: Ball, weight: Ball) -> Ball:
    if x.moved is not None and (x.is_sum or y.moved is not None):  # x + weight * (y - x), of both words
        gap = 2 * BF16 * (abs(y.c - x.c) + y.r) + PAIR * (_size(x) + _size(y))
        target = y if y.off is None else m.read(y)
        inc = Ball(weight.c * (y.c - x.c), abs(weight.c) * (target.r + gap))
        return m.plus(out, x._replace(r=x.r * abs(1 - weight.c)), inc)
    y = m.read(y)
    inc = product(y, weight)
    if x.moved is None:
        r = abs(1 - weight.c) * x.r + inc.r + abs(x.c) * weight.r
        return m.rounded(out, r, _size(x) + abs(weight.c) * (_size(x) + _size(y)))
    return m.plus(out, x._replace(r=x.r * abs(1 - weight.c)), inc)


def _dims(x: Ball, dim: Any) -> list[int]:
    """The dimensions of a reduction; all if it is given none."""
    return [int(d.c) for d in dim] if dim else list(range(x.c.dim()))


@_handles("sum")
def _sum(m: Bounds, out: Tensor, x: Ball, dim: Any = None, *_: Any, **__: Any) -> Ball:
    x, over = m.read(x), _dims(x, dim)
    return m.rounded(out, x.r.sum(over).view(out.shape), _size(x).sum(over).view(out.shape))


@_handles("mean")
def _mean(m: Bounds, out: Tensor, x: Ball, dim: Any = None, *_: Any, **__: Any) -> Ball:
    x, over = m.read(x), _dims(x, dim)
    return m.rounded(out, x.r.mean(over).view(out.shape), _size(x).mean(over).view(out.shape))


@_handles("linalg_vector_norm", "norm")
def _norm(m: Bounds, out: Tensor, x: Ball, ord: Any = 2, dim: Any = None, *_: Any, **__: Any) -> Ball:
    """By the triangle inequality a norm moves by no more than that of what its elements move by."""
    x, over = m.read(x), _dims(x, dim)
    size = torch.linalg.vector_norm(x.r, dim=over).view(out.shape)
    return m.rounded(out, size, out + size)


@_handles("abs", "neg")
def _abs(m: Bounds, out: Tensor, x: Ball) -> Ball:
    return m.read(x)


@_handles("sign", "sgn")
def _sign(m: Bounds, out: Tensor, x: Ball) -> Ball:
    x = m.read(x)
    return Ball(out, torch.where(x.c.abs() > x.r, 0.0, torch.where(x.r == 0, 0.0, 1 + out.abs())))


def _monotone(name: str, f: Callable[[Tensor], Tensor], least: float, error: Callable[[Tensor], Any]) -> None:
    """Registers a function of one operand; `error` is what an approximation of it is off by."""

    def of(m: Bounds, out: Tensor, x: Ball) -> Ball:
        return m.rounded(out, _through(f, m.read(x), least) + error(out), out.abs())

    _handles(name)(of)


_monotone("sqrt", torch.sqrt, 0.0, lambda out: 0.0)
_monotone("rsqrt", torch.rsqrt, 0.0, lambda out: 0.0)
_monotone("exp", torch.exp, -torch.inf, lambda out: FUNCTION * out.abs())
_monotone("sigmoid", torch.sigmoid, -torch.inf, lambda out: FUNCTION * out.abs())
_monotone("log", torch.log, 0.0, lambda out: FUNCTION * (out.abs() + 1))


@_handles("reciprocal")
def _reciprocal(m: Bounds, out: Tensor, x: Ball) -> Ball:
    return m.rounded(out, quotient(ONE, m.read(x)).r, out.abs())


@_handles("softplus")
def _softplus(m: Bounds, out: Tensor, x: Ball, beta: Ball = ONE, threshold: Ball | None = None) -> Ball:
    most = 20.0 if threshold is None else threshold.c
    r = _through(lambda v: torch.nn.functional.softplus(v, beta.c, most), m.read(x), -torch.inf)
    return m.rounded(out, r + FUNCTION * out.abs(), out.abs())


@_handles("nan_to_num")
def _nan_to_num(m: Bounds, out: Tensor, x: Ball, *_: Any, **__: Any) -> Ball:
    """What is certainly NaN becomes a number; what may be NaN may be any number of two."""
    x = m.read(x)
    r = torch.where(x.c.isfinite() | (x.r == 0), x.r, torch.inf)
    return Ball(out, r.nan_to_num(torch.inf))


@_handles("square")
def _square(m: Bounds, out: Tensor, x: Ball) -> Ball:
    return _power(m, out, x, _number(2))


@_handles("pow")
def _power(m: Bounds, out: Tensor, x: Ball, exponent: Ball) -> Ball:
    x, n = m.read(x), exponent.c
    if n in (1, 2, 3):
        r = _size(x) ** n - x.c.abs() ** n
        return m.rounded(out, r, out.abs() + r)
    r = _through(lambda v: v**n, x, 0.0)
    exact = n in (0.5, -0.5, -1)
    return m.rounded(out, r + (0 if exact else FUNCTION * (1 + abs(n)) * out.abs()), out.abs() + r)


def _through(f: Callable[[Tensor], Tensor], x: Ball, least: float) -> Tensor:
    """The radius of a monotone function of `x`; unbounded where the function need not be defined (below `least`)."""
    low, high, middle = f(x.c - x.r), f(x.c + x.r), f(x.c)
    r = torch.maximum((low - middle).abs(), (high - middle).abs())
    r = torch.where((x.c - x.r < least) | r.isnan(), torch.inf, r)
    return torch.where(x.r == 0, 0.0, r)


@_handles("maximum", "clamp_min")
def _maximum(m: Bounds, out: Tensor, x: Ball, y: Ball) -> Ball:
    return _extreme(m, torch.maximum, x, y)


@_handles("minimum", "clamp_max")
def _minimum(m: Bounds, out: Tensor, x: Ball, y: Ball) -> Ball:
    return _extreme(m, torch.minimum, x, y)


def _extreme(m: Bounds, f: Callable[[Tensor, Tensor], Tensor], x: Ball, y: Ball) -> Ball:
    """Exact, and monotone in both: what lies beyond the other operand leaves no uncertainty."""
    if x.moved is None and y.moved is None:
        x, y = m.choice(x), m.choice(y)
    (cx, rx), (cy, ry) = (tuple(map(torch.as_tensor, b[:2])) for b in (x, y))
    out = f(cx.double(), cy.double())
    r = torch.maximum(out - f(cx - rx, cy - ry), f(cx + rx, cy + ry) - out)
    return Ball(out, r, _either(x, y, out))


@_handles("clamp")
def _clamp(m: Bounds, out: Tensor, x: Ball, min: Ball | None = None, max: Ball | None = None) -> Ball:
    x = x if min is None else _extreme(m, torch.maximum, x, min)
    return x if max is None else _extreme(m, torch.minimum, x, max)


def _either(x: Ball, y: Ball, out: Tensor) -> Tensor | None:
    """A choice between two values of which one is an expansion is an expansion."""
    found = [b.moved for b in (x, y) if b.moved is not None]
    return sum(found) + torch.zeros_like(out) if found else None


@_handles("lt", "le", "gt", "ge", "eq", "ne")
def _compare(m: Bounds, out: Tensor, x: Ball, y: Ball) -> Ball:
    x, y = m.read(x), m.read(y)
    radius = torch.as_tensor(x.r + y.r)
    return Ball(out, (abs(x.c - y.c) <= radius) & (radius > 0))


@_handles("logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not")
def _logic(m: Bounds, out: Tensor, *masks: Ball) -> Ball:
    unsure = torch.zeros_like(out)
    for mask in masks:
        unsure = unsure | mask.r
    return Ball(out, unsure)


@_handles("where")
def _where(m: Bounds, out: Tensor, mask: Ball, x: Ball, y: Ball) -> Ball:
    moved = _either(x, y, out)
    if moved is None:
        x, y = m.choice(x), m.choice(y)
    sure = torch.where(mask.c, x.r, y.r).double()
    larger = torch.maximum(torch.as_tensor(x.r), torch.as_tensor(y.r))
    return Ball(out, torch.where(mask.r, abs(x.c - y.c) + larger, sure), moved)


@_handles("masked_fill")
def _masked_fill(m: Bounds, out: Tensor, x: Ball, mask: Ball, value: Ball) -> Ball:
    return _where(m, out, mask, value, x)


@_handles("index_put")
def _index_put(m: Bounds, out: Tensor, x: Ball, indices: list[Ball], value: Ball, *_: Any) -> Ball:
    return _where(m, out, indices[0], value, x)


@_handles("copy")
def _copy(m: Bounds, out: Tensor, x: Ball, source: Ball, *_: Any) -> Ball:
    return source if isinstance(source.c, Tensor) else Ball(out, source.r + torch.zeros_like(out))


@_handles("clone", "detach", "alias", "lift_fresh", "view", "_unsafe_view", "view_as", "expand")
def _same(m: Bounds, out: Tensor, x: Ball, *_: Any, **__: Any) -> Ball:
    return x


@_handles("_to_copy")
def _to_dtype(m: Bounds, out: Tensor, x: Ball, **_: Any) -> Ball:
    if out.dtype == torch.bool:
        raise Unbounded("a number becomes a mask")
    if x.c.dtype == torch.bool:
        return m.read(x)
    loss = {torch.float64: 0.0, torch.float32: 2.0**-24, torch.bfloat16: BF16}[out.dtype]
    return Ball(x.c, x.r + loss * _size(x), x.moved)


@_handles("zeros_like", "ones_like", "full_like", "zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "fill",
          "zero", "empty_like", "empty")  # fmt: skip
def _fill(m: Bounds, out: Tensor, *_: Any, **__: Any) -> Ball:
    if out.dtype == torch.bool:
        return Ball(out, torch.zeros_like(out))
    exact = bool((out == out.bfloat16()).all())
    zeros = torch.zeros_like(out)
    return Ball(out, zeros if exact else m.fill * out.abs(), zeros if m.bf16 else None, False, m.bf16)


def stored(ball: Ball, fmt: str) -> Tensor:
    """The radius after a value was stored in the format called `fmt`."""
    radius: Tensor = ball.r + STORED[fmt] * _size(ball)
    return radius


def stored_state(ball: Ball, fmt: str) -> Tensor:
    """The same of a state: a sum that began as a copy of the parameter is a plain value there."""
    return stored(ball if ball.off is None else ball._replace(r=torch.maximum(ball.r, ball.off)), fmt)
