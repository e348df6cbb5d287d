"""A batch around a Gymnasium `VectorEnv`, in any of its three autoreset modes.

NEXT_STEP   the step after an episode's end only resets; its row is not a transition
SAME_STEP   the step that ends an episode returns the first observation of the next; `info` has the last one
DISABLED    the batch resets ended environments itself, with a mask
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from t3d.envs.actions import ActionRange
from t3d.envs.batch import EnvError, EpisodeSeed, Flags, Floats, StepResult, refuse_nonfinite
from t3d.envs.gym import as_array, obs_layout
from t3d.envs.slots import Raised, calling, close_env, items
from t3d.errors import T3DError, shown
from t3d.layout import channels_last, size
from t3d.pixels.frame_stack import FrameStack


class VectorBatch:
    """The environments of a vector environment."""

    frame_stack: FrameStack | None = None
    lost = cut = 0
    together = True
    cut_failures = skip_losses = False  # a vector environment fails as a whole
    skipped: Flags | None = None
    longest_episode: int | None = None
    worker_lost: Flags | None = None
    blamed: Flags | None = None

    def __init__(self, name: str, env: "VectorEnv[Any, Any, Any]", episode_seed: EpisodeSeed) -> None:
        self.name, self.count, self._env = name, env.num_envs, env
        self.layout = obs_layout(env.single_observation_space, name)
        self.obs_dim = size(self.layout)
        if not isinstance(env.single_observation_space, spaces.Box):
            raise T3DError(f"{name}: a vector environment must have Box observations.")
        self.actions = ActionRange.of(env.single_action_space, name)
        mode = env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        self.mode = AutoresetMode(getattr(mode, "value", mode))
        self._episode_seed = episode_seed
        self.failures: list[EnvError] = []
        self._steps = 0
        self._ended = np.zeros(self.count, bool)  # NEXT_STEP: the next step only resets
        self._obs = np.zeros((self.count, self.obs_dim), np.float32)

    @property
    def episodes(self) -> list[int]:
        return [0] * self.count  # a vector environment seeds its later episodes itself

    def reset(self, episodes: Sequence[int] | None = None) -> Floats:
        numbers = episodes or [0] * self.count
        # One per environment, though Gymnasium's types say a single one.
        seeds: Any = [self._episode_seed(i, numbers[i]) for i in range(self.count)]
        obs, _ = self._obs_and_info(self._call("reset", lambda: self._env.reset(seed=seeds)))
        self._ended[:] = False
        self._obs = self._flat(obs)
        refuse_nonfinite(self._where, self._obs)
        return self._obs.copy()

    def step(self, actions: NDArray[Any], active: Flags | None = None) -> StepResult:
        # A vector environment steps as a whole; rows of environments that are not active are not valid.
        self._steps += 1
        is_active = np.ones(self.count, bool) if active is None else active
        env_actions = self.actions.to_env(np.asarray(actions))
        returned = self._call("step", lambda: self._env.step(env_actions))
        parts = items(returned)
        if parts is None or len(parts) != 5:
            what = "not (observations, rewards, terminated, truncated, info)"
            raise self._wrong(f"step() gave {shown(returned)}, {what}")
        raw, reward, terminated, truncated, info = parts
        obs, reward = self._flat(raw), self._per_env("rewards", reward, "biuf").astype(np.float64)
        terminated = self._per_env("terminated flags", terminated, "b")
        truncated = self._per_env("truncated flags", truncated, "b")
        valid = is_active.copy()
        final_obs, ended = obs, terminated | truncated
        if self.mode == AutoresetMode.NEXT_STEP:
            valid &= ~self._ended
            terminated, truncated = terminated & ~self._ended, truncated & ~self._ended
            # The action of the reset step is ignored.
            self._ended = ended & ~self._ended
        elif self.mode == AutoresetMode.SAME_STEP:
            if ended.any():
                final_obs = obs.copy()
                for i in map(int, np.flatnonzero(ended)):
                    final_obs[i] = self._final_obs(info, i)
        elif ended.any():
            mask = {"reset_mask": ended}
            first, _ = self._obs_and_info(self._call("reset", lambda: self._env.reset(options=mask)))
            obs = np.where(ended[:, None], self._flat(first), obs)
        reward = np.where(valid, reward, 0.0)
        final_obs = np.where(valid[:, None], final_obs, self._obs)
        refuse_nonfinite(self._where, final_obs, reward)
        refuse_nonfinite(self._where, obs)  # the first observations of new episodes
        self._obs = obs
        return StepResult(obs.copy(), reward, terminated & valid, truncated & valid, final_obs, valid)

    def _call(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            return calling(call)
        except Raised as problem:
            raise EnvError(
                f"{self._where()}: {name}() raised {problem}.", call=name, whole=problem.traceback
            ) from problem

    def _wrong(self, what: str) -> EnvError:
        return EnvError(f"{self._where()}: {what}.")

    def _obs_and_info(self, returned: Any) -> tuple[Any, Any]:
        parts = items(returned)
        if parts is None or len(parts) != 2:
            raise self._wrong(f"reset() gave {shown(returned)}, not (observations, info)")
        return parts[0], parts[1]

    def _per_env(self, name: str, raw: Any, kinds: str) -> NDArray[Any]:
        """Return an array (N,) of numbers or flags; raise EnvError for anything else."""
        given = as_array(raw)
        if given.shape != (self.count,) or given.dtype.kind not in kinds:
            raise self._wrong(f"the {name} are {given.dtype} {given.shape}, not of shape ({self.count},)")
        return given

    def _final_obs(self, info: Any, i: int) -> Floats:
        """The last observation of the episode that ended in environment i, from `info`."""
        try:
            given = calling(lambda: np.asarray(info["final_obs"][i]))
        except Raised:
            raise self._wrong(
                "an episode ended, and info has no 'final_obs' with its last observation, as SAME_STEP requires"
            ) from None
        if given.shape != tuple(self.layout["shape"]) or given.dtype.kind not in "biuf":
            raise self._wrong(f"info['final_obs'] of environment {i} is {given.dtype} {given.shape}")
        with np.errstate(over="ignore"):
            last: Floats = channels_last(self.layout, given).astype(np.float32).reshape(-1)
        return last

    def _flat(self, raw: Any) -> Floats:
        given = as_array(raw)
        if given.shape != (self.count, *self.layout["shape"]) or given.dtype.kind not in "biuf":
            raise self._wrong(f"the observations are {given.dtype} {given.shape}")
        with np.errstate(over="ignore"):
            return channels_last(self.layout, given).astype(np.float32).reshape(self.count, -1)

    def _where(self, i: int | None = None) -> str:
        one = "vector environment" if i is None else f"environment {i}"
        return f"{self.name}, {one}, step {self._steps}"

    def close(self) -> None:
        close_env(self._env)
