"""The native MuJoCo path is Gymnasium, bit for bit."""

import gymnasium
import numpy as np
import pytest

import t3d
from t3d.envs import env_factory
from t3d.envs.exact import first_difference, mujoco_tasks
from t3d.envs.worker import BAD_STATES

mujoco = pytest.importorskip("mujoco")
pytest.importorskip("mujoco.batch")


def episode_seed(env, episode):
    return 1000 * env + episode


@pytest.mark.parametrize("task", mujoco_tasks())
def test_it_is_gymnasium_bit_for_bit(task):
    assert first_difference(env_factory(task), 120, count=3)[0] == ""
    assert first_difference(env_factory(task), 120, count=1)[0] == ""


def test_a_difference_is_noticed(monkeypatch):
    monkeypatch.setattr(
        "t3d.envs.mujoco_tasks.HalfCheetah.control_cost", lambda self, action: 0.1 * np.square(action).mean(1)
    )
    assert first_difference(env_factory("HalfCheetah-v5"), 20)[0] == "step 1 of environment 0"


@pytest.mark.parametrize("num_envs", [1, 2])
def test_training_says_nothing_it_should_not(num_envs, tmp_path):
    settings = {"steps": 60, "random_steps": 20, "hidden": (8, 8), "batch_size": 8, "eval_episodes": 1, "device": "cpu"}
    run = t3d.train(
        "Hopper-v5", out=tmp_path / "run", num_envs=num_envs, progress=False, **settings
    )  # warnings are errors
    assert run.evaluations[-1]["step"] == 60


def test_which_path_a_task_takes():
    assert env_factory("HalfCheetah-v5").path()[0] == "mujoco.batch"
    assert env_factory("Ant-v5").path()[0] == "mujoco.batch"
    assert env_factory("Hopper").name == "Hopper-v5" and env_factory("Hopper").path()[0] == "mujoco.batch"
    assert env_factory("Pendulum-v1").path()[0] == "gymnasium"
    assert env_factory("HalfCheetah-v5", {"forward_reward_weight": 2}).path()[0] == "gymnasium"
    assert env_factory(lambda: gymnasium.make("HalfCheetah-v5")).path()[0] == "gymnasium"


def test_one_simulation_that_begins_anew_by_itself_is_cut():
    envs = env_factory("Hopper-v5").batch(1, episode_seed)
    envs.reset()
    envs.step(np.zeros((1, 3)))
    envs._sims.qvel[0] = 1e11
    moved = envs.step(np.zeros((1, 3)))
    assert not moved.valid[0] and moved.truncated[0] and envs.cut == 1
    assert envs.step(np.zeros((1, 3))).valid[0]


@pytest.mark.parametrize("path", ["native", "gymnasium"])
def test_a_simulation_that_begins_anew_by_itself_is_cut(path):
    source = env_factory("HalfCheetah-v5" if path == "native" else lambda: gymnasium.make("HalfCheetah-v5"))
    envs = source.batch(2, episode_seed)
    envs.reset()
    before = envs.step(np.zeros((2, 6))).obs
    if path == "native":
        envs._sims.qvel[1] = 1e11
    else:
        envs._slots[1]._env.unwrapped.data.qvel[:] = 1e11
    moved = envs.step(np.zeros((2, 6)))
    assert moved.valid.tolist() == [True, False] and moved.truncated.tolist() == [False, True]
    assert (moved.final_obs[1] == before[1]).all() and moved.reward[1] == 0 and envs.cut == 1
    assert envs.step(np.zeros((2, 6))).valid.all() and envs.cut == 1


def test_rows_that_are_not_active_stand_still():
    envs = env_factory("Hopper-v5").batch(3, episode_seed)
    first = envs.reset()
    moved = envs.step(np.ones((3, 3)), active=np.array([False, True, False]))
    assert moved.valid.tolist() == [False, True, False] and moved.reward[[0, 2]].tolist() == [0, 0]
    assert (moved.obs[[0, 2]] == first[[0, 2]]).all() and (moved.obs[1] != first[1]).any()


def test_the_counters_of_bad_states_are_mujocos():
    kinds = mujoco.mjtWarning
    assert (kinds.mjWARN_BADQPOS, kinds.mjWARN_BADQVEL, kinds.mjWARN_BADQACC) == BAD_STATES
