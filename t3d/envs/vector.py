"""A Gymnasium `VectorEnv` that somebody else made, in any of its three ways to begin anew.

NEXT_STEP   the call after an episode's end only resets: its row is no transition
SAME_STEP   the call that ends an episode already shows the next one; the true last observation is in `info`
DISABLED    it must be reset by hand, with a mask
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from t3d.envs.actions import ActionRange
from t3d.envs.batch import EpisodeSeed, Flags, Floats, Moved, refuse_unlearnable
from t3d.envs.gym import observable
from t3d.errors import T3DError
from t3d.layout import channels_last, size
from t3d.sight import Sight


class VectorBatch:
    """All environments of a vector environment."""

    sight: Sight | None = None
    lost = cut = 0
    together = True

    def __init__(self, name: str, env: "VectorEnv[Any, Any, Any]", episode_seed: EpisodeSeed) -> None:
        self.name, self.count, self._env = name, env.num_envs, env
        self.layout = observable(env.single_observation_space, name)
        self.obs_dim = size(self.layout)
        if not isinstance(env.single_observation_space, spaces.Box):
            raise T3DError(f"{name}: only Box observations are read from a vector environment.")
        self.actions = ActionRange.of(env.single_action_space, name)
        mode = env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        self.mode = AutoresetMode(getattr(mode, "value", mode))
        self._episode_seed = episode_seed
        self._steps = 0
        self._ended = np.zeros(self.count, bool)  # NEXT_STEP: whose next call only resets
        self._obs = np.zeros((self.count, self.obs_dim), np.float32)

    @property
    def episodes(self) -> list[int]:
        return [0] * self.count  # a vector environment begins new ones by itself, from seeds of its own

    def reset(self, episodes: Sequence[int] | None = None) -> Floats:
        numbers = episodes or [0] * self.count
        seeds: Any = [self._episode_seed(i, numbers[i]) for i in range(self.count)]  # one each; typed as one for all
        obs, _ = self._env.reset(seed=seeds)
        self._ended[:] = False
        self._obs = self._flat(obs)
        return self._obs.copy()

    def step(self, actions: NDArray[Any], active: Flags | None = None) -> Moved:
        # A vector environment moves as a whole: those that are not active play on, and their rows do not count.
        self._steps += 1
        wanted = np.ones(self.count, bool) if active is None else active
        raw, reward, terminated, truncated, info = self._env.step(self.actions.to_env(np.asarray(actions)))
        obs, reward = self._flat(raw), np.asarray(reward, np.float64)
        terminated, truncated = np.asarray(terminated, bool), np.asarray(truncated, bool)
        valid = wanted.copy()
        final_obs, ended = obs, terminated | truncated
        if self.mode == AutoresetMode.NEXT_STEP:
            valid &= ~self._ended
            terminated, truncated = terminated & ~self._ended, truncated & ~self._ended
            # Before the reset step there is nothing new to act on; whatever is done in it is ignored.
            self._ended = ended & ~self._ended
        elif self.mode == AutoresetMode.SAME_STEP:
            if ended.any():
                final_obs = obs.copy()
                for i in np.flatnonzero(ended):
                    last = channels_last(self.layout, np.asarray(info["final_obs"][i], np.float32))
                    final_obs[i] = last.reshape(-1)
        elif ended.any():
            fresh, _ = self._env.reset(options={"reset_mask": ended})
            obs = np.where(ended[:, None], self._flat(fresh), obs)
        reward = np.where(valid, reward, 0.0)
        final_obs = np.where(valid[:, None], final_obs, self._obs)
        refuse_unlearnable(self._where, final_obs, reward)
        self._obs = obs
        return Moved(obs.copy(), reward, terminated & valid, truncated & valid, final_obs, valid)

    def _flat(self, raw: Any) -> Floats:
        given = np.asarray(raw)
        if given.shape != (self.count, *self.layout["shape"]) or given.dtype.kind not in "biuf":
            raise T3DError(f"{self._where(0)}: the observations are {given.dtype} {given.shape}.")
        with np.errstate(over="ignore"):
            return channels_last(self.layout, given).astype(np.float32).reshape(self.count, -1)

    def _where(self, i: int) -> str:
        return f"{self.name}, environment {i}, step {self._steps}"

    def close(self) -> None:
        self._env.close()
