"""[steps 2 and 3] `networks.mlp` in C++ for CPUs with AVX-512 (`cpu_mlp.cpp`).

PyTorch's matrix products reach less than these CPUs can do, and each bias and ReLU would be a pass through memory of
its own. Only learners choose it; the tests compare it with `networks.mlp`.

Shapes: T twins (1 or 2), S seeds, B batch; sizes of the layers D -> H1 -> H2 -> K. x (S, B, D), which the twins share,
weights (T, S, in, out), or without T.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from t3d import networks
from t3d.networks import Parameters
from t3d.torch_private import load_cpp


def mlp(precision: str) -> Callable[[Parameters, Tensor], Tensor]:
    """The replacement of `networks.mlp`: matrix products in `precision`, but the last layer's never in bfloat16."""
    load()

    def apply(parameters: Parameters, x: Tensor) -> Tensor:
        if "gain1" in parameters:
            return networks.mlp(parameters, x)
        weights = [parameters[f"{name}{layer}"] for layer in (1, 2, 3) for name in ("w", "b")]
        if x.requires_grad or any(w.requires_grad for w in weights):
            out: Tensor = _MLP.apply(precision == "bf16", x, *weights)[0]  # type: ignore[no-untyped-call]
            return out
        y: Tensor = torch.ops.t3d_cpu_mlp.forward(x, *weights, precision == "bf16", False)[0]
        return y

    return apply


def fits(hidden: tuple[int, ...]) -> bool:
    """Whether it can compute networks of these sizes on this machine."""
    return len(hidden) == 2 and torch.backends.cpu.get_cpu_capability() == "AVX512"


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(bf16: bool, x: Tensor, *weights: Tensor) -> Any:
        return torch.ops.t3d_cpu_mlp.forward(x, *weights, bf16, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.bf16, x, w1, _, w2, _, w3, _ = inputs
        _, one, two = output
        ctx.mark_non_differentiable(one, two)
        ctx.save_for_backward(x, one, two, w1, w2, w3)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *kept = ctx.saved_tensors
        into, of_weights = ctx.needs_input_grad[1], any(ctx.needs_input_grad[2:])
        dx, *of = torch.ops.t3d_cpu_mlp.backward(x, gradients[0], *kept, ctx.bf16, into, of_weights)
        return None, dx.sum_to_size(x.shape) if into else None, *(of if of_weights else [None] * 6)


@cache
def load() -> None:
    """Compile it, or load it from the cache; its operations are PyTorch operators from then on."""
    load_cpp(Path(__file__).with_suffix(".cpp").read_text())
    torch.library.register_fake("t3d_cpu_mlp::forward", _forward_empty)
    torch.library.register_fake("t3d_cpu_mlp::backward", _backward_empty)


def _forward_empty(
    x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, w3: Tensor, b3: Tensor, bf16: bool, keep: bool
) -> tuple[Tensor, ...]:
    lead = (*w1.shape[:-2], x.shape[-2])
    hidden = [x.new_empty((*lead, w.shape[-1]) if keep else (0,)) for w in (w1, w2)]
    return x.new_empty(*lead, w3.shape[-1]), *hidden


def _backward_empty(
    x: Tensor,
    dy: Tensor,
    h1: Tensor,
    h2: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    bf16: bool,
    into: bool,
    of_weights: bool,
) -> tuple[Tensor, ...]:
    lead = w1.shape[:-2]
    shapes = [(*lead, rows, w.shape[-1]) for w in (w1, w2, w3) for rows in (w.shape[-2], 1)]
    dx = x.new_empty((*lead, x.shape[-2], x.shape[-1]) if into else (0,))
    return dx, *(x.new_empty(shape if of_weights else (0,)) for shape in shapes)
