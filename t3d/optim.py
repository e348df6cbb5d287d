"""Adam and Polyak averaging on dictionaries of tensors, in place.

Every operation is elementwise, so twin critics and seeds are leading axes that do not affect each other.
`count` is (S,), the Adam steps each seed has taken; parameters are (..., S, in, out).
"""

from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from t3d.networks import Parameters

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8  # Kingma & Ba, and PyTorch's defaults


@dataclass
class AdamState:
    """The state of Adam: two moments for each parameter, and the number of steps."""

    m: Parameters
    v: Parameters
    count: Tensor


def init_adam(parameters: Parameters, seeds: Tensor) -> AdamState:
    """Zero moments and zero steps."""
    zeros = {name: torch.zeros_like(p) for name, p in parameters.items()}
    return AdamState(zeros, {name: z.clone() for name, z in zeros.items()}, torch.zeros_like(seeds))


def adam(parameters: Parameters, gradients: Parameters, state: AdamState, lr: float) -> None:
    """w ← w − lr · m̂ / (√v̂ + ε), with bias-corrected moments m̂ and v̂."""
    state.count.add_(1)
    # In float64: 1 − 0.999 loses half of its digits in float32. βᵗ as exp(t · log β): a compiler computes the
    # exponential once, but a power again for each weight.
    count = state.count.double()[:, None, None]  # (S, 1, 1)
    step = lr / (1 - torch.exp(count * log(BETA_1)))
    scale = (1 - torch.exp(count * log(BETA_2))).rsqrt()
    for name, w in parameters.items():
        g, m, v = gradients[name], state.m[name], state.v[name]
        m.lerp_(g, 1 - BETA_1)
        v.lerp_(g * g, 1 - BETA_2)
        w.sub_(step.to(w.dtype) * m / (v.sqrt() * scale.to(w.dtype) + EPSILON))


def polyak(target: Parameters, online: Parameters, tau: float) -> None:
    """target ← (1 − τ) · target + τ · online."""
    for name, tensor in target.items():
        tensor.lerp_(online[name], tau)
