"""Observations of several parts as one row: as Gymnasium lays them out, and without it."""

import json

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from scripted import Reach

import t3d
from t3d.envs import env_factory
from t3d.envs.exact import first_difference
from t3d.layout import check, describe, flatten, size

BOX = spaces.Box(-1, 1, (2, 3), np.float64)
SPACES = [
    BOX,
    spaces.Box(0, 255, (2, 2), np.uint8),
    spaces.Discrete(4, start=-1),
    spaces.MultiDiscrete([3, 2], start=[0, 5]),
    spaces.MultiBinary((2, 2)),
    spaces.Dict({"z": BOX, "a": spaces.Discrete(3), "m": spaces.Tuple([BOX, spaces.Dict({"q": BOX})])}),
    spaces.Tuple([spaces.Discrete(2), spaces.Box(-np.inf, np.inf, ())]),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_it_is_laid_out_as_gymnasium_does(space):
    layout = json.loads(json.dumps(describe(space, "x")))  # it goes through a file
    check(layout)
    assert size(layout) == spaces.flatdim(space)
    for seed in range(5):
        space.seed(seed)
        obs = space.sample()
        np.testing.assert_array_equal(
            flatten(layout, obs), np.asarray(spaces.flatten(space, obs), np.float64).reshape(-1)
        )


def test_what_does_not_fit_is_named():
    layout = describe(spaces.Dict({"arm": spaces.Tuple([BOX, spaces.Discrete(3)])}), "x")
    with pytest.raises(ValueError, match=r"the observation\['arm'\]\[0\] has the shape \(3,\), not \(2, 3\)"):
        flatten(layout, {"arm": (np.zeros(3), 1)})
    with pytest.raises(ValueError, match=r"the observation has the parts \['arm'\]; this is \['leg'\]"):
        flatten(layout, {"leg": 1})
    with pytest.raises(ValueError, match=r"the observation\['arm'\]\[1\] is 3, which is not one of its \[3\] choices"):
        flatten(layout, {"arm": (np.zeros((2, 3)), 3)})
    with pytest.raises(t3d.T3DError, match=r"x has the observation space .*, which cannot be made into a row"):
        describe(spaces.Text(5), "x")


@pytest.mark.parametrize(
    "layout",
    [None, {}, {"kind": "dict", "parts": []}, {"kind": "array", "shape": [-1]}, {"kind": "array", "shape": [2.5]},
     {"kind": "choice", "shape": [], "sizes": [2, 3], "first": [0]}, {"kind": "tuple", "parts": [{"kind": "?"}]}],
)  # fmt: skip
def test_a_strange_description_is_refused(layout):
    with pytest.raises(ValueError, match="layout"):
        check(layout)


class Mixed(gymnasium.Wrapper):
    """Pendulum-v1 that shows a Dict with a Tuple and a Discrete in it."""

    def __init__(self):
        super().__init__(gymnasium.make("Pendulum-v1"))
        pair = spaces.Tuple([spaces.Box(-1, 1, (1,)), spaces.Box(-1, 1, (1,))])
        self.observation_space = spaces.Dict(
            {"angle": pair, "speed": spaces.Box(-8, 8, (1,)), "side": spaces.Discrete(2)}
        )

    def _seen(self, obs):
        return {"angle": (obs[:1], obs[1:2]), "speed": obs[2:], "side": int(obs[1] > 0)}

    def reset(self, **options):
        obs, info = self.env.reset(**options)
        return self._seen(obs), info

    def step(self, action):
        obs, *rest = self.env.step(action)
        return self._seen(obs), *rest


class Coded(Mixed):
    """And one that shows nothing but choices."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.MultiDiscrete([3, 3])

    def _seen(self, obs):
        return np.round(obs[:2] + 1).astype(int)


def test_a_policy_takes_choices(tmp_path):
    settings = {"hidden": (8, 8), "batch_size": 8, "eval_episodes": 1, "device": "cpu", "progress": False}
    policy = t3d.load(t3d.train(Coded, 250, out=tmp_path / "run", **settings))
    assert (policy(np.array([2, 0])) == policy(np.array([0, 0, 1, 1, 0, 0]))).all()


def test_a_dict_can_be_compared_with_gymnasium():
    difference, _ = first_difference(env_factory(Mixed), 20)
    assert difference == ""


def test_a_policy_takes_what_its_environment_shows(tmp_path):
    settings = {"hidden": (8, 8), "batch_size": 8, "eval_episodes": 1, "device": "cpu", "progress": False}
    run = t3d.train(Mixed, 250, out=tmp_path / "run", **settings)
    policy = t3d.load(run.path)
    obs = {"angle": (np.array([0.5]), np.array([-0.25])), "speed": np.array([3.0]), "side": 1}
    flat = np.array([0.5, -0.25, 0, 1, 3.0])  # angle, side, speed: Gymnasium sorts the names
    assert (policy(obs) == policy(flat)).all() and policy(np.stack([flat, flat])).shape == (2, 1)
    with pytest.raises(
        t3d.T3DError, match=r"an observation of its environment; .*the parts \['angle', 'side', 'speed'\]"
    ):
        policy({"angle": 1})
    goal = t3d.train(Reach, 40, out=tmp_path / "goal", **settings)
    env = Reach()
    assert t3d.load(goal)(env.reset(seed=1)[0]).shape == (2,)
