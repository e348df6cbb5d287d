"""[step 1] Transitions that are stored again with goals that were reached.

python tests/test_hindsight.py      the goal task with relabelling and without, three seeds each
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from scripted import Reach

import t3d
from t3d.config import Config, resolve
from t3d.envs import env_factory
from t3d.hindsight import Hindsight
from t3d.run_state import RunSetup, cut_episodes
from t3d.trainer import Trainer

# achieved_goal, desired_goal, observation: Gymnasium sorts the keys of a Dict.
ACHIEVED, DESIRED = slice(0, 2), slice(2, 4)


def begin(**settings):
    config = Config(
        hidden=(8, 8), batch_size=8, device="cpu", threads=1, **{"steps": 300, "random_steps": 200, **settings}
    )
    config = resolve(config, "td3", "Reach", 2)
    return Trainer.in_memory(RunSetup(env_factory(Reach), [3, 5], config))


@pytest.mark.parametrize("envs", [1, 3])
def test_every_row_comes_back_with_goals_that_were_reached_later(envs):
    trainer = begin(her=4, num_envs=envs)
    state, memory = trainer.state, trainer.state.learner.memory
    for _ in range(2 * Reach.limit):
        trainer.step()
    assert memory.stored.tolist() == [envs * 2 * Reach.limit * 5] * 2 and state.step == envs * 2 * Reach.limit
    rows = memory.rows[0, : int(memory.length[0])].numpy()
    real, extra = rows[: envs * Reach.limit], rows[envs * Reach.limit :][: 4 * envs * Reach.limit]
    task = Reach()
    for i in range(envs):
        episode, copies = real[i::envs], extra[4 * Reach.limit * i :][: 4 * Reach.limit]
        reached = episode[:, 8:14][:, ACHIEVED]  # after each step
        offsets = []
        for n, row in enumerate(copies):
            t = n // 4
            obs, next_obs = row[:6], row[8:14]
            same = [0, 1, 4, 5]  # all but the goal
            assert (obs[same] == episode[t, same]).all() and (next_obs[same] == episode[t, 8:14][same]).all()
            assert (row[6:8] == episode[t, 6:8]).all() and (obs[DESIRED] == next_obs[DESIRED]).all()
            assert row[14] == task.compute_reward(next_obs[ACHIEVED], obs[DESIRED], {})
            later = np.flatnonzero((reached[t:] == obs[DESIRED]).all(1))
            assert len(later), "a goal that was not reached in what followed"
            offsets.append(later[0] / (Reach.limit - t))
        assert len(set(offsets)) > 10 and 0.3 < np.mean(offsets) < 0.6  # evenly over what followed
        assert (copies[:, 14] == 0).sum() >= Reach.limit // 2  # some reach their goal now


def test_updates_count_real_steps():
    run = {}
    for count in (0, 4):
        trainer = begin(her=count, steps=120, random_steps=60)
        for _ in range(120):
            trainer.step()
        run[count] = trainer.state.updates.tolist()
    assert run[0] == run[4] == [60, 60]


def test_what_cannot_be_relabelled_is_said(tmp_path):
    with pytest.raises(
        t3d.T3DError, match=r"needs a goal task, whose observations have observation.*Pendulum-v1 is not one"
    ):
        Hindsight(env_factory("Pendulum-v1"), 4)
    with pytest.raises(t3d.T3DError, match="--her needs --n-step 1"):
        begin(her=4, n_step=3)

    class Dumb(Reach):
        compute_reward = None

    with pytest.raises(t3d.T3DError, match=r"compute_reward\(\), but .* has none"):
        Hindsight(env_factory(Dumb), 4)
    with pytest.raises(t3d.T3DError, match="does not hold an episode of 15 steps with --her 4"):
        t3d.train(Reach, 100, out=tmp_path / "run", her=4, buffer_size=40, progress=False)


@pytest.mark.parametrize(
    ("compute_reward", "sentence"),
    [
        (
            lambda self, achieved, desired, info: 5.0,
            r"had the reward -?\d, but compute_reward\(\) returns 5 for the same goal",
        ),
        (lambda self, achieved, desired, info: 1 / 0, r"Task: compute_reward\(\) raised ZeroDivisionError"),
        (
            lambda self, achieved, desired, info: None,
            r"compute_reward\(\) returned array\(None.*which is not a finite number",
        ),
    ],
)
def test_rewards_that_cannot_be_had_again_are_refused(compute_reward, sentence, tmp_path):
    class Task(Reach):
        def step(self, action):
            obs, _, *rest = super().step(action)
            return obs, Reach.compute_reward(self, self.at, self.goal, {}), *rest

    def relabelled_reward(self, achieved, desired, info):
        return compute_reward(self, achieved, desired, info) if not hasattr(self, "time") else 0.0  # to her

    Task.compute_reward = relabelled_reward
    with pytest.raises(t3d.T3DError, match=sentence):
        t3d.train(Task, 100, out=tmp_path / "run", her=4, progress=False, hidden=(8, 8), eval_episodes=1)


def test_what_was_reached_before_a_cut_is_relabelled_too():
    trainer = begin(her=2)
    for _ in range(4):
        trainer.step()
    collector, memory = trainer.state.collector, trainer.state.learner.memory
    before = memory.stored.copy()
    cut_episodes(trainer.state, np.array([[True], [False]]), collector.obs)
    assert (memory.stored - before).tolist() == [4 * 2, 0] and collector.episode_length.tolist() == [[0], [4]]


def learned(count, seeds, steps, folder):
    """The share of steps at the goal, in the last evaluation."""
    settings = {"hidden": (64, 64), "batch_size": 64, "random_steps": 500, "eval_every": steps, "eval_episodes": 20}
    settings |= {"gamma": 0.95, "actor_lr": 1e-3, "critic_lr": 1e-3, "device": "cpu", "accelerate": "eager"}
    run = t3d.train(Reach, steps, seeds, folder, her=count, progress=False, **settings)
    last = [row["returns"] for row in run.evaluations if row["step"] == steps]
    return 1 + np.array(last).mean(1) / Reach.limit


def test_a_goal_task_is_learned_with_relabelling_and_not_without(tmp_path):
    with_it, without = (learned(count, 1, 3_000, tmp_path / str(count)) for count in (4, 0))
    assert with_it > 0.4 and without < 0.2


def main():
    with tempfile.TemporaryDirectory() as folder:
        for count in (4, 0):
            shares = learned(count, 3, 4_000, Path(folder) / str(count))
            print(f"her {count}: at the goal in {', '.join(f'{share:.0%}' for share in shares)} of the steps")


if __name__ == "__main__":
    sys.exit(main())
