"""[steps 2 and 3] `networks.mlp` for GPUs, written in Triton: a whole network in one kernel instead of nine.

At these sizes a GPU waits for one small kernel after another, so what counts is how many there are. Three do all the
work of a network with two hidden layers: `_forward`; `_backward`, which goes back through the layers for a few rows of
the batch; and `_weights`, which adds up every weight's gradient over the batch. Only `accelerate/` chooses them, and
the tests compare them with the function they stand for.

Shapes: T twins (1 or 2), S seeds, B batch; sizes of the layers D -> H1 -> H2 -> K. x (S, B, D), which the twins share,
weights (T, S, in, out), or without T. What has no P at its end is as large as it is; what has, the next power of two.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from t3d import networks
from t3d.networks import Parameters

WIDEST = 512  # of the layers: a row of them stays in registers


def fits(obs_dim: int, action_dim: int, hidden: tuple[int, ...]) -> bool:
    """Whether networks of these sizes are what the kernels are for."""
    return len(hidden) == 2 and max(obs_dim + action_dim, *hidden) <= WIDEST and action_dim <= 64


def mlp(precision: str) -> Callable[[Parameters, Tensor], Tensor]:
    """What stands for `networks.mlp`; matrix products are in `precision`, but the last layer's never in bfloat16."""

    def apply(parameters: Parameters, x: Tensor) -> Tensor:
        if "gain1" in parameters:
            return networks.mlp(parameters, x)
        weights = [parameters[f"{name}{layer}"] for layer in (1, 2, 3) for name in ("w", "b")]
        if x.requires_grad or any(w.requires_grad for w in weights):
            out: Tensor = _MLP.apply(precision, x, *weights)[0]
            return out
        parts, _, _ = torch.ops.t3d.mlp(x, weights, precision, False)
        return torch.as_tensor(parts.sum(0) + weights[-1])

    return apply


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(precision: str, x: Tensor, *weights: Tensor) -> Any:
        parts, one, two = torch.ops.t3d.mlp(x, weights, precision, True)
        return parts.sum(0) + weights[-1], one, two

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.precision, x, w1, _, w2, _, w3, _ = inputs
        _, one, two = output
        ctx.mark_non_differentiable(one, two)
        ctx.save_for_backward(x, w1, w2, w3, one, two)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, w1, w2, w3, one, two = ctx.saved_tensors
        dy, precision = gradients[0], ctx.precision
        wants_x, wants_weights = ctx.needs_input_grad[1], any(ctx.needs_input_grad[2:])
        weights = [w1, w2, w3]
        parts, d1, d2 = torch.ops.t3d.mlp_backward(dy, one, two, weights, wants_x, wants_weights, precision)
        into = parts.sum(0).sum_to_size(x.shape) if wants_x else None
        if not wants_weights:
            return None, into, None, None, None, None, None, None
        w1, b1, w2, b2, w3, b3 = torch.ops.t3d.mlp_weights(x, one, two, d1, d2, dy, precision)
        return None, into, w1, b1, w2, b2, w3, b3


# ------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _dot(a, b, into, PRECISION: tl.constexpr):
    if PRECISION == "bf16":
        into = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), into)
    else:
        into = tl.dot(a.to(tl.float32), b.to(tl.float32), into, input_precision=PRECISION)
    return into


@triton.constexpr_function
def _last(PRECISION):
    """Of the last layer's products: never less than tf32, or values would be rounded to one part in 256."""
    return "tf32" if PRECISION == "bf16" else PRECISION


@triton.jit
def _forward(
    x, w1, b1, w2, b2, w3, parts, h1, h2, B, S, X, STRIDE, ROW, FULL,
    D: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    KEEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BM rows and BN columns of h2 = relu(relu(x w1 + b1) w2 + b2), and what those columns add to h2 w3.

    The first layer is small and computed again for every part of the second. KEEP h1 and h2 for the way back.
    """
    tiles: tl.constexpr = (H2 + BN - 1) // BN
    tile, net = tl.program_id(0) % tiles, tl.program_id(1)
    at = (net // S * FULL + net % S).to(tl.int64)  # where its weights are: seeds may be a part of a larger whole
    rows = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    here = rows < B
    own = (net * B + rows).to(tl.int64)

    seen = x + (net % X) * STRIDE + rows[:, None] * ROW
    i = tl.arange(0, BD)
    whole = tl.load(seen + i[None, :], here[:, None] & (i < D)[None, :], 0.0)  # of x, where it has no more columns
    i2 = tile * BN + tl.arange(0, BN)
    two = tl.zeros((BM, BN), tl.float32)
    for first in range(0, H1, BK):
        i1 = first + tl.arange(0, BK)
        first_w = tl.load(w1 + at * D * H1 + i[:, None] * H1 + i1[None, :], (i < D)[:, None] & (i1 < H1)[None, :], 0.0)
        one = _dot(whole, first_w, tl.zeros((BM, BK), tl.float32), PRECISION)
        for begin in tl.static_range(BD, D, BD):
            ix = begin + tl.arange(0, BD)
            more = tl.load(seen + ix[None, :], here[:, None] & (ix < D)[None, :], 0.0)
            more_w = tl.load(
                w1 + at * D * H1 + ix[:, None] * H1 + i1[None, :], (ix < D)[:, None] & (i1 < H1)[None, :], 0.0
            )
            one = _dot(more, more_w, one, PRECISION)
        one = tl.maximum(one + tl.load(b1 + at * H1 + i1, i1 < H1, 0.0)[None, :], 0.0)
        if KEEP:
            tl.store(h1 + own[:, None] * H1 + i1[None, :], one, here[:, None] & (i1 < H1)[None, :] & (tile == 0))
        second_w = tl.load(
            w2 + at * H1 * H2 + i1[:, None] * H2 + i2[None, :], (i1 < H1)[:, None] & (i2 < H2)[None, :], 0.0
        )
        two = _dot(one, second_w, two, PRECISION)

    two = tl.maximum(two + tl.load(b2 + at * H2 + i2, i2 < H2, 0.0)[None, :], 0.0)
    if KEEP:
        tl.store(h2 + own[:, None] * H2 + i2[None, :], two, here[:, None] & (i2 < H2)[None, :])
    place = parts + (tile * tl.num_programs(1) * B + own) * K
    if K == 1:
        tl.store(place, tl.sum(two * tl.load(w3 + at * H2 + i2, i2 < H2, 0.0)[None, :], 1), here)
    else:
        ik = tl.arange(0, KP)
        third_w = tl.load(w3 + at * H2 * K + i2[:, None] * K + ik[None, :], (i2 < H2)[:, None] & (ik < K)[None, :], 0.0)
        out = _dot(two, third_w, tl.zeros((BM, KP), tl.float32), _last(PRECISION))
        tl.store(place[:, None] + ik[None, :], out, here[:, None] & (ik < K)[None, :])


@triton.jit
def _backward(
    dy, h1, h2, w1, w2, w3, parts, d1, d2, B, S, FULL,
    D: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr, K: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr,
    INPUT: tl.constexpr, KEEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """From dy to d2 and to BM rows and BN columns of d1, what the hidden layers are to change; KEEP them for the
    weights. With INPUT, what those columns add to dx."""
    tiles: tl.constexpr = (H1 + BN - 1) // BN
    tile, net = tl.program_id(0) % tiles, tl.program_id(1)
    at = (net // S * FULL + net % S).to(tl.int64)
    rows = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    here = rows < B
    own = (net * B + rows).to(tl.int64)

    ik = tl.arange(0, KP)
    g = tl.load(dy + own[:, None] * K + ik[None, :], here[:, None] & (ik < K)[None, :], 0.0)
    only = tl.load(dy + own * K, here, 0.0)  # where there is but one
    i1 = tile * BN + tl.arange(0, BN)
    back = tl.zeros((BM, BN), tl.float32)
    for first in range(0, H2, BK):
        i2 = first + tl.arange(0, BK)
        if K == 1:
            change = only[:, None] * tl.load(w3 + at * H2 + i2, i2 < H2, 0.0)[None, :]
        else:
            third_w = tl.load(
                w3 + at * H2 * K + i2[None, :] * K + ik[:, None], (ik < K)[:, None] & (i2 < H2)[None, :], 0.0
            )
            change = _dot(g, third_w, tl.zeros((BM, BK), tl.float32), _last(PRECISION))
        inside2 = here[:, None] & (i2 < H2)[None, :]
        two = tl.load(h2 + own[:, None] * H2 + i2[None, :], inside2, 0.0)
        change = tl.where(two > 0, change, 0.0)
        if KEEP:
            tl.store(d2 + own[:, None] * H2 + i2[None, :], change, inside2 & (tile == 0))
        second_w = tl.load(
            w2 + at * H1 * H2 + i1[None, :] * H2 + i2[:, None], (i2 < H2)[:, None] & (i1 < H1)[None, :], 0.0
        )
        back = _dot(change, second_w, back, PRECISION)

    inside1 = here[:, None] & (i1 < H1)[None, :]
    one = tl.load(h1 + own[:, None] * H1 + i1[None, :], inside1, 0.0)
    back = tl.where(one > 0, back, 0.0)
    if KEEP:
        tl.store(d1 + own[:, None] * H1 + i1[None, :], back, inside1)
    if INPUT:
        i = tl.arange(0, DP)
        first_w = tl.load(w1 + at * D * H1 + i[None, :] * H1 + i1[:, None], (i1 < H1)[:, None] & (i < D)[None, :], 0.0)
        into = _dot(back, first_w, tl.zeros((BM, DP), tl.float32), PRECISION)
        place = parts + (tile * tl.num_programs(1) * B + own) * D
        tl.store(place[:, None] + i[None, :], into, here[:, None] & (i < D)[None, :])


@triton.jit
def _product(
    a, d, w, tile, STRIDE, B: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    BP: tl.constexpr, BQ: tl.constexpr, BB: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of w (P, Q) = aᵀ d, added up over the batch."""
    across: tl.constexpr = (Q + BQ - 1) // BQ
    p = tile // across * BP + tl.arange(0, BP)
    q = tile % across * BQ + tl.arange(0, BQ)
    total = tl.zeros((BP, BQ), tl.float32)
    for first in range(0, B, BB):
        row = first + tl.arange(0, BB)
        left = tl.load(a + row[None, :] * STRIDE + p[:, None], (row < B)[None, :] & (p < P)[:, None], 0.0)
        right = tl.load(d + row[:, None] * Q + q[None, :], (row < B)[:, None] & (q < Q)[None, :], 0.0)
        total = _dot(left, right, total, PRECISION)
    tl.store(w + p[:, None] * Q + q[None, :], total, (p < P)[:, None] & (q < Q)[None, :])


@triton.jit
def _sum(d, factor, out, tile, B: tl.constexpr, Q: tl.constexpr, BS: tl.constexpr, WEIGHTED: tl.constexpr):
    """BS numbers of out (Q) = d (B, Q), each row times its factor if WEIGHTED, added up over the batch."""
    q = tile * BS + tl.arange(0, BS)
    total = tl.zeros((128, BS), tl.float32)
    for first in range(0, B, 128):
        row = first + tl.arange(0, 128)
        part = tl.load(d + row[:, None] * Q + q[None, :], (row < B)[:, None] & (q < Q)[None, :], 0.0).to(tl.float32)
        if WEIGHTED:
            part *= tl.load(factor + row, row < B, 0.0)[:, None]
        total += part
    tl.store(out + q, tl.sum(total, 0), q < Q)


@triton.jit
def _weights(
    x, h1, h2, d1, d2, dy, w1, b1, w2, b2, w3, b3, X, STRIDE, ROW, B: tl.constexpr,
    D: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BP: tl.constexpr, BQ: tl.constexpr, BB: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of all weights of one network, a part for each program: the largest first, sums last."""
    tile, net = tl.program_id(0), tl.program_id(1).to(tl.int64)
    end2: tl.constexpr = ((H1 + BP - 1) // BP) * ((H2 + BQ - 1) // BQ)
    end1: tl.constexpr = end2 + ((D + BP - 1) // BP) * ((H1 + BQ - 1) // BQ)
    end3: tl.constexpr = end1 + ((H2 + BS - 1) // BS if K == 1 else (H2 + BP - 1) // BP)
    end_b1: tl.constexpr = end3 + (H1 + BS - 1) // BS
    end_b2: tl.constexpr = end_b1 + (H2 + BS - 1) // BS
    h1 += net * B * H1
    d1 += net * B * H1
    h2 += net * B * H2
    d2 += net * B * H2
    dy += net * B * K
    if tile < end2:
        _product(h1, d2, w2 + net * H1 * H2, tile, H1, B, H1, H2, BP, BQ, BB, PRECISION)
    elif tile < end1:
        a = x + net % X * STRIDE
        _product(a, d1, w1 + net * D * H1, tile - end2, ROW, B, D, H1, BP, BQ, BB, PRECISION)
    elif tile < end3:
        if K == 1:
            _sum(h2, dy, w3 + net * H2, tile - end1, B, H2, BS, True)
        else:
            _product(h2, dy, w3 + net * H2 * K, tile - end1, H2, B, H2, K, BP, KP, BB, _last(PRECISION))
    elif tile < end_b1:
        _sum(d1, dy, b1 + net * H1, tile - end3, B, H1, BS, False)
    elif tile < end_b2:
        _sum(d2, dy, b2 + net * H2, tile - end_b1, B, H2, BS, False)
    else:
        _sum(dy, dy, b3 + net * K, tile - end_b2, B, K, BS, False)


# ------------------------------------------------------------------------------------------------------ launching

_library = torch.library.Library("t3d", "DEF")
_library.define("mlp(Tensor x, Tensor[] weights, str precision, bool keep) -> (Tensor, Tensor, Tensor)")
_library.define(
    "mlp_backward(Tensor dy, Tensor h1, Tensor h2, Tensor[] weights, bool into, bool keep, str precision)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "mlp_weights(Tensor x, Tensor h1, Tensor h2, Tensor d1, Tensor d2, Tensor dy, str precision)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _padded(size: int, least: int = 16) -> int:
    return max(least, int(triton.next_power_of_2(size)))


def _dtype(precision: str) -> torch.dtype:
    """Of what is kept between the kernels."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def _kind(precision: str) -> str:
    return {"fp32": "ieee"}.get(precision, precision)


def _nets(w: Tensor) -> tuple[int, int, int]:
    """Networks, seeds, and seeds in the whole that these may be a part of."""
    twins, seeds = (1, w.shape[0]) if w.dim() == 3 else (w.shape[0], w.shape[1])
    # By the size of a matrix: with one seed the stride of the axis of seeds says nothing.
    return twins * seeds, seeds, w.stride(0) // (w.shape[-2] * w.shape[-1]) if w.dim() == 4 else seeds


MOST_PARTS = 8  # that a sum is split into: PyTorch's compiler adds up so many where the sum is used


def _tile(nets: int, sizes: Sequence[int], precision: str, back: bool) -> dict[str, int]:
    """Transitions and columns for each program, as measured: few networks are split into many parts, many into few.

    `python benchmarks/tiles.py` measures.
    """
    most = 3  # loads under way at once
    if sizes[0] > 128:
        rows, columns, deep = 16, 64, 32  # the first layer takes the room
    elif nets <= 8:
        rows, columns, deep = 16, 32 if nets == 1 else 64, 64
    elif precision == "bf16":
        rows, columns, deep = (64, 64, 32) if nets <= 64 else (128, 128, 32 if back else 64)
    elif precision != "tf32":
        rows, columns, deep = 32, 64, 32
    elif not back:
        rows, columns, deep, most = 32, 128, 64, 2
    elif nets > 16 and sizes[0] <= 64:
        rows, columns, deep, most = 64, 256, 32, 2
    else:
        rows, columns, deep = 64, 128, 32
    width = _padded(max(sizes[1:3]))
    columns = max(min(columns, width), width // MOST_PARTS)
    stages = min(most, 3 if sizes[0] <= 64 else 2 if sizes[0] <= 128 else 1)
    return {"BM": rows, "BN": columns, "BK": min(deep, width), "num_warps": 4, "num_stages": stages}


def _weights_tile(nets: int, precision: str) -> dict[str, int]:
    """Transitions and columns of the weights for each program, and rows of the batch at a time."""
    if nets <= 8:
        return {"BP": 32, "BQ": 32 if nets == 1 else 64, "BB": 128, "BS": 32, "num_warps": 4, "num_stages": 2}
    if precision != "bf16":
        wide = 128 if precision == "tf32" else 64
        return {"BP": 32, "BQ": wide, "BB": 64, "BS": 64, "num_warps": 4, "num_stages": 3}
    wide, deep, stages = (64, 128, 2) if nets <= 64 else (256, 32, 3)
    return {"BP": 64, "BQ": wide, "BB": deep, "BS": 64, "num_warps": 4, "num_stages": stages}


def _even(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _forward_empty(x: Tensor, weights: list[Tensor], precision: str, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    w1, _, w2, _, w3, _ = weights
    lead = (*w1.shape[:-2], x.shape[-2])
    h1, h2 = (x.new_empty((*lead, w.shape[-1]) if keep else (0,), dtype=_dtype(precision)) for w in (w1, w2))
    sizes = (x.shape[-1], w1.shape[-1], w2.shape[-1])
    tile = _tile(_nets(w1)[0], sizes, precision, back=False)
    return x.new_empty(triton.cdiv(w2.shape[-1], tile["BN"]), *lead, w3.shape[-1]), h1, h2


def _forward_run(x: Tensor, weights: list[Tensor], precision: str, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    x = _even(x)
    parts, h1, h2 = _forward_empty(x, weights, precision, keep)
    (nets, seeds, full), batch = _nets(weights[0]), x.shape[-2]
    sizes = (x.shape[-1], weights[0].shape[-1], weights[2].shape[-1], parts.shape[-1])
    tile = _tile(nets, sizes, precision, back=False)
    _forward[(triton.cdiv(batch, tile["BM"]) * len(parts), nets)](
        x, *weights[:-1], parts, h1, h2, batch, seeds, x.shape[0], x.stride(0), x.stride(1), full,
        *sizes, _padded(sizes[3]),
        KEEP=keep, BD=min(64, _padded(sizes[0])), PRECISION=_kind(precision), **tile,
    )  # fmt: skip
    return parts, h1, h2


def _backward_empty(
    dy: Tensor, h1: Tensor, h2: Tensor, weights: list[Tensor], into: bool, keep: bool, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    w1, _, _ = weights
    tile = _tile(_nets(w1)[0], (w1.shape[-2], h1.shape[-1], h2.shape[-1]), precision, back=True)
    parts = (triton.cdiv(w1.shape[-1], tile["BN"]), *dy.shape[:-1], w1.shape[-2]) if into else (0,)
    d1, d2 = (torch.empty_like(h) if keep else h.new_empty(0) for h in (h1, h2))
    return dy.new_empty(parts), d1, d2


def _backward_run(
    dy: Tensor, h1: Tensor, h2: Tensor, weights: list[Tensor], into: bool, keep: bool, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    dy = dy.contiguous()
    parts, d1, d2 = _backward_empty(dy, h1, h2, weights, into, keep, precision)
    (nets, seeds, full), batch = _nets(weights[0]), dy.shape[-2]
    sizes = (weights[0].shape[-2], h1.shape[-1], h2.shape[-1], dy.shape[-1])
    tile = _tile(nets, sizes, precision, back=True)
    _backward[(triton.cdiv(batch, tile["BM"]) * triton.cdiv(sizes[1], tile["BN"]), nets)](
        dy, h1, h2, *weights, parts, d1, d2, batch, seeds, full,
        *sizes, _padded(sizes[0]), _padded(sizes[3]),
        INPUT=into, KEEP=keep, PRECISION=_kind(precision), **tile,
    )  # fmt: skip
    return parts, d1, d2


def _weights_empty(
    x: Tensor, h1: Tensor, h2: Tensor, d1: Tensor, d2: Tensor, dy: Tensor, precision: str
) -> tuple[Tensor, ...]:
    sizes = (x.shape[-1], h1.shape[-1], h2.shape[-1], dy.shape[-1])
    lead = dy.shape[:-2]
    return tuple(
        dy.new_empty(*lead, rows, out)
        for fan_in, out in pairwise(sizes)
        for rows in (fan_in, 1)
    )  # fmt: skip


def _weights_run(
    x: Tensor, h1: Tensor, h2: Tensor, d1: Tensor, d2: Tensor, dy: Tensor, precision: str
) -> tuple[Tensor, ...]:
    x, dy = _even(x), dy.contiguous()
    out = _weights_empty(x, h1, h2, d1, d2, dy, precision)
    nets, batch = dy[..., 0, 0].numel(), dy.shape[-2]
    d, one, two, k = x.shape[-1], h1.shape[-1], h2.shape[-1], dy.shape[-1]
    tile = _weights_tile(nets, precision)
    p, q, few = tile["BP"], tile["BQ"], tile["BS"]
    products = triton.cdiv(one, p) * triton.cdiv(two, q) + triton.cdiv(d, p) * triton.cdiv(one, q)
    tiles = products + triton.cdiv(two, few if k == 1 else p)
    tiles += triton.cdiv(one, few) + triton.cdiv(two, few) + triton.cdiv(k, few)
    _weights[(tiles, nets)](
        x, h1, h2, d1, d2, dy, *out, x.shape[0], x.stride(0), x.stride(1), batch,
        d, one, two, k, _padded(k), PRECISION=_kind(precision), **tile,
    )  # fmt: skip
    return out


for _name, _run, _empty in (
    ("mlp", _forward_run, _forward_empty),
    ("mlp_backward", _backward_run, _backward_empty),
    ("mlp_weights", _weights_run, _weights_empty),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"t3d::{_name}", _empty, lib=_library)
