"""Where one environment of a batch lives: in this process, or in a worker. A batch only sees these calls."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import gymnasium
from numpy.typing import NDArray

from t3d.envs.worker import counts_resets, said, self_resets, whole_traceback
from t3d.errors import warn


class Lost(Exception):
    """The process that the environment lived in is gone; another one stands ready for a reset.

    `here` where it ended in a call of this environment, and not in one of another that lives in the same process.
    """

    def __init__(self, here: bool = True) -> None:
        super().__init__()
        self.here = here


class Raised(Exception):
    """The environment raised an exception; the text says which and where."""

    def __init__(self, sentence: str, whole: str = "") -> None:
        super().__init__(sentence)
        self.whole = whole  # the traceback


class Stepped(NamedTuple):
    """What `step` returned, whatever that is, and whether the simulation broke down in it."""

    returned: Any
    broke_down: bool


class Slot(Protocol):
    """One environment. `begin` and `end` are apart so that several can step at once."""

    def reset(self, seed: int) -> Any: ...
    def begin(self, action: NDArray[Any]) -> None: ...
    def end(self) -> Stepped: ...
    def remake(self) -> None:
        """Put a new environment in the place of one that failed."""
        ...

    def close(self) -> None: ...


class LocalSlot:
    """An environment in this process. Without `make`, it is neither remade nor closed."""

    def __init__(self, env: "gymnasium.Env[Any, Any]", make: "Callable[[], gymnasium.Env[Any, Any]] | None") -> None:
        self._env, self._make, self._resets = env, make, 0
        self._counts_resets = False  # only MuJoCo's data counts its own resets; looked up at each reset
        self._action: Any = None

    def reset(self, seed: int) -> Any:
        returned = calling(lambda: self._env.reset(seed=seed))
        self._counts_resets = counts_resets(self._env)
        self._resets = self_resets(self._env)
        return returned

    def begin(self, action: NDArray[Any]) -> None:
        self._action = action

    def end(self) -> Stepped:
        try:
            returned = self._env.step(self._action)
        except KeyboardInterrupt:
            raise
        except BaseException as problem:
            raise raised(problem) from problem
        if not self._counts_resets:
            return Stepped(returned, False)
        before, self._resets = self._resets, self_resets(self._env)
        return Stepped(returned, self._resets > before)

    def remake(self) -> None:
        if self._make is not None:
            self.close()
            self._env = self._make()

    def close(self) -> None:
        if self._make is not None:
            close_env(self._env)


class RealEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A real environment: a reset after which nothing was done is not done again, because it may take long there."""

    _begun: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self._begun is None:
            self._begun = self.env.reset(seed=seed, options=options)
        return self._begun

    def step(self, action: Any) -> Any:
        self._begun = None
        return self.env.step(action)


def calling(call: Callable[[], Any]) -> Any:
    """What an environment returns; whatever it raises, SystemExit too, is `Raised`."""
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as problem:
        raise raised(problem) from problem


def raised(problem: BaseException) -> Raised:
    """An environment's exception as `Raised`."""
    return Raised(said(problem), whole_traceback(problem))


def close_env(env: Any) -> None:
    """Close an environment; one that fails in it is warned of, because nothing depends on it."""
    try:
        calling(env.close)
    except Raised as problem:
        warn(f"{type(getattr(env, 'unwrapped', env)).__name__}: close() raised {problem}")
