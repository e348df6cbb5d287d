"""[steps 2 and 3] Actor and critics: exact numbers, shapes, starts."""

import torch
from torch import nn

from t3d.networks import MLP, Purpose, first, init_mlp, mlp

SEEDS = torch.tensor([0, 1, 2])


def test_a_network_by_hand():
    parameters = {
        "w1": torch.tensor([[[1.0, -1.0], [2.0, 0.0]]]),
        "b1": torch.tensor([[[0.5, 0.0]]]),
        "w2": torch.tensor([[[2.0], [10.0]]]),
        "b2": torch.tensor([[[-1.0]]]),
    }
    x = torch.tensor([[[1.0, 1.0]]])
    # hidden = relu([1 + 2 + 0.5, −1]) = [3.5, 0]; out = 7 − 1
    assert mlp(parameters, x).tolist() == [[[6.0]]]
    assert MLP.critic(parameters, x[..., :1], x[..., 1:]).tolist() == [[6.0]]
    torch.testing.assert_close(MLP.actor(parameters, x, limit=3.0), 3 * torch.tanh(torch.tensor([[[6.0]]])))


def test_shapes_and_starts():
    actor = MLP.init_actor(SEEDS, 4, 2, (16, 8), torch.float32)
    critic = MLP.init_critic(SEEDS, 4, 2, (16, 8), torch.float32)
    assert actor["w1"].shape == (3, 4, 16) and actor["b3"].shape == (3, 1, 2)
    assert critic["w1"].shape == (2, 3, 6, 16) and critic["b3"].shape == (2, 3, 1, 1)
    assert MLP.critic(critic, torch.zeros(3, 5, 4), torch.zeros(3, 5, 2)).shape == (2, 3, 5)
    for name, fan_in in (("w1", 6), ("b1", 6), ("w2", 16), ("w3", 8)):
        bound = fan_in**-0.5
        assert critic[name].abs().max() <= bound and critic[name].abs().max() > 0.5 * bound


def test_twins_start_apart_and_so_do_seeds():
    critic = MLP.init_critic(SEEDS, 4, 2, (16, 8), torch.float32)
    actor = MLP.init_actor(SEEDS, 4, 2, (16, 8), torch.float32)
    for name, tensor in critic.items():
        assert not torch.equal(tensor[0], tensor[1]), name
        assert not torch.equal(tensor[:, 0], tensor[:, 1]), name
        assert not torch.equal(actor[name][0], actor[name][1]), name


def test_first_is_the_first_critic():
    critic = MLP.init_critic(SEEDS, 4, 2, (16, 8), torch.float64)
    obs, action = torch.randn(3, 7, 4).double(), torch.randn(3, 7, 2).double()
    both = MLP.critic(critic, obs, action)
    torch.testing.assert_close(MLP.critic(first(critic), obs, action), both[0])
    assert not torch.allclose(both[0], both[1])


def test_it_is_the_network_that_torch_would_build():
    parameters = init_mlp(SEEDS[:1], Purpose.ACTOR_WEIGHTS, 1, (4, 16, 2), torch.float64)
    module = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).double()
    module[0].weight.data, module[0].bias.data = parameters["w1"][0, 0].T, parameters["b1"][0, 0, 0]
    module[2].weight.data, module[2].bias.data = parameters["w2"][0, 0].T, parameters["b2"][0, 0, 0]
    x = torch.randn(9, 4).double()
    torch.testing.assert_close(mlp(parameters, x)[0, 0], module(x).detach())
