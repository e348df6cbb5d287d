"""The loop: which transitions are stored, when updates run, what is recorded."""

import itertools
import json
import os

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from scripted import Scripted

import t3d
from t3d.agent import one_seed
from t3d.config import PRESETS, Config, resolve
from t3d.envs import env_factory
from t3d.run_state import RunSetup
from t3d.state_dict import tensors
from t3d.trainer import NEVER, Trainer

SMALL = {"hidden": (16, 16), "batch_size": 8, "eval_episodes": 2, "device": "cpu", "threads": 1, "progress": False}


def begin(seeds=(0,), preset="td3", **settings):
    config = Config(hidden=(16, 16), batch_size=8, device="cpu", threads=1, **{"steps": 200, **settings})
    config = resolve(config, preset, "Scripted", len(seeds))
    trainer = Trainer.in_memory(RunSetup(env_factory(Scripted), list(seeds), config))
    return trainer, trainer.state


def advance(trainer, steps):
    rows = []
    for _ in range(steps):
        rows += trainer.step()
        trainer.update_owed(NEVER)  # with overlap off, `step` has done them
    return rows


def test_true_last_observations_and_true_ends_are_stored():
    trainer, state = begin(random_steps=100)
    rows = advance(trainer, 60)
    stored = state.learner.memory.rows[0, :60]
    obs, next_obs = stored[:, :2], stored[:, 4:6]
    reward, terminated, span = stored[:, 6], stored[:, 7], stored[:, 8]
    # In order, each from where the last one ended, and never across two episodes.
    assert torch.equal(next_obs[:, 0], obs[:, 0]) and torch.equal(next_obs[:, 1], obs[:, 1] + 1)
    assert torch.equal(reward, 100 * obs[:, 0] + next_obs[:, 1]) and (span == 1).all()
    last = next_obs[:, 1] == 3 + obs[:, 0] % 4
    even = obs[:, 0] % 2 == 0
    assert last.sum() >= 10
    assert torch.equal(terminated, (last & even).float())  # a truncated episode is not a terminated one
    lengths = [row["length"] for row in rows]
    assert lengths[:5] == [3, 4, 5, 6, 3]
    assert [row["terminated"] for row in rows[:4]] == [True, False, True, False]
    assert rows[1]["return"] == sum(100 + time for time in (1, 2, 3, 4)) and rows[1]["step"] == 7


def test_actions_are_stored_within_one_and_played_within_the_bounds():
    trainer, state = begin(random_steps=50, exploration_noise=5.0)
    advance(trainer, 100)
    stored = state.learner.memory.rows[0, :100, 2:4].numpy()
    played = np.array(state.collector.envs._slots[0]._env.actions)
    assert np.abs(stored).max() == 1.0
    np.testing.assert_allclose(played, [-1, 0] + (stored + 1) / 2 * [4, 5], atol=1e-6)
    assert played.min(0).tolist() == [-1, 0] and played.max(0).tolist() == [3, 5]


def test_of_episodes_under_way_the_actions_are_kept_and_nothing_else():
    numbers = itertools.count()

    def uneven():
        env = Scripted()
        env.episode = next(numbers)  # the second copy is an episode ahead of the first
        return env

    config = Config(hidden=(16, 16), batch_size=8, device="cpu", threads=1, steps=200, num_envs=2)
    config = resolve(config, "td3", "Scripted", 1)
    trainer, uneven_lengths = Trainer.in_memory(RunSetup(env_factory(uneven), [0], config)), 0
    state = trainer.state
    for _ in range(60):
        advance(trainer, 1)
        lengths, kept = state.collector.episode_length[0], state.state_dict()["collector.actions.steps"][:, 0].numpy()
        uneven_lengths += lengths[0] != lengths[1]
        for i, length in enumerate(map(int, lengths)):
            before, own = np.split(kept[:, i], [len(kept) - length])
            actions = np.reshape(state.collector.envs._slots[i]._env.actions, (-1, 2))
            played = actions[len(actions) - length :]
            np.testing.assert_allclose(played, [-1, 0] + (own + 1) / 2 * [4, 5], atol=1e-6)
            assert not before.any()
    assert uneven_lengths > 20


def test_one_update_a_step_once_the_random_steps_are_over():
    trainer, state = begin(random_steps=20)
    advance(trainer, 20)
    assert state.learner.agent.updates.tolist() == [0]
    advance(trainer, 15)
    agent = state.learner.agent
    assert agent.updates.tolist() == [15] and agent.actor_adam.count.tolist() == [7]


@pytest.mark.parametrize(("rate", "updates"), [(0.3, 15), (2.0, 100)])
def test_updates_per_step_is_kept_exactly(rate, updates):
    trainer, state = begin(random_steps=10, updates_per_step=rate)
    advance(trainer, 60)
    assert state.learner.agent.updates.tolist() == [updates]


def test_whole_episodes_owe_as_many_updates_as_steps():
    trainer, state = begin(random_steps=10, train_freq="episode")
    advance(trainer, 6)  # an episode of 3 is over, the next one is not
    assert state.learner.agent.updates.tolist() == [3]
    advance(trainer, 1)
    assert state.learner.agent.updates.tolist() == [7]


def test_seeds_whose_episodes_differ_owe_and_learn_each_by_itself():
    alone, expected = begin(seeds=[1], random_steps=10, train_freq="episode")
    advance(alone, 30)
    trainer, state = begin(seeds=[0, 1], random_steps=10, train_freq="episode")
    state.collector.envs._slots[0]._env.episode = 1  # seed 0 is one episode ahead and ends at other times
    advance(trainer, 30)
    agent = state.learner.agent
    assert agent.updates.tolist() != [agent.updates[1]] * 2
    assert agent.updates[1] == expected.learner.agent.updates[0]
    second = tensors(one_seed(agent, 1))
    for name, tensor in tensors(expected.learner.agent).items():
        assert torch.equal(second[name], tensor), name


def test_a_seed_that_diverges_is_named():
    trainer, state = begin(seeds=[4, 7], random_steps=5)
    advance(trainer, 8)
    state.learner.agent.actor["w1"][1] = float("nan")
    with pytest.raises(t3d.T3DError, match="the networks of seed 7 have diverged"):
        trainer.step()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_steps_and_updates_count_in_all_environments(count):
    trainer, state = begin(steps=100, random_steps=11, num_envs=count, updates_per_step=0.5)
    while state.step < 100:
        advance(trainer, 1)
    memory = state.learner.memory
    assert state.step == 100 and memory.stored.tolist() == [100] and memory.length.tolist() == [100]
    assert state.learner.agent.updates.tolist() == [44]  # (100 − 11) / 2


def test_environments_of_a_seed_differ_in_seed_and_noise():
    config = resolve(Config(hidden=(8, 8), batch_size=8, device="cpu", steps=50, num_envs=3), "td3", "Pendulum-v1", 2)
    trainer = Trainer.in_memory(RunSetup(env_factory("Pendulum-v1"), [0, 1], config))
    action = trainer.act()()
    assert len(np.unique(trainer.state.collector.obs[..., 0])) == 6 and len(np.unique(action)) == 6


def test_n_step_rows_reach_the_memory():
    trainer, state = begin(steps=60, random_steps=5, n_step=3, gamma=0.5)
    advance(trainer, 60)
    stored = state.learner.memory.rows[0, : int(state.learner.memory.length)]
    span, terminated = stored[:, 8], stored[:, 7]
    assert set(span.tolist()) == {1, 2, 3} and torch.equal(stored[:, 5] - stored[:, 1], span)
    even = stored[:, 0] % 2 == 0
    assert torch.equal(terminated.bool(), even & (stored[:, 5] == 3 + stored[:, 0] % 4))


def test_nothing_is_sampled_from_an_empty_memory():
    trainer, state = begin(steps=60, random_steps=0, n_step=5)
    advance(trainer, 2)  # the first episode is not over, no row of five is full
    assert state.learner.memory.stored.tolist() == [0] and state.learner.agent.updates.tolist() == [0]
    advance(trainer, 1)
    assert state.learner.memory.stored.tolist() == [3] and state.learner.agent.updates.tolist() == [3]


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_vector_environment_can_be_trained_in(mode, tmp_path):
    vector = SyncVectorEnv([lambda: gymnasium.make("Pendulum-v1")] * 4, autoreset_mode=mode)
    run = t3d.train(vector, steps=900, random_steps=50, seeds=2, out=tmp_path / "run", eval_every=450, **SMALL)
    config = json.loads((run.path / "config.json").read_text())
    assert config["num_envs"] == 2 and config["callable"] is True
    assert [row["step"] for row in run.evaluations[::2]] == [0, 450, 900]
    ended = [row["length"] for row in run.metrics if row["kind"] == "episode"]
    assert ended and set(ended) == {200}


def test_a_vector_environment_made_by_its_id(tmp_path):
    vector = gymnasium.make_vec("Pendulum-v1", num_envs=2, vectorization_mode="sync")
    run = t3d.train(vector, steps=250, random_steps=50, out=tmp_path / "run", **SMALL)
    config = json.loads((run.path / "config.json").read_text())
    assert (config["env"], config["callable"], config["num_envs"]) == ("Pendulum-v1", False, 2)


def test_a_vector_environment_of_the_wrong_size(tmp_path):
    vector = SyncVectorEnv([lambda: gymnasium.make("Pendulum-v1")] * 3)
    with pytest.raises(t3d.T3DError, match="has 3 environments, but seeds times num_envs is 2"):
        t3d.train(vector, steps=90, seeds=2, out=tmp_path / "run", **SMALL)


def test_the_memory_is_no_larger_than_the_run():
    assert begin(steps=200)[1].learner.memory.capacity == 200
    assert begin(steps=200, buffer_size=50)[1].learner.memory.capacity == 50


def train_twice(tmp_path, env="Pendulum-v1", **more):
    settings = {
        **SMALL,
        "steps": 600,
        "random_steps": 200,
        "eval_every": 250,
        "log_every": 200,
        "seeds": [2, 5],
        **more,
    }
    return [t3d.train(env, out=tmp_path / name, **settings) for name in ("a", "b")]


def test_the_same_command_gives_the_same_files(tmp_path):
    a, b = train_twice(tmp_path)

    def timeless(run):
        return [{k: v for k, v in row.items() if k != "steps_per_second"} for row in run.metrics]

    assert timeless(a) == timeless(b)
    for name in ("config.json", "policies/best-seed-2.safetensors", "policies/last-seed-5.json"):
        assert (a.path / name).read_bytes() == (b.path / name).read_bytes()


def test_what_a_run_records(tmp_path):
    run, _ = train_twice(tmp_path, env=Scripted)
    config = json.loads((run.path / "config.json").read_text())
    assert config["seeds"] == [2, 5] and config["random_steps"] == 200 and config["device"] == "cpu"
    assert config["threads"] == 1 and config["env"] == "Scripted"
    evaluations = run.evaluations
    assert [(row["step"], row["seed"]) for row in evaluations] == [(s, k) for s in (0, 250, 500, 600) for k in (2, 5)]
    assert evaluations[0]["lengths"] == [3, 3] and evaluations[0]["returns"] == [6.0, 6.0]
    assert evaluations[0]["mean"] == 6.0
    training_rows = [row for row in run.metrics if row["kind"] == "training"]
    assert [row["step"] for row in training_rows[::2]] == [200, 400, 600]
    assert training_rows[0]["critic_loss"] is None and training_rows[-1]["q_mean"] is not None
    assert training_rows[0].keys() == {
        "kind", "step", "seed", "critic_loss", "actor_loss", "q_mean", "steps_per_second",
    }  # fmt: skip
    assert (run.path / "report" / "learning-curve.png").read_bytes().startswith(b"\x89PNG")
    for which in ("best", "last"):
        for seed in (2, 5):
            card = json.loads((run.path / "policies" / f"{which}-seed-{seed}.json").read_text())
            assert card["seed"] == seed
            row = next(r for r in evaluations if r["seed"] == seed and r["step"] == card["step"])
            assert row["returns"] == card["returns"]
    assert run.policy(2, "last").card.step == 600


def test_presets_are_what_they_say():
    td3, paper, documents = (PRESETS[name] for name in ("td3", "paper", "documents"))
    assert (td3.hidden, td3.actor_lr, td3.batch_size, td3.train_freq) == ((256, 256), 3e-4, 256, "step")
    for old in (paper, documents):
        assert (old.hidden, old.critic_lr, old.batch_size, old.train_freq) == ((400, 300), 1e-3, 100, "episode")
    for preset in (td3, paper, documents):
        assert (preset.gamma, preset.tau, preset.policy_delay, preset.exploration_noise) == (0.99, 0.005, 2, 0.1)
        assert (preset.target_noise, preset.target_noise_clip, preset.buffer_size) == (0.2, 0.5, 1_000_000)


@pytest.mark.parametrize(
    ("preset", "env", "steps", "expected"),
    [
        ("td3", "HalfCheetah-v5", 1_000_000, 25_000),
        ("td3", "HalfCheetah-v5", 60_000, 6_000),
        ("td3", "Pendulum-v1", 10_000, 1_000),
        ("td3", "Reacher-v5", 1_000_000, 1_000),
        ("td3", "InvertedDoublePendulum-v5", 1_000_000, 1_000),
        ("paper", "Ant-v5", 1_000_000, 10_000),
        ("paper", "Hopper-v5", 1_000_000, 1_000),
        ("documents", "Hopper-v5", 500_000, 10_000),
        ("documents", "Pendulum-v1", 12_000, 1_200),
    ],
)
def test_random_steps_by_task(preset, env, steps, expected):
    config = resolve(Config(steps=steps), preset, env, 1)
    assert config.random_steps == expected
    assert resolve(Config(steps=steps, random_steps=77), preset, env, 1).random_steps == 77


def test_threads_are_a_fixed_rule():
    small, large = Config(hidden=(16,), batch_size=16), Config()
    assert resolve(small, "td3", "Pendulum-v1", 1).threads == 1
    assert resolve(large, "td3", "Pendulum-v1", 1).threads == min(len(os.sched_getaffinity(0)), 8)
    assert resolve(Config(threads=3), "td3", "Pendulum-v1", 1).threads == 3


@pytest.mark.parametrize("overlap, order", [("off", "act step store update"), ("on", "act update step store")])
def test_with_overlap_updates_are_asked_for_before_the_environments_move(overlap, order):
    trainer, state = begin(random_steps=5, overlap=overlap)
    advance(trainer, 8)
    learner, envs, done = trainer.learner, state.collector.envs, []

    def noted(name, function):
        return lambda *arguments: (done.append(name), function(*arguments))[1]

    for name in ("act", "store", "update"):
        setattr(learner, name, noted(name, getattr(learner, name)))
    envs.step = noted("step", envs.step)
    trainer.step()
    if overlap == "on":
        done.clear()  # nothing was owed yet
        trainer.step()
    assert " ".join(done) == order


def test_what_is_worth_compiling_goes_by_the_updates_of_all_seeds():
    def mode(steps, seeds):
        return resolve(Config(steps=steps, device="cpu"), "td3", "Pendulum-v1", seeds).accelerate

    assert mode(10_000, 1) == "eager" and mode(10_000, 2) == mode(14_000, 1) == "compile"
