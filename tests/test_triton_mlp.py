"""The kernels for GPUs against the function they stand for; here in Triton's interpreter, on a GPU as they are.

python tests/test_triton_mlp.py      on a machine with a GPU: all precisions, real sizes
"""

import os
import sys

import by_hand
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton", reason="the kernels need Triton: pip install triton")

from t3d import networks
from t3d.learners import triton_mlp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def parameters(lead, sizes, bias=0.0):
    return by_hand.parameters(lead, sizes, bias, DEVICE)


def errors(lead, sizes, batch, precision, x=None, weights=None):
    weights = parameters(lead, sizes) if weights is None else weights
    x = torch.randn(lead[-1], batch, sizes[0], device=DEVICE) if x is None else x
    return by_hand.errors(triton_mlp.mlp(precision), weights, x)


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
    rounded = precision == "tf32" and DEVICE == "cuda"
    weights = parameters(lead, sizes, bias=10.0 if rounded else 0.0)
    assert max(errors(lead, sizes, batch, precision, weights=weights)) < (3e-3 if rounded else 1e-5)


def test_seeds_that_are_part_of_a_larger_whole():
    whole = parameters((2, 4), (5, 32, 16, 1))
    part = {name: tensor[:, 2:3] for name, tensor in whole.items()}
    x = torch.randn(4, 8, 30, device=DEVICE)[2:3, :, 4:9]  # rows that stand among other numbers
    assert max(errors((2, 1), (5, 32, 16, 1), 8, "fp32", x=x, weights=part)) < 1e-5


@pytest.mark.parametrize("seeds", [[7], [7, 3]])
def test_critics_as_they_are_made(seeds):
    critic = networks.MLP.init_critic(torch.tensor(seeds, device=DEVICE), 3, 2, (32, 16), torch.float32)
    found = errors((2, len(seeds)), (5, 32, 16, 1), 20, "fp32", weights=critic)
    assert max(found) < 1e-5
    twins = triton_mlp.mlp("fp32")(critic, torch.randn(len(seeds), 20, 5, device=DEVICE))
    assert not torch.allclose(twins[0], twins[1], atol=1e-3)


def test_which_networks_they_are_for():
    assert triton_mlp.fits(17, 6, (256, 256)) and triton_mlp.fits(105, 8, (400, 300))
    assert (
        not triton_mlp.fits(17, 6, (256,))
        and not triton_mlp.fits(17, 6, (1024, 256))
        and not triton_mlp.fits(600, 6, (64, 64))
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
