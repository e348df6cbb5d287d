"""Gymnasium's MuJoCo tasks, stepped together by MuJoCo's own thread pool.

One Gymnasium environment provides the model and performs every reset. This module steps the simulations;
`mujoco_tasks.py` computes observations, rewards and terminations.
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


class SimulationPool:
    """N simulations on MuJoCo's thread pool."""

    def __init__(self, env: Any, count: int, threads: int) -> None:
        from mujoco.batch import Batch

        self.env, self.count, self.dt = env, count, float(env.dt)
        self._batch = Batch(env.model, count, threads, persistent=True)
        self.qpos, self.qvel, self.ctrl = (self.bind(name) for name in ("qpos", "qvel", "ctrl"))
        self._time, self._ones = self.bind("time").reshape(-1), np.ones(count)
        self._scratch = mujoco.MjData(env.model)
        self._forces = np.zeros((count, *self._scratch.cfrc_ext.shape))

    def bind(self, field: str) -> Array:
        return self._batch.bind(field)

    def times(self) -> Array:
        return self._time

    def total_time(self) -> float:
        return float(self._time.dot(self._ones))  # faster than a sum

    def contact_forces(self) -> Array:
        # mujoco.batch does not compute them: copy the data of each simulation and compute them one by one.
        for i in range(self.count):
            self._batch.get_data(i, self._scratch)
            mujoco.mj_rnePostConstraint(self.env.model, self._scratch)
            self._forces[i] = self._scratch.cfrc_ext
        return self._forces

    def step(self, ids: NDArray[np.int32] | None) -> None:
        self._batch.step(ids, nstep=self.env.frame_skip)

    def set_state(self, i: int, qpos: Array, qvel: Array) -> None:
        ids = np.array([i], np.int32)
        self._batch.reset(ids, stage=0)
        self.qpos[i], self.qvel[i] = qpos, qvel
        self._batch.forward(ids)


class SingleSimulation:
    """One simulation without a thread pool, whose overhead would be noticeable."""

    count = 1

    def __init__(self, env: Any) -> None:
        self.env, self.dt = env, float(env.dt)
        self._model, self._data, self._skip = env.model, mujoco.MjData(env.model), env.frame_skip
        self.qpos, self.qvel, self.ctrl = (self.bind(name) for name in ("qpos", "qvel", "ctrl"))

    def bind(self, field: str) -> Array:
        return getattr(self._data, field)[None]

    def times(self) -> Array:
        return np.array([self._data.time])

    def total_time(self) -> float:
        return self._data.time

    def contact_forces(self) -> Array:
        mujoco.mj_rnePostConstraint(self._model, self._data)
        return self._data.cfrc_ext[None]

    def step(self, ids: NDArray[np.int32] | None) -> None:
        if ids is None or len(ids):
            mujoco.mj_step(self._model, self._data, self._skip)

    def set_state(self, i: int, qpos: Array, qvel: Array) -> None:
        mujoco.mj_resetData(self._model, self._data)
        self.qpos[0], self.qvel[0] = qpos, qvel
        mujoco.mj_forward(self._model, self._data)


class MujocoBatch:
    """N simulations of a MuJoCo task, stepped together."""

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
            # A single kinematic tree is always one island: searching for islands takes 4 % of a step.
            raw.model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_ISLAND)
        self._sims: Simulations = SingleSimulation(raw) if count == 1 else SimulationPool(raw, count, threads)
        self._task = TASKS[env.spec.id](self._sims)
        self._episode, self._start = np.full(count, -1), np.zeros(count, np.int64)
        self._steps = 0  # since the start; an episode's length is this minus its start step
        self._next_limit = 0  # the step at which the first current episode reaches its time limit
        self._start_sum = 0  # the sum of the start steps
        self._obs = np.zeros((count, self.obs_dim), np.float32)
        # The flags of most steps, shared by all results: read only.
        self._all_false, self._all_true = np.zeros(count, bool), np.ones(count, bool)

    @property
    def episodes(self) -> list[int]:
        return [int(episode) for episode in self._episode]

    def reset(self, episodes: Sequence[int] | None = None) -> Floats:
        if episodes is not None:
            self._episode = np.array(episodes) - 1
        for i in range(self.count):
            self._reset_one(i)
        self._update_limits()
        return self._obs.copy()

    @property
    def _length(self) -> NDArray[np.int64]:
        return self._steps - self._start

    def _update_limits(self) -> None:
        self._next_limit, self._start_sum = int(self._start.min()) + self._limit, int(self._start.sum())

    def _reset_one(self, i: int) -> None:
        self._episode[i] += 1
        self._start[i] = self._steps
        obs, _ = self._env.reset(seed=self._episode_seed(i, int(self._episode[i])))
        data = self._sims.env.data
        self._sims.set_state(i, data.qpos, data.qvel)
        self._obs[i] = obs

    def step(self, actions: NDArray[Any], active: Flags | None = None) -> StepResult:
        sims, task = self._sims, self._task
        env_actions: Floats = self.actions.to_env(actions)
        self.failures.clear()
        before = task.before()
        sims.ctrl[...] = env_actions
        sims.step(None if active is None else np.flatnonzero(active).astype(np.int32))
        self._steps += 1
        if active is not None:
            self._start[~active] += 1  # their episodes do not get longer
        obs = task.obs()
        reward = task.reward(env_actions, before)
        terminated = task.terminated() if task.ends else self._all_false
        if active is None:
            # The fast path: no episode ends, and the sum of the clocks shows that no simulation was reset.
            steps = self._steps
            on_time = sims.total_time() > (steps * self.count - self._start_sum - 0.5) * sims.dt
            if on_time and steps < self._next_limit and not (task.ends and np.count_nonzero(terminated)):
                # The reward is computed from the same numbers.
                if (failure := find_nonfinite(self._where, obs)) is None:
                    self._obs = obs
                    return StepResult(obs, reward, self._all_false, self._all_false, obs, self._all_true)
                if not self.cut_failures:
                    raise self._with_action(failure, env_actions)
        return self._finish_step(obs, reward, terminated, self._all_true if active is None else active, env_actions)

    def _with_action(self, failure: EnvError, env_actions: Floats) -> EnvError:
        i = failure.index or 0
        failure.action, failure.obs = env_actions[i], self._obs[i].copy()
        failure.episode, failure.length = int(self._episode[i]), int(self._length[i])
        return failure

    def _finish_step(
        self, obs: Floats, reward: Array, terminated: Flags, active: Flags, env_actions: Floats
    ) -> StepResult:
        """Finish a step in which an episode ends, a simulation diverged, or not all environments are active."""
        # MuJoCo resets a diverged simulation, and its clock with it.
        diverged = active & (self._sims.times() < (self._length - 0.5) * self._sims.dt)
        self.cut += int(diverged.sum())
        valid = active & ~diverged
        while failure := find_nonfinite(self._where, np.where(valid[:, None], obs, 0), np.where(valid, reward, 0)):
            if not self.cut_failures:
                raise self._with_action(failure, env_actions)
            self.failures.append(self._with_action(failure, env_actions))
            valid[failure.index] = False
            diverged[failure.index] = True
        final_obs = np.where(valid[:, None], obs, self._obs)
        reward = np.where(valid, reward, 0.0)
        terminated = terminated & valid
        truncated = (self._length >= self._limit) & active | diverged
        self._obs = final_obs.copy()
        for i in np.flatnonzero(terminated | truncated):
            self._reset_one(int(i))
        self._update_limits()
        return StepResult(self._obs.copy(), reward, terminated, truncated, final_obs, valid)

    def _where(self, i: int) -> str:
        return f"{self.name}, copy {i}, episode {self._episode[i]}, step {self._length[i]}"

    def close(self) -> None:
        close_env(self._env)
