"""Steps 5 to 15, one by one, with exact numbers; and that seeds learn as if each were alone."""

import dataclasses

import numpy as np
import pytest
import torch

from t3d import agent as agents
from t3d import rng, steps
from t3d.networks import Networks
from t3d.replay import Replay, Transitions
from t3d.rng import Purpose
from t3d.state_dict import tensors

OBS, ACTION, BATCH = 4, 2, 16
KNOBS = steps.Hyperparameters(actor_lr=1e-3, critic_lr=1e-3)


def new_agent(seeds=(0,), dtype=torch.float64):
    return steps.init_agent(torch.tensor(seeds), OBS, ACTION, (24, 16), dtype)


def filled_memory(seeds=(0,), rows=200, dtype=torch.float64):
    """Random transitions, each seed's drawn from its own number."""
    memory = Replay(len(seeds), 500, OBS, ACTION, dtype=dtype)
    for k, seed in enumerate(seeds):
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape, draw=draw):
            return torch.randn(1, rows, *shape, generator=draw, dtype=dtype)

        done = (torch.rand(1, rows, generator=draw) < 0.2).to(dtype)
        yes = np.ones((1, rows), bool)
        new = Transitions(normal(OBS), normal(ACTION).clamp(-1, 1), normal(), normal(OBS), done, 1, yes)
        memory.seed(k).add(new)
    return memory


def train(agent, memory, updates, hp=KNOBS):
    done = int(agent.updates[0])
    for update in range(done + 1, done + updates + 1):
        last = steps.update(memory, agent, hp, BATCH, steps.is_policy_step(update, hp.policy_delay))
    return last


def snapshot(agent):
    return {name: tensor.clone() for name, tensor in tensors(agent).items()}


def changed(before, agent):
    """The fields that differ from a snapshot."""
    return {name.split(".")[0] for name, tensor in tensors(agent).items() if not torch.equal(tensor, before[name])}


# ------------------------------------------------------------------------------------- the steps by hand


def test_step_5_the_target_actor_plays():
    agent = new_agent()
    next_obs = torch.randn(1, 6, OBS, dtype=torch.float64)
    torch.testing.assert_close(
        steps.act_target(agent, next_obs, 2.0), 2 * agent.networks.actor(agent.target_actor, next_obs)
    )


def test_step_6_noise_is_clipped_then_the_action():
    action = torch.tensor([0.0, 0.0, 0.0, 0.9, -0.9])
    noise = torch.tensor([1.0, 10.0, -10.0, 10.0, -2.0])
    smoothed = steps.smooth(action, noise, scale=0.2, clip=0.5, limit=1.0)
    torch.testing.assert_close(smoothed, torch.tensor([0.2, 0.5, -0.5, 1.0, -1.0]))
    wide = steps.smooth(2 * action, noise, scale=0.2, clip=0.5, limit=2.0)
    torch.testing.assert_close(wide, torch.tensor([0.2, 0.5, -0.5, 2.0, -2.0]))


def test_step_8_keeps_the_smaller_of_each_pair():
    q = torch.tensor([[[1.0, 5.0, -3.0]], [[2.0, 4.0, -4.0]]])
    assert steps.min_q(q).tolist() == [[1.0, 4.0, -4.0]]


def test_step_9_nothing_follows_termination():
    y = steps.bellman(
        reward=torch.tensor([1.0, 1.0]),
        discount=torch.tensor([0.5, 0.5]),
        terminated=torch.tensor([0.0, 1.0]),
        target_q=torch.tensor([10.0, 10.0]),
    )
    assert y.tolist() == [6.0, 1.0]


def test_step_9_is_a_constant():
    q = torch.tensor([10.0], requires_grad=True)
    one = torch.ones(1)
    assert not steps.bellman(one, one, 0 * one, q).requires_grad


def test_step_11_sums_the_twins_and_averages_the_batch():
    q = torch.tensor([[[1.0, 3.0]], [[0.0, 2.0]]])
    y = torch.tensor([[0.0, 1.0]])
    # (1 + 4) / 2 for the first critic, (0 + 1) / 2 for the second
    assert steps.squared_errors(q, y).tolist() == [3.0]


def test_step_12_moves_both_critics_and_nothing_else():
    agent, memory = new_agent(), filled_memory()
    before = snapshot(agent)
    train(agent, memory, 1)
    assert changed(before, agent) == {"critic", "critic_adam"}
    for name, tensor in agent.critic.items():
        for twin in (0, 1):
            assert not torch.equal(tensor[twin], before[f"critic.{name}"][twin]), (name, twin)


def test_step_13_goes_up_the_first_critic():
    agent, obs = new_agent(), torch.randn(1, 64, OBS, dtype=torch.float64)

    def value():
        return agent.networks.critic(agent.critic, obs, agent.networks.actor(agent.actor, obs))[0].mean()

    before, critic = value(), {name: tensor.clone() for name, tensor in agent.critic.items()}
    update = steps.update_actor(agent, obs, lr=1e-3, limit=1.0)
    torch.testing.assert_close(-update.loss[0], before)
    assert value() > before
    assert all(torch.equal(agent.critic[name], tensor) for name, tensor in critic.items())


def test_steps_13_to_15_wait_for_every_second_update():
    agent, memory = new_agent(), filled_memory()
    before = snapshot(agent)
    policy_step = {"actor", "actor_adam", "target_actor", "target_critic"}
    for update in range(1, 7):
        train(agent, memory, 1)
        moved = changed(before, agent)
        assert moved & policy_step == (policy_step if update % 2 == 0 else set()), update
        before = snapshot(agent)
    assert agent.updates.tolist() == [6] and agent.actor_adam.count.tolist() == [3]


def test_steps_14_and_15_follow_what_step_13_left():
    agent, memory = new_agent(), filled_memory()
    old = snapshot(agent)
    train(agent, memory, 2, dataclasses.replace(KNOBS, tau=0.25))
    for target, online in (("target_actor", "actor"), ("target_critic", "critic")):
        for name, tensor in getattr(agent, target).items():
            expected = 0.75 * old[f"{target}.{name}"] + 0.25 * getattr(agent, online)[name]
            torch.testing.assert_close(tensor, expected)


def test_targets_start_as_copies_of_their_own():
    agent = new_agent()
    for name in agent.actor:
        assert torch.equal(agent.actor[name], agent.target_actor[name])
        assert torch.equal(agent.critic[name], agent.target_critic[name])
        assert agent.critic[name].data_ptr() != agent.target_critic[name].data_ptr()


def test_metrics_are_those_of_the_update():
    agent, memory = new_agent((0, 1)), filled_memory((0, 1))
    bits = rng.bits32(agent.seeds, Purpose.SAMPLING, agent.updates, (BATCH,))
    batch = memory.sample(bits, KNOBS.gamma)
    q = steps.q_values(agent, agent.critic, batch.obs, batch.action)
    metrics = train(agent, memory, 1).metrics()
    assert metrics.keys() == {"critic_loss", "q_mean"} and metrics["critic_loss"].shape == (2,)
    torch.testing.assert_close(metrics["q_mean"], q.mean((0, 2)))
    assert train(agent, memory, 1).metrics().keys() == {*steps.METRICS, *steps.POLICY_METRICS}


def test_an_update_returns_every_value_that_it_computed():
    agent, memory = new_agent((0, 1)), filled_memory((0, 1))
    train(agent, memory, 1)
    before = snapshot(agent)
    critic, target = ({n: before[f"{part}.{n}"] for n in agent.critic} for part in ("critic", "target_critic"))
    target_actor = {name: before[f"target_actor.{name}"] for name in agent.actor}
    noise = steps.draw(agent, BATCH, ACTION)[1]
    update = train(agent, memory, 1)
    batch = update.batch
    expected = agent.networks.actor(target_actor, batch.next_obs)
    torch.testing.assert_close(update.target_action, expected)
    torch.testing.assert_close(update.next_action, steps.smooth(expected, noise, 0.2, 0.5, 1.0))
    torch.testing.assert_close(update.target_q, agent.networks.critic(target, batch.next_obs, update.next_action))
    torch.testing.assert_close(update.min_q, update.target_q.min(0).values)
    torch.testing.assert_close(update.y, batch.reward + 0.99 * (1 - batch.terminated) * update.min_q)
    torch.testing.assert_close(update.critic.q, agent.networks.critic(critic, batch.obs, batch.action))
    torch.testing.assert_close(update.critic.loss, ((update.critic.q - update.y) ** 2).mean(-1).sum(0))
    for gradients, adam, part in (
        (update.critic.gradients, agent.critic_adam, "critic_adam"),
        (update.actor.gradients, agent.actor_adam, "actor_adam"),
    ):
        for name, gradient in gradients.items():
            torch.testing.assert_close(adam.m[name], 0.9 * before[f"{part}.m.{name}"] + 0.1 * gradient)
    assert update.actor.loss.shape == (2,)


# --------------------------------------------------------------------------------------------- acting


def test_exploration_is_the_actor_plus_its_own_noise():
    agent = new_agent((3, 4), torch.float32)
    obs = torch.randn(2, 5, OBS)
    quiet = agents.explore(agent, obs, step=11, noise=0.0)
    torch.testing.assert_close(quiet, agent.networks.actor(agent.actor, obs))
    epsilon = rng.normal(agent.seeds, Purpose.EXPLORATION, 11, (5, ACTION), torch.float32)
    torch.testing.assert_close(agents.explore(agent, obs, 11, 0.1), (quiet + 0.1 * epsilon).clamp(-1, 1))
    loud = agents.explore(agent, obs, 11, 50.0)
    assert loud.abs().max() == 1 and epsilon.unique().numel() == epsilon.numel()


def test_random_actions_fill_the_range():
    actions = torch.stack([agents.random_action(torch.tensor([0, 1]), step, 3, ACTION) for step in range(200)])
    assert actions.shape == (200, 2, 3, ACTION)
    assert actions.min() < -0.98 and actions.max() > 0.98 and actions.unique().numel() > 2300


# ---------------------------------------------------------------------------------------------- seeds


@pytest.mark.parametrize("k", [0, 1, 2])
def test_a_seed_among_others_learns_as_if_alone(k):
    seeds = (4, 9, 2)
    together, memory = new_agent(seeds), filled_memory(seeds)
    alone, memory_alone = new_agent(seeds[k : k + 1]), filled_memory(seeds[k : k + 1])
    train(together, memory, 50)
    train(alone, memory_alone, 50)
    others = tensors(agents.one_seed(together, k))
    for name, tensor in tensors(alone).items():
        torch.testing.assert_close(others[name], tensor, rtol=1e-9, atol=1e-9, msg=name)


def test_disturbing_a_seed_changes_no_bit_of_another():
    seeds = (4, 9, 2)
    calm, disturbed = new_agent(seeds, torch.float32), new_agent(seeds, torch.float32)
    memory, other = filled_memory(seeds, dtype=torch.float32), filled_memory(seeds, dtype=torch.float32)
    disturbed.actor["w2"][1] += 1.0
    other.rows[1] *= -3.0
    train(calm, memory, 50)
    train(disturbed, other, 50)
    for k in (0, 2):
        theirs = tensors(agents.one_seed(disturbed, k))
        for name, tensor in tensors(agents.one_seed(calm, k)).items():
            assert torch.equal(tensor, theirs[name]), (k, name)
    assert not torch.equal(calm.actor["w1"][1], disturbed.actor["w1"][1])


def test_one_seed_of_many_can_be_updated_by_itself():
    seeds = (4, 9)
    whole, memory = new_agent(seeds), filled_memory(seeds)
    before = snapshot(agents.one_seed(whole, 0))
    train(agents.one_seed(whole, 1), memory.seed(1), 4)
    assert whole.updates.tolist() == [0, 4]
    assert changed(before, agents.one_seed(whole, 0)) == set()
    assert torch.equal(whole.critic_adam.count, torch.tensor([0, 4]))


def test_one_critic_is_twins_that_are_equal():
    one = steps.init_agent(torch.tensor([5]), OBS, ACTION, (24, 16), torch.float64, Networks(critics=1))
    two = new_agent((5,))
    for weights in (two.critic, two.target_critic):
        for tensor in weights.values():
            tensor[1] = tensor[0]  # the smaller of two that are equal is the one
    memory = filled_memory((5,))
    train(one, memory, 20)
    train(two, memory, 20)
    for name, tensor in tensors(one).items():
        other = tensors(two)[name]
        torch.testing.assert_close(tensor, other[:1] if tensor.dim() == 4 else other, msg=name)
