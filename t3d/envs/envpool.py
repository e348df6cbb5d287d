"""EnvPool: C++ environments behind Gymnasium's vector interface.

Each environment draws its later episodes from its own generator, so the seed determines only the first episode after a
reset. Evaluations are still reproducible: each starts with a reset, which makes a new pool.
"""

import warnings
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from t3d.errors import T3DError, nearest

PREFIX = "envpool/"


class Pool(VectorEnv[Any, Any, Any]):
    """An EnvPool of one task as a VectorEnv."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, task: str, count: int, threads: int, args: dict[str, Any]) -> None:
        self._task, self._args = task, {"num_threads": threads, **args}
        self.num_envs = count
        self._pool = self._make([0] * count)
        self.single_observation_space, self.single_action_space = self._pool.observation_space, self._pool.action_space

    def _make(self, seeds: list[int]) -> Any:
        import envpool  # an optional dependency

        known = envpool.list_all_envs()
        if self._task not in known:
            raise T3DError(f"EnvPool has no environment {self._task}.{nearest(self._task, known)}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about bounds that are not exact in float32
            made = envpool.make(self._task, env_type="gymnasium", num_envs=self.num_envs, env_seed=seeds, **self._args)
            _ = made.observation_space, made.action_space
        return made

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._pool.close()
        self._pool = self._make(seed)
        return self._pool.reset()[0], {}

    def step(self, actions: NDArray[Any]) -> tuple[Any, NDArray[Any], NDArray[np.bool_], NDArray[np.bool_], Any]:
        obs, reward, terminated, truncated, _ = self._pool.step(actions)
        return obs, reward, terminated, truncated, {}

    def close(self, **_: Any) -> None:
        self._pool.close()
