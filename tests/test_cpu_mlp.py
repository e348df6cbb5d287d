"""Networks in C++ against the function they stand for."""

import by_hand
import pytest
import torch

from t3d import networks
from t3d.learners import cpu_mlp
from t3d.torch_private import has_avx512_bf16

if not cpu_mlp.fits((64, 64)):
    pytest.skip("this processor has no 512-bit vectors", allow_module_level=True)
SHAPES = [
    ((2, 3), (23, 64, 32, 1), 40),  # twins
    ((2,), (17, 32, 48, 6), 20),  # an actor
    ((2, 1), (70, 40, 300, 1), 33),  # nothing a multiple of anything
    ((3,), (3, 14, 31, 17), 1),  # acting
    ((2, 1), (23, 400, 300, 1), 256),
]


@pytest.mark.parametrize("lead, sizes, batch", SHAPES)
def test_it_is_the_function_it_stands_for(lead, sizes, batch):
    x = torch.randn(lead[-1], batch, sizes[0])
    assert max(by_hand.errors(cpu_mlp.mlp("fp32"), by_hand.parameters(lead, sizes), x)) < 2e-6


@pytest.mark.skipif(not has_avx512_bf16(), reason="this processor has no bfloat16")
@pytest.mark.parametrize("lead, sizes, batch", SHAPES)
def test_bfloat16_rounds_what_is_multiplied_and_nothing_else(lead, sizes, batch):
    weights, x = by_hand.parameters(lead, sizes, bias=10.0), torch.randn(lead[-1], batch, sizes[0])
    assert max(by_hand.errors(cpu_mlp.mlp("bf16"), weights, x)) < 1e-2
    # Without the hidden products nothing is lost: biases and the last layer are not rounded.
    weights["w2"] = torch.zeros_like(weights["w2"])
    exact = networks.mlp({name: tensor.double() for name, tensor in weights.items()}, x.double())
    torch.testing.assert_close(cpu_mlp.mlp("bf16")(weights, x).double(), exact, rtol=1e-5, atol=1e-3)


def test_a_part_of_more_seeds():
    whole = by_hand.parameters((2, 5), (23, 64, 32, 1))
    part = {name: tensor.narrow(1, 3, 1) for name, tensor in whole.items()}
    x = torch.randn(1, 16, 30)[..., :23]  # not even in one piece
    torch.testing.assert_close(cpu_mlp.mlp("fp32")(part, x), networks.mlp(part, x))


def test_threads_change_no_bit():
    weights, x = by_hand.parameters((2, 1), (23, 64, 96, 1)), torch.randn(1, 50, 23)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
        y = cpu_mlp.mlp("fp32")(leaves, x)
        y.square().sum().backward()
        found.append([y.detach(), *(tensor.grad for tensor in leaves.values())])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_what_is_not_a_number_stays_none():
    weights, x = by_hand.parameters((1,), (5, 16, 16, 2)), torch.randn(1, 4, 5)
    x[0, 1, 2] = torch.nan
    assert cpu_mlp.mlp("fp32")(weights, x).isnan().any(-1).tolist() == [[False, True, False, False]]


def test_normalised_layers_are_left_to_the_function_itself():
    weights = by_hand.parameters((2, 2), (5, 8, 8, 1))
    weights |= {"gain1": torch.ones(2, 2, 1, 8), "shift1": torch.zeros(2, 2, 1, 8)}
    x = torch.randn(2, 3, 5)
    assert torch.equal(cpu_mlp.mlp("fp32")(weights, x), networks.mlp(weights, x))
