"""Gymnasium environments, stepped one after another in this process."""

import traceback
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import gymnasium
import numpy as np
from gymnasium import error, spaces
from numpy.typing import NDArray

from t3d.envs.actions import ActionRange
from t3d.envs.batch import Flags, Floats, Moved
from t3d.errors import T3DError, nearest

# Where an environment declares no time limit, an episode is cut here: evaluations and whole episodes must end.
LONGEST_EPISODE = 10_000

Maker = Callable[[], "gymnasium.Env[Any, Any]"]
EpisodeSeed = Callable[[int, int], int]


def gym_maker(env: str | Maker, allowed_modules: tuple[str, ...] | None = None) -> tuple[str, Maker]:
    """A name to show and a function that makes one environment, from an id or from any callable.

    An id may name a module to import first, `module:Id`; `allowed_modules`, if given, says which may be.
    """
    if isinstance(env, gymnasium.Env):
        raise T3DError("this is one environment, and several are needed: give its id, or a function that makes one.")
    if not isinstance(env, str):
        name = getattr(env, "__name__", type(env).__name__)
        return name, _called(env, name)
    module, _, plain = env.rpartition(":")
    if module and allowed_modules is not None and module not in allowed_modules:
        raise T3DError(
            f"{env} would import the module {module}, which only a file asks for;"
            f" if you trust it, add --allow-module {module}."
        )
    return env, lambda: _from_id(module, plain)


def _called(make: Maker, name: str) -> Maker:
    made_before: WeakSet[gymnasium.Env[Any, Any]] = WeakSet()

    def checked() -> "gymnasium.Env[Any, Any]":
        try:
            made = make()
        except Exception as problem:
            raise _not_made(name, problem) from problem
        if not isinstance(made, gymnasium.Env):
            raise T3DError(f"{name}() gave a {type(made).__name__}, not a gymnasium.Env.")
        if made in made_before:
            raise T3DError(f"{name}() gave the same environment twice; it must make a new one each time.")
        made_before.add(made)
        return made

    return checked


def _from_id(module: str, plain: str) -> "gymnasium.Env[Any, Any]":
    env = f"{module}:{plain}" if module else plain
    spec = gymnasium.registry.get(plain)
    if spec is not None and str(spec.entry_point).startswith("gymnasium.envs.mujoco"):
        _quiet_mujoco()
    try:
        return gymnasium.make(env, disable_env_checker=True)
    except ModuleNotFoundError as problem:
        raise T3DError(f"{env}: there is no module {problem.name or module} to import.") from problem
    except error.DependencyNotInstalled as problem:
        how = "pip install 't3d[mujoco]'" if "mujoco" in str(problem).lower() else str(problem)
        raise T3DError(f"{env} needs a package that is not installed: {how}") from problem
    except (error.UnregisteredEnv, error.NamespaceNotFound) as problem:
        near = nearest(plain.split("/")[-1], gymnasium.registry) or nearest(plain, gymnasium.registry)
        raise T3DError(f"there is no environment {env}.{near}") from problem
    except Exception as problem:
        raise _not_made(env, problem) from problem


def _not_made(env: str, problem: Exception) -> T3DError:
    return T3DError(f"{env} cannot be made: {_said(problem)}")


def _said(problem: Exception) -> str:
    """Somebody else's exception in one line, with the place it came from."""
    frame = traceback.extract_tb(problem.__traceback__)[-1]
    return f"{type(problem).__name__}: {problem} ({frame.filename}:{frame.lineno})"


def _quiet_mujoco() -> None:
    """MuJoCo's deprecation warnings would go to the terminal and into MUJOCO_LOG.TXT, wherever one stands."""
    try:
        import mujoco
    except ImportError:
        return  # Gymnasium says what is missing
    mujoco.set_mju_user_warning(lambda message: None)


class GymBatch:
    """N copies of a Gymnasium environment."""

    def __init__(self, name: str, make: Maker, count: int, episode_seed: EpisodeSeed) -> None:
        self.name, self.count = name, count
        self._episode_seed = episode_seed
        first = make()
        try:
            if not isinstance(getattr(first, "observation_space", None), spaces.Space):
                raise T3DError(f"{name} has no observation_space.")
            self._space = first.observation_space
            self.obs_shape, self.obs_dim = _observation(self._space, name)
            self.actions = ActionRange.of(first.action_space, name)
        except BaseException:
            first.close()
            raise
        self._envs = [first, *(make() for _ in range(count - 1))]
        declared = None if first.spec is None else first.spec.max_episode_steps
        self._limit = declared or LONGEST_EPISODE
        self._episode = [-1] * count
        self._length = [0] * count
        self._obs = np.zeros((count, self.obs_dim), np.float32)

    def reset(self) -> Floats:
        for i in range(self.count):
            self._obs[i] = self._reset_one(i)
        return self._obs.copy()

    def step(self, actions: NDArray[Any], active: Flags | None = None) -> Moved:
        to_env = self.actions.to_env(np.asarray(actions))
        reward = np.zeros(self.count)
        terminated, truncated = np.zeros(self.count, bool), np.zeros(self.count, bool)
        valid = np.ones(self.count, bool) if active is None else active.copy()
        final_obs = self._obs.copy()
        for i in map(int, np.flatnonzero(valid)):
            self._length[i] += 1
            try:
                raw, scored, terminated[i], truncated[i], _ = self._envs[i].step(to_env[i])
            except Exception as problem:
                raise self._failed(i, "step", problem) from problem
            reward[i] = self._checked_reward(i, scored)
            truncated[i] |= self._length[i] >= self._limit and not terminated[i]
            final_obs[i] = self._checked(i, raw)
            ended = terminated[i] or truncated[i]
            self._obs[i] = self._reset_one(i) if ended else final_obs[i]
        return Moved(self._obs.copy(), reward, terminated, truncated, final_obs, valid)

    def close(self) -> None:
        for env in self._envs:
            env.close()

    def _reset_one(self, i: int) -> Floats:
        self._episode[i] += 1
        self._length[i] = 0
        try:
            raw, _ = self._envs[i].reset(seed=self._episode_seed(i, self._episode[i]))
        except Exception as problem:
            raise self._failed(i, "reset", problem) from problem
        return self._checked(i, raw)

    def _checked(self, i: int, raw: Any) -> Floats:
        """The observation as a flat float32 row, if it can be learned from."""
        box = isinstance(self._space, spaces.Box)
        try:
            given = np.asarray(raw if box else spaces.flatten(self._space, raw))
        except Exception as problem:
            raise T3DError(f"{self._where(i)}: the observation is not in {self._space} ({problem}).") from problem
        if box and given.shape != self.obs_shape:
            raise T3DError(f"{self._where(i)}: the observation has the shape {given.shape}, not {self.obs_shape}.")
        if given.dtype.kind not in "biuf" or given.size != self.obs_dim:
            raise T3DError(f"{self._where(i)}: the observation is not in {self._space}: it is {given!r}.")
        with np.errstate(over="ignore"):
            obs: Floats = given.astype(np.float32).reshape(-1)
        if not np.isfinite(obs).all():
            bad = int(np.flatnonzero(~np.isfinite(obs))[0])
            raise T3DError(f"{self._where(i)}: observation[{bad}] is {obs[bad]}; nothing can be learned from that.")
        return obs

    def _checked_reward(self, i: int, raw: Any) -> float:
        """The reward as a number; an array of one number is one too."""
        given = np.asarray(raw)
        if given.size != 1 or given.dtype.kind not in "biuf":
            raise T3DError(f"{self._where(i)}: the reward is {raw!r}, not a number.")
        reward = float(given.reshape(()))
        if not abs(reward) <= 1e30:
            raise T3DError(f"{self._where(i)}: the reward is {reward}; nothing can be learned from that.")
        return reward

    def _where(self, i: int) -> str:
        return f"{self.name}, copy {i}, episode {self._episode[i]}, step {self._length[i]}"

    def _failed(self, i: int, call: str, problem: Exception) -> T3DError:
        return T3DError(f"{self._where(i)}: {call}() raised {_said(problem)}")


def _observation(space: spaces.Space[Any], name: str) -> tuple[tuple[int, ...], int]:
    """The shape of an observation and how many numbers it has once flat."""
    if isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) >= 2:
        raise T3DError(f"{name} shows images {space.shape}; only vectors of numbers can be learned from yet.")
    if not space.is_np_flattenable:
        raise T3DError(f"{name} has observations of the kind {space}, which cannot be made into a vector.")
    size = spaces.flatdim(space)
    if size == 0:
        raise T3DError(f"{name} has an observation of no numbers: there is nothing to learn from.")
    return (space.shape if isinstance(space, spaces.Box) else (size,)), size
