"""A network that is computed by hand beside the function it stands for."""

from itertools import pairwise

import torch
from torch.func import grad

from t3d import networks


def parameters(lead, sizes, bias=0.0, device="cpu"):
    """With a `bias` of 10, and 100 for the second layer, no unit is ever off, and rounding cannot turn one on."""
    torch.manual_seed(0)
    made = {}
    for layer, (fan_in, out) in enumerate(pairwise(sizes), start=1):
        made[f"w{layer}"] = torch.randn(*lead, fan_in, out, device=device) / fan_in**0.5
        made[f"b{layer}"] = torch.randn(*lead, 1, out, device=device) + bias**layer
    return made


def errors(fast, weights, x):
    """How far off outputs, the weights' gradients and the input's are, as shares of their norms."""
    coefficients = torch.randn_like(networks.mlp(weights, x))

    def error(a, b):
        return float((a.double() - b).norm() / b.norm())

    def both(mlp, weights, x, coefficients):
        def loss(weights, x):
            return (mlp(weights, x) * coefficients).sum()

        weights_alone, x_alone = grad(loss)(weights, x), grad(loss, 1)(weights, x)
        of_both, of_x = grad(loss, (0, 1))(weights, x)
        assert all(torch.equal(tensor, of_both[name]) for name, tensor in weights_alone.items())
        assert torch.equal(x_alone, of_x)
        return mlp(weights, x), of_both, of_x

    y, of_weights, of_x = both(fast, weights, x, coefficients)
    exact_weights = {name: tensor.double() for name, tensor in weights.items()}
    exact_y, exact_of_weights, exact_of_x = both(networks.mlp, exact_weights, x.double(), coefficients.double())
    return (
        error(y, exact_y),
        max(error(of_weights[name], exact_of_weights[name]) for name in weights),
        error(of_x, exact_of_x),
    )
