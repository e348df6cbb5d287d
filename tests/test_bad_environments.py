"""Environments that misbehave, each with the sentence or the recovery that is promised for it.

    python tests/test_bad_environments.py        prints the table

Whatever happens, no number that is not finite reaches the memory or the weights.
"""

import re
import tempfile
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import t3d
from t3d import T3DError, trainer
from t3d.state_dict import tensors

NAN, INF = float("nan"), float("inf")


class Good(gymnasium.Env):
    """Ten steps, two observations, two actions; the cases below change one thing after seven steps."""

    observation_space = spaces.Box(-10.0, 10.0, (2,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    episodes = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.episodes = 0, self.episodes + 1
        return self.obs(), {}

    def obs(self):
        return np.array([self.time, self.episodes], np.float32)

    def step(self, action):
        self.time += 1
        return self.obs(), float(action.sum()), self.time == 10, False, {}


def after_seven(**change):
    """An environment whose seventh step returns something else."""

    class Changed(Good):
        def step(self, action):
            obs, reward, terminated, truncated, info = super().step(action)
            if self.time == 7:
                if "error" in change:
                    raise change["error"]
                obs, reward = change.get("obs", obs), change.get("reward", reward)
                terminated, truncated = change.get("terminated", terminated), change.get("truncated", truncated)
            return obs, reward, terminated, truncated, info

    return Changed


def with_spaces(**changed):
    return type("Changed", (Good,), changed)


class ResetFails(Good):
    def reset(self, *, seed=None, options=None):
        if self.episodes == 2:
            raise OSError("the arm is stuck")
        return super().reset(seed=seed)


class ResetGivesNan(Good):
    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return (obs * NAN if self.episodes == 3 else obs), info


class Endless(Good):
    def step(self, action):
        return self.obs(), 1.0, False, False, {}


class Unstable(Good):
    """Like MuJoCo where a state goes bad: its counter rises and it begins anew by itself."""

    def __init__(self):
        self.data = type("Data", (), {"warning": [type("Counter", (), {"number": 0})() for _ in range(8)]})()

    def step(self, action):
        if self.time == 6:
            self.data.warning[5].number += 1
            self.time = 0
        return super().step(action)


# Each: a name, an environment, and the sentence it ends with; nothing where it is taken as it is or recovered from.
CASES = [
    ("NaN in an observation", after_seven(obs=np.array([0, NAN], np.float32)), r"step 7: observation\[1\] is nan"),
    ("infinity in an observation", after_seven(obs=np.array([INF, 0], np.float32)), r"observation\[0\] is inf"),
    ("an observation beyond float32", after_seven(obs=np.array([1e300, 0])), r"observation\[0\] is inf"),
    ("NaN as a reward", after_seven(reward=NAN), "the reward is nan"),
    ("infinity as a reward", after_seven(reward=-INF), "the reward is -inf"),
    ("a reward beyond 1e30", after_seven(reward=1e31), "the reward is 1e"),
    ("a reward that is None", after_seven(reward=None), "the reward is None, not a number"),
    ("a reward that is text", after_seven(reward="1"), "the reward is '1', not a number"),
    ("two rewards", after_seven(reward=np.ones(2)), "not a number"),
    ("an observation of another shape", after_seven(obs=np.zeros(3, np.float32)), r"shape \(3,\), not \(2,\)"),
    ("an observation of text", after_seven(obs=["a", "b"]), "the observation is not in Box"),
    ("an observation of complex numbers", after_seven(obs=np.array([1j, 0])), "the observation is not in Box"),
    ("an observation that is None", after_seven(obs=None), "is None, not numbers"),
    (
        "an exception in step",
        after_seven(error=RuntimeError("motor off")),
        r"step 7: step\(\) raised RuntimeError: motor",
    ),
    ("an exception in reset", ResetFails, r"reset\(\) raised OSError: the arm is stuck"),
    ("NaN after a reset", ResetGivesNan, r"step 0: observation\[0\] is nan"),
    ("discrete actions", with_spaces(action_space=spaces.Discrete(3)), "TD3 needs continuous"),
    ("unbounded actions", with_spaces(action_space=spaces.Box(-INF, INF, (2,))), "unbounded"),
    ("no actions", with_spaces(action_space=spaces.Box(-1, 1, (0,))), "nothing to learn"),
    ("no observations", with_spaces(observation_space=spaces.Box(-1, 1, (0,))), "nothing to learn from"),
    ("stacks of images", with_spaces(observation_space=spaces.Box(0, 255, (2, 8, 8, 3), np.uint8)), "one at a time"),
    ("no image", with_spaces(observation_space=spaces.Box(0, 255, (8, 8, 3), np.uint8)), "is not in Box"),
    ("observations of text", with_spaces(observation_space=spaces.Sequence(spaces.Discrete(2))), "cannot be made into"),
    ("a function that makes no environment", lambda: 3, "not a gymnasium.Env"),
    ("float64 observations", after_seven(obs=np.array([1.0, 2.0])), ""),
    ("whole numbers as observations", after_seven(obs=np.array([1, 2])), ""),
    ("a reward in an array", after_seven(reward=np.array([1.0])), ""),
    ("flags of NumPy, both at once", after_seven(terminated=np.True_, truncated=np.True_), ""),
    ("an episode that never ends", Endless, ""),
    ("a simulation that begins anew by itself", Unstable, ""),
]


def outcome(env, folder, monkeypatch):
    """What came of training on it, and the numbers that are not finite in memory and weights."""
    seen, create = [], trainer.create_state
    monkeypatch.setattr(trainer, "create_state", lambda setup: seen.append(create(setup)) or seen[-1])
    settings = {
        "steps": 60,
        "random_steps": 20,
        "hidden": (8, 8),
        "batch_size": 8,
        "eval_every": 10_000,
        "device": "cpu",
    }
    try:
        t3d.train(env, out=folder / "run", eval_env=None, eval_episodes=1, progress=False, **settings)
        said = ""
    except T3DError as error:
        said = str(error)
    bad = 0
    for state in seen:
        memory = state.learner.memory
        stored = memory.rows[0, : int(memory.length[0])]
        bad += int((~torch.isfinite(stored)).sum())
        bad += sum(int((~torch.isfinite(tensor)).sum()) for tensor in tensors(state.learner.agent).values())
    return said, bad, seen


@pytest.mark.parametrize(("env", "sentence"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_bad_environments(env, sentence, tmp_path, monkeypatch):
    monkeypatch.setattr("t3d.envs.gym.LONGEST_EPISODE", 25)
    pytest.importorskip("mujoco")  # whose counters the last case has
    said, bad, states = outcome(env, tmp_path, monkeypatch)
    assert bad == 0
    assert re.search(sentence, said) if sentence else said == ""
    if env is Unstable:
        cut = states[0].collector.envs.cut
        assert cut > 0 and states[0].learner.memory.stored[0] == 60 - cut


if __name__ == "__main__":
    total = 0
    for name, env, _ in CASES:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr("t3d.envs.gym.LONGEST_EPISODE", 25)
            said, bad, _ = outcome(env, Path(folder), patch)
            total += bad
            print(f"{name:<42} {said[:110] or 'trains to the end'}")
    print(f"{len(CASES)} cases, {total} numbers in memory or weights that are not finite")
