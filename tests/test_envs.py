"""The environment contract and the action border."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from scripted import Probe, Scripted

from t3d import T3DError
from t3d.envs import ActionRange, env_factory


def batch(make, count=1, episode_seed=lambda env, episode: 10 * env + episode):
    return env_factory(make).batch(count, episode_seed)


def test_the_exact_bounds_are_reachable_and_never_passed():
    low = np.array([-1e-3, -7.1, 0.1, 3.3], np.float32)
    high = np.array([0.7, -0.3, 1e6, 3.4], np.float32)
    actions = ActionRange.of(spaces.Box(low, high), "test")
    assert (actions.to_env(np.full((1, 4), -1.0)) == low).all() and (actions.to_env(np.ones((1, 4))) == high).all()
    many = actions.to_env(np.random.default_rng(0).uniform(-1, 1, (10_000, 4)).astype(np.float32))
    assert many.dtype == np.float32 and (many >= low).all() and (many <= high).all()
    middle = actions.to_env(np.zeros((1, 4)))[0]
    np.testing.assert_allclose(middle, (low.astype(float) + high) / 2, rtol=1e-6)


def test_a_range_of_one_is_played_to_the_last_bit():
    unit = ActionRange.of(spaces.Box(-1.0, 1.0, (2,), np.float32), "test")
    a = np.random.default_rng(0).uniform(-1, 1, (10_000, 2)).astype(np.float32)
    played = unit.to_env(a)
    assert (played == a).all()
    played[:] = 0  # an environment may write into what it is given
    assert a.any()


def test_actions_of_any_shape():
    actions = ActionRange.of(spaces.Box(-2.0, 4.0, (2, 3), np.float64), "test")
    assert actions.dim == 6
    assert actions.to_env(np.zeros((5, 6), np.float32)).shape == (5, 2, 3)


@pytest.mark.parametrize(
    ("space", "sentence"),
    [
        (spaces.Discrete(3), "TD3 needs continuous"),
        (spaces.MultiDiscrete([2, 2]), "TD3 needs continuous"),
        (spaces.Box(-np.inf, np.inf, (2,)), "unbounded"),
        (spaces.Box(0, 5, (2,), np.int64), "whole numbers"),
        (spaces.Box(np.zeros(2, np.float32), np.array([1, 0], np.float32)), "not below its high"),
        (spaces.Dict({"a": spaces.Box(-1, 1)}), "only a Box"),
    ],
)
def test_other_actions_are_refused_with_the_reason(space, sentence):
    with pytest.raises(T3DError, match=sentence):
        ActionRange.of(space, "test")


def test_what_a_step_gives():
    envs = batch(Scripted, count=2)
    envs._slots[1]._env.episode = 0  # the second starts with episode 1, which is longer
    obs = envs.reset()
    assert obs.dtype == np.float32 and obs.tolist() == [[0, 0], [1, 0]]
    for _ in range(2):
        moved = envs.step(np.zeros((2, 2)))
        assert moved.valid.all() and not (moved.terminated | moved.truncated).any()
        assert (moved.obs == moved.final_obs).all()
    moved = envs.step(np.zeros((2, 2)))
    assert moved.terminated.tolist() == [True, False] and moved.reward.tolist() == [3.0, 103.0]
    assert moved.final_obs.tolist() == [[0, 3], [1, 3]] and moved.obs.tolist() == [[1, 0], [1, 3]]
    moved = envs.step(np.zeros((2, 2)))
    assert moved.truncated.tolist() == [False, True] and not moved.terminated.any()
    assert moved.final_obs.tolist() == [[1, 1], [1, 4]] and moved.obs.tolist() == [[1, 1], [2, 0]]


def test_rows_that_are_not_active_stand_still():
    envs = batch(Scripted, count=2)
    envs.reset()
    moved = envs.step(np.zeros((2, 2)), active=np.array([False, True]))
    assert moved.valid.tolist() == [False, True] and moved.reward.tolist() == [0, 1]
    assert moved.obs.tolist() == [[0, 0], [0, 1]]


def test_episodes_start_from_the_seeds_they_are_given():
    seeds = []

    def episode_seed(env, episode):
        seeds.append((env, episode))
        return 5

    envs = batch("Pendulum-v1", 2, episode_seed)
    first = envs.reset()
    assert seeds == [(0, 0), (1, 0)] and (first[0] == first[1]).all()
    for _ in range(200):
        moved = envs.step(np.zeros((2, 1)))
    assert moved.truncated.all() and seeds[2:] == [(0, 1), (1, 1)] and (moved.obs == first).all()


def test_observations_of_other_kinds_are_flattened():
    class Mixed(Probe):
        observation_space = spaces.Dict({"a": spaces.Box(-1, 1, (2, 2)), "b": spaces.Discrete(3)})

        def first(self):
            return {"a": np.ones((2, 2), np.float32), "b": 2}

    assert batch(Mixed).reset().tolist() == [[1, 1, 1, 1, 0, 0, 1]]


def bad(**returned):
    class Bad(Probe):
        def step(self, action):
            if "error" in returned:
                raise returned["error"]
            return returned.get("obs", self.obs), returned.get("reward", 0.0), False, False, {}

    return Bad


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        (bad(obs=np.array([np.nan], np.float32)), r"Bad, copy 0, episode 0, step 1: observation\[0\] is nan"),
        (bad(obs=np.array([np.inf])), r"observation\[0\] is inf"),
        (bad(obs=np.array([1e300])), r"observation\[0\] is inf"),
        (bad(reward=float("nan")), "the reward is nan"),
        (bad(reward=1e31), "the reward is 1e"),
        (bad(reward="high"), "the reward is 'high', not a number"),
        (bad(reward=np.zeros(2)), "not a number"),
        (bad(reward=None), "the reward is None, not a number"),
        (bad(obs=["a"]), "the observation is not in Box"),
        (bad(obs=[[1], [2, 3]]), "the observation is not in Box"),
        (bad(obs=np.array([1j])), "the observation is not in Box"),
        (bad(obs=np.zeros(2, np.float32)), r"shape \(2,\), not \(1,\)"),
        (bad(error=RuntimeError("the motor is off")), "RuntimeError: the motor is off"),
    ],
)
def test_what_cannot_be_learned_from_is_named(env, sentence):
    envs = batch(env)
    envs.reset()
    with pytest.raises(T3DError, match=sentence):
        envs.step(np.zeros((1, 1)))


def test_an_episode_without_a_limit_is_cut(monkeypatch):
    class Endless(Probe):
        def step(self, action):
            return self.obs, 1.0, False, False, {}

    monkeypatch.setattr("t3d.envs.gym.LONGEST_EPISODE", 5)
    envs = batch(Endless)
    envs.reset()
    ends = [envs.step(np.zeros((1, 1))) for _ in range(10)]
    assert [bool(moved.truncated[0]) for moved in ends] == [False] * 4 + [True] + [False] * 4 + [True]
    assert not any(moved.terminated[0] for moved in ends)


@pytest.mark.parametrize("reward", [1, True, np.float32(1), np.array([1.0]), np.array(1.0, np.float32)])
def test_any_kind_of_number_is_a_reward(reward):
    envs = batch(bad(reward=reward))
    envs.reset()
    assert envs.step(np.zeros((1, 1))).reward.tolist() == [1.0]


def test_stacks_of_pictures_and_strange_makers_are_refused():
    class Image(Probe):
        observation_space = spaces.Box(0, 255, (4, 8, 8, 3), np.uint8)

    with pytest.raises(T3DError, match="one at a time"):
        batch(Image)
    with pytest.raises(T3DError, match=r"not a gymnasium\.Env"):
        batch(lambda: 3)
    with pytest.raises(T3DError, match="has no observation_space"):
        batch(type("Bare", (gymnasium.Env,), {}))
    one = gymnasium.make("Pendulum-v1")
    with pytest.raises(T3DError, match="returned the same environment twice"):
        batch(lambda: one, count=2)
    with pytest.raises(T3DError, match="returned the same environment twice"):
        batch(one, count=2)
    with pytest.raises(T3DError, match=r"cannot be made: ZeroDivisionError: .*test_envs\.py"):
        batch(lambda: 1 / 0)


def test_an_id_without_its_version_is_the_newest():
    assert env_factory("Pendulum").name == "Pendulum-v1"
    with pytest.raises(T3DError, match="Did you mean Pendulum-v1"):
        env_factory("Pendulun").one()


def test_a_module_that_only_a_file_names_is_not_imported():
    with pytest.raises(T3DError, match="--allow-module antigravity"):
        env_factory("antigravity:Env-v0", allowed_modules=())
    assert env_factory("scripted:Env-v0", allowed_modules=("scripted",)).name == "scripted:Env-v0"


def test_mujoco_is_made_quietly(tmp_path, monkeypatch, capfd):
    pytest.importorskip("mujoco")
    monkeypatch.chdir(tmp_path)
    envs = batch("HalfCheetah-v5")
    envs.reset()
    envs.step(np.zeros((1, 6)))
    envs.close()
    assert list(tmp_path.iterdir()) == [] and capfd.readouterr() == ("", "")


def test_it_is_what_gymnasium_does():
    envs, theirs = batch("Pendulum-v1"), gymnasium.make("Pendulum-v1")
    obs, _ = theirs.reset(seed=0)
    assert (envs.reset()[0] == obs.astype(np.float32)).all()
    for action in np.linspace(-1, 1, 50, dtype=np.float32):
        obs, reward, *_ = theirs.step(np.array([2 * action], np.float32))
        moved = envs.step(np.array([[action]]))
        np.testing.assert_allclose(moved.obs[0], obs, atol=1e-6)
        np.testing.assert_allclose(moved.reward[0], reward, atol=1e-6)
