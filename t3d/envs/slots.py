"""Where one environment of a batch lives: in this process, or in a worker. A batch only sees these calls."""

import traceback
from typing import Any, NamedTuple, Protocol

import gymnasium
from numpy.typing import NDArray

from t3d.envs.worker import self_resets


class Lost(Exception):
    """The process that the environment lived in is gone; another one stands ready for a reset."""


class Raised(Exception):
    """The environment raised an exception; the text says which and where."""


class Stepped(NamedTuple):
    """What an environment answered to a step, as it said it, and whether its simulation broke down in it."""

    obs: Any
    reward: Any
    terminated: bool
    truncated: bool
    broke_down: bool


class Slot(Protocol):
    """One environment. `begin` and `end` are apart so that several can step at once."""

    def reset(self, seed: int) -> Any: ...
    def begin(self, action: NDArray[Any]) -> None: ...
    def end(self) -> Stepped: ...
    def close(self) -> None: ...


class LocalSlot:
    """An environment in this process."""

    def __init__(self, env: "gymnasium.Env[Any, Any]") -> None:
        self._env, self._resets = env, 0
        self._action: Any = None

    def reset(self, seed: int) -> Any:
        try:
            obs = self._env.reset(seed=seed)[0]
        except Exception as problem:
            raise Raised(said(problem)) from problem
        self._resets = self_resets(self._env)
        return obs

    def begin(self, action: NDArray[Any]) -> None:
        self._action = action

    def end(self) -> Stepped:
        try:
            obs, reward, terminated, truncated, _ = self._env.step(self._action)
        except Exception as problem:
            raise Raised(said(problem)) from problem
        before, self._resets = self._resets, self_resets(self._env)
        return Stepped(obs, reward, bool(terminated), bool(truncated), self._resets > before)

    def close(self) -> None:
        self._env.close()


def said(problem: Exception) -> str:
    """Somebody else's exception in one line, with the place it came from."""
    frame = traceback.extract_tb(problem.__traceback__)[-1]
    return f"{type(problem).__name__}: {problem} ({frame.filename}:{frame.lineno})"
