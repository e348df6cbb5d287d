"""One environment of a batch, in this process or in a worker process, behind one interface."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import gymnasium
from numpy.typing import NDArray

from t3d.envs.worker import counts_resets, said, self_resets, whole_traceback
from t3d.errors import class_name, warn


class Lost(Exception):
    """The worker process of the environment died or hung and was replaced; reset the environment next.

    `own_call` is True if it ended in a call of this environment, False if in a call of another one in the process.
    """

    def __init__(self, own_call: bool = True) -> None:
        super().__init__()
        self.own_call = own_call


class Raised(Exception):
    """The environment raised an exception; the message names it and its location."""

    def __init__(self, sentence: str, traceback: str = "") -> None:
        super().__init__(sentence)
        self.traceback = traceback


class SlotResult(NamedTuple):
    """The unchecked return value of `step`, and whether MuJoCo reset a diverged simulation in it."""

    returned: Any
    diverged: bool


class Slot(Protocol):
    """One environment. `step_async` and `step_wait` are separate so that several environments can step in parallel."""

    def reset(self, seed: int) -> Any: ...
    def step_async(self, action: NDArray[Any]) -> None: ...
    def step_wait(self) -> SlotResult: ...
    def remake(self) -> None:
        """Replace a failed environment by a new one."""
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

    def step_async(self, action: NDArray[Any]) -> None:
        self._action = action

    def step_wait(self) -> SlotResult:
        try:
            returned = self._env.step(self._action)
        except KeyboardInterrupt:
            raise
        except BaseException as problem:
            raise raised(problem) from problem
        if not self._counts_resets:
            return SlotResult(returned, False)
        before, self._resets = self._resets, self_resets(self._env)
        return SlotResult(returned, self._resets > before)

    def remake(self) -> None:
        if self._make is not None:
            self.close()
            self._env = self._make()

    def close(self) -> None:
        if self._make is not None:
            close_env(self._env)


class RealEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A real environment. A second reset without a step between returns the first result: resets may be slow."""

    _reset_result: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self._reset_result is None:
            self._reset_result = self.env.reset(seed=seed, options=options)
        return self._reset_result

    def step(self, action: Any) -> Any:
        self._reset_result = None
        return self.env.step(action)


def calling(call: Callable[[], Any]) -> Any:
    """Call into an environment; convert every exception, SystemExit included, to `Raised`."""
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as problem:
        raise raised(problem) from problem


def items(returned: Any) -> tuple[Any, ...] | None:
    """The items of a tuple; None for another value. Methods of a subclass are not called: they may raise."""
    if type(returned) is tuple:
        return returned
    return tuple(tuple.__iter__(returned)) if issubclass(type(returned), tuple) else None


def raised(problem: BaseException) -> Raised:
    """An environment's exception as `Raised`."""
    return Raised(said(problem), whole_traceback(problem))


def close_env(env: Any) -> None:
    """Close an environment; warn if that fails, because nothing depends on it."""
    try:
        calling(env.close)
    except Raised as problem:
        warn(f"{class_name(getattr(env, 'unwrapped', env))}: close() raised {problem}")
