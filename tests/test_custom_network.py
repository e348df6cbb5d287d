"""Networks of one's own: a pair of functions or an nn.Module, trained, saved, loaded and resumed."""

import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import t3d
from t3d import steps
from t3d.custom_network import from_module
from t3d.networks import MLP
from t3d.replay import Replay, Transitions
from t3d.rng import Purpose
from t3d.state_dict import tensors
from t3d.steps import Hyperparameters, init_agent

KNOBS = {"hidden": (16, 8), "batch_size": 16, "eval_episodes": 2, "eval_every": 150, "device": "cpu", "progress": False}


def init(sizes, generator):
    """The package's own network, written for one."""
    made = {}
    for layer, (fan_in, out) in enumerate(pairwise(sizes), start=1):
        made[f"weight{layer}"] = torch.randn(fan_in, out, generator=generator) / fan_in**0.5
        made[f"bias{layer}"] = torch.randn(out, generator=generator) / 10
    return made


def apply(parameters, x):
    for layer in (1, 2):
        x = torch.relu(x @ parameters[f"weight{layer}"] + parameters[f"bias{layer}"])
    return x @ parameters["weight3"] + parameters["bias3"]


class Module(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, outputs))

    def forward(self, x):
        return self.layers(x)


def test_it_learns_exactly_what_the_packages_network_does():
    """The same weights in both: after updates of actor and critics they are still the same."""
    seeds = torch.tensor([3, 8])
    own = init_agent(seeds, 4, 2, (16, 8), torch.float64, t3d.Network(init, apply).networks())
    plain = init_agent(seeds, 4, 2, (16, 8), torch.float64)
    for name in ("actor", "target_actor", "critic", "target_critic"):
        for key, tensor in getattr(plain, name).items():
            theirs = getattr(own, name)[{"w": "weight", "b": "bias"}[key[0]] + key[1]]
            tensor.copy_(theirs.reshape(tensor.shape))
    memory = Replay(2, 100, 4, 2, dtype=torch.float64)
    source = np.random.default_rng(0)
    shape = (2, 60)
    obs, next_obs = source.normal(size=(2, *shape, 4))
    action, reward = source.uniform(-1, 1, (*shape, 2)), source.normal(size=shape)
    memory.add(Transitions(obs, action, reward, next_obs, np.zeros(shape), np.ones(shape), np.ones(shape, bool)))
    for update in range(1, 7):
        for agent in (own, plain):
            steps.update(memory, agent, Hyperparameters(), 16, update % 2 == 0)
    for name in ("actor", "target_actor", "critic", "target_critic"):
        for key, tensor in getattr(plain, name).items():
            theirs = getattr(own, name)[{"w": "weight", "b": "bias"}[key[0]] + key[1]]
            torch.testing.assert_close(theirs.reshape(tensor.shape), tensor, rtol=1e-9, atol=1e-12)


def test_every_seed_and_twin_has_its_own_weights_and_the_same_ones_again():
    first, again = (
        from_module(Module).init(torch.tensor([3, 8]), Purpose.CRITIC_WEIGHTS, 2, (4, 16, 8, 1), torch.float32)
        for _ in range(2)
    )
    weights = first["layers.0.weight"]
    assert weights.shape == (2, 2, 1, 48) and len({tuple(w.tolist()) for w in weights.reshape(4, 48)}) == 4
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    alone = from_module(Module).init(torch.tensor([8]), Purpose.CRITIC_WEIGHTS, 2, (4, 16, 8, 1), torch.float32)
    assert torch.equal(alone["layers.0.weight"][:, 0], weights[:, 1])


@pytest.mark.parametrize("network", [t3d.Network(init, apply), Module], ids=["functions", "module"])
def test_it_is_trained_saved_loaded_and_resumed(network, tmp_path):
    run = t3d.train("Pendulum-v1", 300, 2, tmp_path / "run", network=network, **KNOBS)
    assert run.config["network"] in ("init", "Module")
    policy = t3d.load(run, 1, "last", network)
    assert policy([1.0, 0, 0]).shape == (1,) and policy(np.zeros((5, 3))).shape == (5, 1)
    with pytest.raises(t3d.T3DError, match=r"with a network of your own \(.*\), which no file can bring back"):
        t3d.load(run, 1)
    with pytest.raises(t3d.T3DError, match="give network="):
        t3d.resume(run, 400, progress=False)
    longer = t3d.train("Pendulum-v1", 450, 2, tmp_path / "longer", network=network, random_steps=30, **KNOBS)
    t3d.resume(run, 450, network=network, progress=False)
    rows = [[row["returns"] for row in r.evaluations if row["step"] in (150, 300, 450)] for r in (run, longer)]
    assert rows[0] == rows[1]


def test_agents_with_different_networks_learn_side_by_side():
    """In turns and in threads as alone: each agent carries its own networks."""
    kinds = {"MLP": MLP, "functions": t3d.Network(init, apply).networks(), "module": from_module(Module).networks()}
    memory, source = Replay(2, 60, 4, 2), np.random.default_rng(0)
    obs, next_obs = source.normal(size=(2, 2, 60, 4))
    action, reward = source.uniform(-1, 1, (2, 60, 2)), source.normal(size=(2, 60))
    ones = np.ones((2, 60), bool)
    memory.add(Transitions(obs, action, reward, next_obs, ~ones, ones, ones))

    def agents():
        return {name: init_agent(torch.tensor([3, 8]), 4, 2, (16, 8), networks=kind) for name, kind in kinds.items()}

    def learn(agent, updates):
        for update in updates:
            steps.update(memory, agent, Hyperparameters(), 16, update % 2 == 0)

    alone, in_turns, in_threads = agents(), agents(), agents()
    for agent in alone.values():
        learn(agent, range(1, 9))
    for update in range(1, 9):
        for agent in in_turns.values():
            learn(agent, [update])
    threads = [threading.Thread(target=learn, args=(agent, range(1, 9))) for agent in in_threads.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, agent in alone.items():
        assert agent.networks is kinds[name] and agent.updates.tolist() == [8, 8]
        for other in (in_turns[name], in_threads[name]):
            assert all(torch.equal(tensor, tensors(other)[key]) for key, tensor in tensors(agent).items())


def test_one_network_serves_several_sizes():
    networks = t3d.Network(init, apply).networks()
    for hidden in ((16, 8), (8, 16)):
        agent = init_agent(torch.tensor([1]), 3, 2, hidden, networks=networks)
        assert networks.actor(agent.actor, torch.zeros(1, 5, 3)).shape == (1, 5, 2)


def test_what_is_no_network_is_said(tmp_path):
    def train(network):
        t3d.train("Pendulum-v1", 300, out=tmp_path / "run", network=network, **KNOBS)

    with pytest.raises(t3d.T3DError, match=r"or something that makes an nn.Module, not 5"):
        train(5)
    with pytest.raises(t3d.T3DError, match="init must give a dictionary of tensors; it gave list"):
        train(t3d.Network(lambda sizes, generator: [1], apply))
    with pytest.raises(t3d.T3DError, match=r"apply must give \(batch, 1\); for a batch of 3 it gave \(3, 8\)"):
        train(t3d.Network(init, lambda parameters, x: x @ parameters["weight1"] @ parameters["weight2"]))
    with pytest.raises(t3d.T3DError, match="has buffers, as BatchNorm does"):
        train(lambda inputs, outputs: nn.Sequential(nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs)))
    with pytest.raises(t3d.T3DError, match="critic-norm is for the networks of the package"):
        t3d.train("Pendulum-v1", 300, out=tmp_path / "run", network=Module, critic_norm="layer", **KNOBS)
    with pytest.raises(t3d.T3DError, match="this is one module, and many are needed"):
        train(nn.Linear(3, 1))
    with pytest.raises(t3d.T3DError, match="cannot be made from the numbers of inputs and outputs"):
        train(lambda: Module(3, 1))
    with pytest.raises(t3d.T3DError, match="apply does not work for many seeds at once"):
        train(t3d.Network(init, lambda parameters, x: apply(parameters, nn.functional.dropout(x))))
    with pytest.raises(t3d.T3DError, match="would round the values of a network of your own"):
        t3d.train("Pendulum-v1", 300, out=tmp_path / "run", network=Module, precision="bf16", **KNOBS)
    assert not (tmp_path / "run").exists()
