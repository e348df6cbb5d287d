"""The kernels for GPUs against the function they stand for; here in Triton's interpreter, on a GPU as they are.

python tests/test_kernels.py      on a machine with a GPU: all precisions, real sizes
"""

import os
import sys
from itertools import pairwise

import pytest
import torch
from torch.func import grad

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton", reason="the kernels need Triton: pip install triton")

from t3d import kernels, networks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def parameters(lead, sizes, bias=0.0):
    """With a `bias` of 10, and 100 for the second layer, no unit is ever off, and rounding cannot turn one on."""
    torch.manual_seed(0)
    made = {}
    for layer, (fan_in, out) in enumerate(pairwise(sizes), start=1):
        made[f"w{layer}"] = torch.randn(*lead, fan_in, out, device=DEVICE) / fan_in**0.5
        made[f"b{layer}"] = torch.randn(*lead, 1, out, device=DEVICE) + bias**layer
    return made


def errors(lead, sizes, batch, precision, x=None, weights=None):
    """How far off outputs, the weights' gradients and the input's are, as shares of their norms."""
    weights = parameters(lead, sizes) if weights is None else weights
    x = torch.randn(lead[-1], batch, sizes[0], device=DEVICE) if x is None else x
    fast = kernels.mlp(precision)
    coefficients = torch.randn(*lead, batch, sizes[-1], device=DEVICE)

    def error(a, b):
        return float((a.double() - b).norm() / b.norm())

    def both(perceptron, weights, x, coefficients):
        def loss(weights, x):
            return (perceptron(weights, x) * coefficients).sum()

        weights_alone, x_alone = grad(loss)(weights, x), grad(loss, 1)(weights, x)
        of_both, of_x = grad(loss, (0, 1))(weights, x)
        assert all(torch.equal(tensor, of_both[name]) for name, tensor in weights_alone.items())
        assert torch.equal(x_alone, of_x)
        return perceptron(weights, x), of_both, of_x

    y, of_weights, of_x = both(fast, weights, x, coefficients)
    exact_weights = {name: tensor.double() for name, tensor in weights.items()}
    exact_y, exact_of_weights, exact_of_x = both(networks.mlp, exact_weights, x.double(), coefficients.double())
    return (
        error(y, exact_y),
        max(error(of_weights[name], exact_of_weights[name]) for name in weights),
        error(of_x, exact_of_x),
    )


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize(
    "lead, sizes, batch",
    [
        ((2, 3), (23, 64, 32, 1), 40),  # twins
        ((2,), (17, 32, 48, 6), 20),  # an actor
        ((2, 1), (70, 40, 300, 1), 33),  # nothing a power of two, inputs in two parts
    ],
)
def test_a_kernel_is_the_function_it_stands_for(lead, sizes, batch, precision):
    limit = 1e-5 if precision == "fp32" or DEVICE == "cpu" else 3e-3
    assert max(errors(lead, sizes, batch, precision)) < limit


def test_seeds_that_are_part_of_a_larger_whole():
    whole = parameters((2, 4), (5, 32, 16, 1))
    part = {name: tensor[:, 2:3] for name, tensor in whole.items()}
    x = torch.randn(4, 8, 30, device=DEVICE)[2:3, :, 4:9]  # rows that stand among other numbers
    assert max(errors((2, 1), (5, 32, 16, 1), 8, "fp32", x=x, weights=part)) < 1e-5


@pytest.mark.parametrize("seeds", [[7], [7, 3]])
def test_critics_as_they_are_made(seeds):
    critic = networks.init_critic(torch.tensor(seeds, device=DEVICE), 3, 2, (32, 16), torch.float32)
    found = errors((2, len(seeds)), (5, 32, 16, 1), 20, "fp32", weights=critic)
    assert max(found) < 1e-5
    twins = kernels.mlp("fp32")(critic, torch.randn(len(seeds), 20, 5, device=DEVICE))
    assert not torch.allclose(twins[0], twins[1], atol=1e-3)


def test_which_networks_they_are_for():
    assert kernels.fits(17, 6, (256, 256)) and kernels.fits(105, 8, (400, 300))
    assert (
        not kernels.fits(17, 6, (256,)) and not kernels.fits(17, 6, (1024, 256)) and not kernels.fits(600, 6, (64, 64))
    )


def main():
    for precision, limit in (("fp32", 1e-4), ("tf32", 3e-3), ("bf16", 3e-2)):
        for lead, sizes, batch in (
            ((1,), (17, 256, 256, 6), 256),
            ((2, 1), (23, 256, 256, 1), 256),
            ((2, 10), (23, 256, 256, 1), 256),
            ((10,), (105, 256, 256, 8), 256),
            ((10,), (348, 256, 256, 17), 256),
            ((2, 40), (23, 256, 256, 1), 256),
            ((2, 3), (23, 400, 300, 1), 100),
        ):
            weights = parameters(lead, sizes, bias=0.0 if precision == "fp32" else 10.0)
            found = errors(lead, sizes, batch, precision, weights=weights)
            print(precision, lead, sizes, batch, "off by", *(f"{error:.1e}" for error in found), flush=True)
            assert max(found) < limit


if __name__ == "__main__":
    sys.exit(main())
