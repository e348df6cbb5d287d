"""Learning itself, in seconds: tasks so small that the values are known, each failing for a reason of its own."""

import pytest
import torch
from scripted import ConstantReward, RewardFromAction, RewardFromBoth, RewardFromObservation, TwoSteps

from t3d.config import Config, resolve
from t3d.envs import env_factory
from t3d.run_state import RunSetup
from t3d.trainer import Trainer

CONFIG = Config(
    steps=1200, random_steps=300, hidden=(32, 32), batch_size=64, actor_lr=3e-3, critic_lr=3e-3, tau=0.05, gamma=0.9,
    device="cpu",
)  # fmt: skip


@pytest.fixture
def learned():
    """Trains on a probe and gives the agent."""
    trained = []

    def train(probe):
        config = resolve(CONFIG, "td3", probe.__name__, seeds=2)
        trainer = Trainer.in_memory(RunSetup(env_factory(probe), [0, 1], config))
        trained.append(trainer.state)
        while trainer.state.step < config.steps:
            trainer.step()
        return trainer.state.learner.agent

    yield train
    for state in trained:
        state.close()


def values(agent, obs, action=0.0):
    """Both critics of both seeds at one point: (2, 2)."""
    point = torch.full((2, 1, 1), float(obs)), torch.full((2, 1, 1), float(action))
    return agent.networks.critic(agent.critic, *point).detach().flatten(1)


def actions(agent, obs):
    """Of both seeds, in the environment's units."""
    return 2 * agent.networks.actor(agent.actor, torch.full((2, 1, 1), float(obs))).detach().flatten()


def near(tensor, value, within=0.1):
    return (tensor - value).abs().max() < within


def test_constant_reward(learned):
    assert near(values(learned(ConstantReward), 0), 1.0)


def test_reward_from_the_observation(learned):
    agent = learned(RewardFromObservation)
    assert near(values(agent, 1), 1.0) and near(values(agent, -1), -1.0)


def test_two_steps_are_discounted_once(learned):
    agent = learned(TwoSteps)
    assert near(values(agent, 1), 1.0) and near(values(agent, 0), 0.9)


def test_reward_from_the_action(learned):
    agent = learned(RewardFromAction)
    assert near(actions(agent, 0), 1.0, within=0.2)
    assert near(values(agent, 0, action=0.5), 0.0, within=0.15)


def test_reward_from_both(learned):
    agent = learned(RewardFromBoth)
    assert near(actions(agent, 1), 1.0, within=0.2) and near(actions(agent, -1), -1.0, within=0.2)
