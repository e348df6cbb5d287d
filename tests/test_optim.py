"""Adam and Polyak against exact numbers and against torch."""

import torch

from t3d.optim import adam, init_adam, polyak


def test_polyak_all_nothing_and_half():
    target, online = {"w": torch.tensor([1.0, 3.0])}, {"w": torch.tensor([2.0, -1.0])}
    polyak(target, online, tau=0.0)
    assert target["w"].tolist() == [1.0, 3.0]
    polyak(target, online, tau=0.5)
    assert target["w"].tolist() == [1.5, 1.0]
    polyak(target, online, tau=1.0)
    assert target["w"].tolist() == [2.0, -1.0]
    assert online["w"].tolist() == [2.0, -1.0]


def test_first_adam_step_is_the_learning_rate():
    w = {"w": torch.zeros(1, 1, 3)}
    state = init_adam(w, torch.tensor([0]))
    adam(w, {"w": torch.tensor([[[5.0, -0.01, 0.0]]])}, state, lr=0.1)
    torch.testing.assert_close(w["w"], torch.tensor([[[-0.1, 0.1, 0.0]]]), atol=1e-6, rtol=0)
    assert state.count.tolist() == [1]


def test_adam_is_torchs_adam():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    ours, theirs = {"w": start.clone()}, torch.nn.Parameter(start.clone())
    state, optimizer = init_adam(ours, torch.zeros(3, dtype=torch.int64)), torch.optim.Adam([theirs], lr=0.02)
    for _ in range(20):
        gradient = torch.randn(start.shape, generator=generator, dtype=torch.float64)
        adam(ours, {"w": gradient}, state, lr=0.02)
        theirs.grad = gradient
        optimizer.step()
    torch.testing.assert_close(ours["w"], theirs.data, rtol=1e-12, atol=1e-12)


def test_seeds_may_have_stepped_differently_often():
    both = {"w": torch.zeros(2, 1, 1)}
    state = init_adam(both, torch.tensor([0, 1]))
    state.count += torch.tensor([0, 1000])
    adam(both, {"w": torch.ones(2, 1, 1)}, state, lr=0.1)
    young, old = both["w"].flatten().tolist()
    assert abs(young + 0.1) < 1e-6  # corrected for its start from zero
    assert abs(old + 0.1 * 0.1 / (0.001 / (1 - 0.999**1001)) ** 0.5) < 1e-4
