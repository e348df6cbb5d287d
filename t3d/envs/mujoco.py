"""Gymnasium's MuJoCo tasks, stepped together on MuJoCo's own pool of threads.

Gymnasium makes one environment, for the model and for every reset; only stepping is done here, and what a step gives is
in `mujoco_tasks.py`.
"""

from collections.abc import Sequence
from typing import Any

import gymnasium
import mujoco
import numpy as np
from numpy.typing import NDArray

from t3d.envs.actions import ActionRange
from t3d.envs.batch import EnvError, EpisodeSeed, Flags, Floats, StepResult, find_nonfinite
from t3d.envs.mujoco_tasks import TASKS, Array, Simulations
from t3d.envs.slots import close_env
from t3d.layout import describe, size
from t3d.pixels.frame_stack import FrameStack


class Many:
    """Simulations on MuJoCo's own pool of threads."""

    def __init__(self, env: Any, count: int, threads: int) -> None:
        from mujoco.batch import Batch

        self.env, self.count, self.dt = env, count, float(env.dt)
        self._batch = Batch(env.model, count, threads, persistent=True)
        self.qpos, self.qvel, self.ctrl = (self.bind(name) for name in ("qpos", "qvel", "ctrl"))
        self._time, self._each = self.bind("time").reshape(-1), np.ones(count)
        self._scratch = mujoco.MjData(env.model)
        self._forces = np.zeros((count, *self._scratch.cfrc_ext.shape))

    def bind(self, field: str) -> Array:
        return self._batch.bind(field)

    def clock(self) -> Array:
        return self._time

    def total_time(self) -> float:
        return float(self._time.dot(self._each))  # faster than a sum

    def contact_forces(self) -> Array:
        # A batch does not compute them: one by one, from a copy of each simulation's whole data.
        for i in range(self.count):
            self._batch.get_data(i, self._scratch)
            mujoco.mj_rnePostConstraint(self.env.model, self._scratch)
            self._forces[i] = self._scratch.cfrc_ext
        return self._forces

    def step(self, ids: NDArray[np.int32] | None) -> None:
        self._batch.step(ids, nstep=self.env.frame_skip)

    def place(self, i: int, qpos: Array, qvel: Array) -> None:
        ids = np.array([i], np.int32)
        self._batch.reset(ids, stage=0)
        self.qpos[i], self.qvel[i] = qpos, qvel
        self._batch.forward(ids)


class One:
    """One simulation, without a pool between: with so little to do, the detour would show."""

    count = 1

    def __init__(self, env: Any) -> None:
        self.env, self.dt = env, float(env.dt)
        self._model, self._data, self._skip = env.model, mujoco.MjData(env.model), env.frame_skip
        self.qpos, self.qvel, self.ctrl = (self.bind(name) for name in ("qpos", "qvel", "ctrl"))

    def bind(self, field: str) -> Array:
        return getattr(self._data, field)[None]

    def clock(self) -> Array:
        return np.array([self._data.time])

    def total_time(self) -> float:
        return self._data.time

    def contact_forces(self) -> Array:
        mujoco.mj_rnePostConstraint(self._model, self._data)
        return self._data.cfrc_ext[None]

    def step(self, ids: NDArray[np.int32] | None) -> None:
        if ids is None or len(ids):
            mujoco.mj_step(self._model, self._data, self._skip)

    def place(self, i: int, qpos: Array, qvel: Array) -> None:
        mujoco.mj_resetData(self._model, self._data)
        self.qpos[0], self.qvel[0] = qpos, qvel
        mujoco.mj_forward(self._model, self._data)


class MujocoBatch:
    """N copies of a MuJoCo task, stepped together."""

    frame_stack: FrameStack | None = None
    together = False
    lost = 0
    skip_losses = False
    skipped: Flags | None = None
    worker_lost: Flags | None = None
    blamed: Flags | None = None

    def __init__(
        self, name: str, env: "gymnasium.Env[Any, Any]", count: int, episode_seed: EpisodeSeed, threads: int
    ) -> None:
        assert env.spec is not None and env.spec.max_episode_steps is not None
        self.name, self.count, self.cut = name, count, 0
        self.cut_failures, self.failures = False, list[EnvError]()
        self.layout = describe(env.observation_space, name)
        self.obs_dim = size(self.layout)
        self.actions = ActionRange.of(env.action_space, name)
        self._env, self._limit, self._episode_seed = env, env.spec.max_episode_steps, episode_seed
        self.longest_episode: int | None = self._limit
        raw: Any = env.unwrapped
        if raw.model.ntree == 1:
            # One body of connected parts is always one island: looking for several is 4 % of a step, for nothing.
            raw.model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_ISLAND)
        self._sims: Simulations = One(raw) if count == 1 else Many(raw, count, threads)
        self._task = TASKS[env.spec.id](self._sims)
        self._episode, self._began = np.full(count, -1), np.zeros(count, np.int64)
        self._now = 0  # steps so far; an episode's length is this less the step it began at
        self._soonest = 0  # when the first episode under way reaches its limit
        self._all_began = 0  # the steps they began at, added up
        self._obs = np.zeros((count, self.obs_dim), np.float32)
        # What most steps answer: nobody ended, everybody moved. They are handed out again and again: read only.
        self._no, self._yes = np.zeros(count, bool), np.ones(count, bool)

    @property
    def episodes(self) -> list[int]:
        return [int(episode) for episode in self._episode]

    def reset(self, episodes: Sequence[int] | None = None) -> Floats:
        if episodes is not None:
            self._episode = np.array(episodes) - 1
        for i in range(self.count):
            self._reset_one(i)
        self._count_steps()
        return self._obs.copy()

    @property
    def _length(self) -> NDArray[np.int64]:
        return self._now - self._began

    def _count_steps(self) -> None:
        self._soonest, self._all_began = int(self._began.min()) + self._limit, int(self._began.sum())

    def _reset_one(self, i: int) -> None:
        self._episode[i] += 1
        self._began[i] = self._now
        obs, _ = self._env.reset(seed=self._episode_seed(i, int(self._episode[i])))
        data = self._sims.env.data
        self._sims.place(i, data.qpos, data.qvel)
        self._obs[i] = obs

    def step(self, actions: NDArray[Any], active: Flags | None = None) -> StepResult:
        sims, task = self._sims, self._task
        played: Floats = self.actions.to_env(actions)
        self.failures.clear()
        before = task.before()
        sims.ctrl[...] = played
        sims.step(None if active is None else np.flatnonzero(active).astype(np.int32))
        self._now += 1
        if active is not None:
            self._began[~active] += 1  # they stand still
        obs = task.obs()
        reward = task.reward(played, before)
        terminated = task.terminated() if task.ends else self._no
        if active is None:
            # Is anything out of the ordinary? One look for all of them, because most steps are not.
            now = self._now
            on_time = sims.total_time() > (now * self.count - self._all_began - 0.5) * sims.dt
            if on_time and now < self._soonest and not (task.ends and np.count_nonzero(terminated)):
                if (failure := find_nonfinite(self._where, obs)) is None:  # the reward is made of the same numbers
                    self._obs = obs
                    return StepResult(obs, reward, self._no, self._no, obs, self._yes)
                if not self.cut_failures:
                    raise self._with_action(failure, played)
        return self._ended(obs, reward, terminated, self._yes if active is None else active, played)

    def _with_action(self, failure: EnvError, played: Floats) -> EnvError:
        i = failure.index or 0
        failure.action, failure.obs = played[i], self._obs[i].copy()
        failure.episode, failure.length = int(self._episode[i]), int(self._length[i])
        return failure

    def _ended(self, obs: Floats, reward: Array, terminated: Flags, active: Flags, played: Floats) -> StepResult:
        """The rest of a step in which some episodes end, some simulation broke down, or not all were to move."""
        # A simulation that goes bad begins anew by itself, and its clock with it.
        broke_down = active & (self._sims.clock() < (self._length - 0.5) * self._sims.dt)
        self.cut += int(broke_down.sum())
        valid = active & ~broke_down
        while failure := find_nonfinite(self._where, np.where(valid[:, None], obs, 0), np.where(valid, reward, 0)):
            if not self.cut_failures:
                raise self._with_action(failure, played)
            self.failures.append(self._with_action(failure, played))
            valid[failure.index] = False
            broke_down[failure.index] = True
        final_obs = np.where(valid[:, None], obs, self._obs)
        reward = np.where(valid, reward, 0.0)
        terminated = terminated & valid
        truncated = (self._length >= self._limit) & active | broke_down
        self._obs = final_obs.copy()
        for i in np.flatnonzero(terminated | truncated):
            self._reset_one(int(i))
        self._count_steps()
        return StepResult(self._obs.copy(), reward, terminated, truncated, final_obs, valid)

    def _where(self, i: int) -> str:
        return f"{self.name}, copy {i}, episode {self._episode[i]}, step {self._length[i]}"

    def close(self) -> None:
        close_env(self._env)
