"""A batch of Gymnasium environments that step one by one, in this process or in worker processes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from t3d.envs.actions import ActionRange
from t3d.envs.batch import (
    LARGEST_REWARD,
    LONGEST_EPISODE,
    MOST_LOSSES,
    EnvError,
    EpisodeSeed,
    Flags,
    Floats,
    StepResult,
    find_nonfinite,
    refuse_nonfinite,
)
from t3d.envs.slots import Lost, Raised, Slot, calling, items
from t3d.envs.workers import Worker, close_all
from t3d.errors import T3DError, shortened, shown
from t3d.layout import LARGEST, Layout, describe, flatten, size
from t3d.pixels.frame_stack import FrameStack

# Values of these types are used as they are; others are converted by `GymBatch._number` and `GymBatch._flag`.
REWARD_TYPES = (float, np.float64, np.float32)
FLAG_TYPES = (bool, np.bool_)


class GymBatch:
    """N Gymnasium environments, each in a slot."""

    frame_stack: FrameStack | None = None
    together = False

    def __init__(
        self,
        name: str,
        slots: Sequence[Slot],
        observation_space: spaces.Space[Any],
        actions: ActionRange,
        time_limit: int | None,
        episode_seed: EpisodeSeed,
        workers: Sequence[Worker] = (),
    ) -> None:
        self.name, self.count, self.actions = name, len(slots), actions
        self.layout = obs_layout(observation_space, name)
        self.obs_dim = size(self.layout)
        # The shape of an observation that is one array; None for other layouts.
        self._shape = tuple(self.layout["shape"]) if self.layout["kind"] == "array" else None
        self.cut, self.cut_failures, self.skip_losses = 0, False, False
        self.skipped: Flags | None = None
        self.failures: list[EnvError] = []
        self.worker_lost: Flags | None = None
        self.blamed: Flags | None = None
        self._slots, self._workers = slots, workers
        self._space, self._episode_seed = observation_space, episode_seed
        self._limit = time_limit or LONGEST_EPISODE
        self.longest_episode: int | None = self._limit
        self._episode, self._length = [-1] * self.count, [0] * self.count
        self._obs = np.zeros((self.count, self.obs_dim), np.float32)

    @property
    def lost(self) -> int:
        return sum(worker.replaced for worker in self._workers)

    @property
    def episodes(self) -> list[int]:
        return list(self._episode)

    def reset(self, episodes: Sequence[int] | None = None) -> Floats:
        if episodes is not None:
            self._episode = [episode - 1 for episode in episodes]
        self.skipped = None
        self._obs = self._reset([*range(self.count)], self._obs)
        return self._obs.copy()

    def step(self, actions: NDArray[Any], active: Flags | None = None) -> StepResult:
        env_actions = self.actions.to_env(np.asarray(actions))
        valid = np.ones(self.count, bool) if active is None else active.copy()
        ids: list[int] = np.flatnonzero(valid).tolist()
        terminated, truncated = np.zeros(self.count, bool), np.zeros(self.count, bool)
        result = StepResult(self._obs, np.zeros(self.count), terminated, truncated, self._obs.copy(), valid)
        self.worker_lost = self.blamed = None
        self.failures.clear()
        for i in ids:
            self._slots[i].step_async(env_actions[i])
        for i in ids:
            self._length[i] += 1
            try:
                returned, diverged = self._slots[i].step_wait()
                if not diverged:
                    self._store(i, returned, result)
                    continue
                self.cut += 1  # MuJoCo reset itself: the observation does not follow from the action
            except Lost as lost:
                self._note_loss(i, lost.own_call)
            except (Raised, EnvError) as problem:
                self._note_failure(i, problem, actions)
            valid[i], truncated[i] = False, True
        # Reset after all have stepped: a worker answers its calls in order.
        return self._start_episodes([i for i in ids if terminated[i] or truncated[i]], result)

    def _start_episodes(self, ended: list[int], result: StepResult) -> StepResult:
        """Reset the environments in `ended`; return `result` with the observations to act on next."""
        try:
            for failure in self.failures:
                self._remake(failure)
            self._obs = self._reset(ended, result.final_obs) if ended else result.final_obs.copy()
        except EnvError as failure:
            failure.moved = result._replace(obs=result.final_obs.copy())
            raise
        return result._replace(obs=self._obs.copy())

    def close(self) -> None:
        for slot in self._slots:
            slot.close()
        close_all(self._workers)

    def _note_loss(self, i: int, own_call: bool) -> None:
        if self.worker_lost is None or self.blamed is None:
            self.worker_lost, self.blamed = np.zeros((2, self.count), bool)
        self.worker_lost[i], self.blamed[i] = True, own_call

    def _note_failure(self, i: int, problem: Raised | EnvError, actions: NDArray[Any]) -> None:
        """Keep the failure of a step if failures are cut; raise it otherwise."""
        failure = self._failure(i, "step", problem)
        # Converted again: the environment may have changed the array that it got.
        failure.action, failure.obs = self.actions.to_env(np.asarray(actions))[i], self._obs[i].copy()
        if failure.call == "reset" or not self.cut_failures:
            raise failure from problem
        self.failures.append(failure)

    def _remake(self, failure: EnvError) -> None:
        assert failure.index is not None
        try:
            self._slots[failure.index].remake()
        except Lost:
            pass  # the new process has a new environment
        except (Raised, T3DError) as problem:
            what = f"{failure} It cannot be made again: {problem}"
            raise EnvError(what, index=failure.index, call="reset", whole=failure.whole) from problem

    def _reset(self, ended: list[int], obs: Floats) -> Floats:
        """Return a copy of `obs` with the first observations of new episodes. If a reset fails, no episode starts."""
        obs, before = obs.copy(), list(self._episode)
        try:
            for i in ended:
                obs[i] = self._reset_one(i)
        except EnvError:
            self._episode = before
            raise
        return obs

    def _reset_one(self, i: int) -> Floats:
        losses = 0
        while True:
            if self.skip_losses and losses >= MOST_LOSSES:
                self.skipped = np.zeros(self.count, bool) if self.skipped is None else self.skipped
                self.skipped[i] = True
                return np.zeros(self.obs_dim, np.float32)
            # Each attempt is a new episode with its own seed.
            self._episode[i] += 1
            self._length[i] = 0
            try:
                returned = self._slots[i].reset(self._episode_seed(i, self._episode[i]))
                parts = items(returned)
                if parts is None or len(parts) != 2:
                    raise self._wrong(i, f"reset() gave {shown(returned)}, not (observation, info)")
                return self._checked(i, parts[0])
            except Lost:
                losses += 1
            except (Raised, EnvError) as problem:
                raise self._failure(i, "reset", problem) from problem

    def _store(self, i: int, returned: Any, result: StepResult) -> None:
        """Check what `step` returned and write it into `result`."""
        parts = returned if type(returned) is tuple else items(returned)
        if parts is None or len(parts) != 5:
            given = shown(returned) if parts is None else f"a tuple of {len(parts)}"
            raise self._wrong(i, f"step() gave {given}, not (observation, reward, terminated, truncated, info)")
        raw, reward, terminated, truncated, _ = parts
        reward = float(reward) if type(reward) in REWARD_TYPES else self._number(i, reward)
        if not abs(reward) <= LARGEST_REWARD:
            refuse_nonfinite(lambda _: self._where(i), self._obs[:0], np.array([reward]))
        obs = self._checked(i, raw)
        terminated = bool(terminated) if type(terminated) in FLAG_TYPES else self._flag(i, "terminated", terminated)
        truncated = bool(truncated) if type(truncated) in FLAG_TYPES else self._flag(i, "truncated", truncated)
        result.final_obs[i], result.reward[i], result.terminated[i] = obs, reward, terminated
        result.truncated[i] = truncated or (self._length[i] >= self._limit and not terminated)

    def _checked(self, i: int, raw: Any) -> Floats:
        """Return an observation as a flat float32 row; raise EnvError if it is not in the space or not finite."""
        if type(raw) is np.ndarray and raw.shape == self._shape and raw.dtype.char in "fd":  # float32, float64
            with np.errstate(over="ignore"):
                obs: Floats = raw.astype(np.float32).reshape(-1)
        else:
            obs = self._flat(i, raw)
        if failure := find_nonfinite(lambda _: self._where(i), obs[None]):
            raise failure
        return obs

    def _flat(self, i: int, raw: Any) -> Floats:
        """`_checked` for any layout and any value."""
        try:
            given = calling(lambda: flatten(self.layout, raw))
        except Raised as problem:
            what = problem.__cause__ if isinstance(problem.__cause__, ValueError) else problem
            space = shortened(str(self._space), 200)
            raise self._wrong(i, f"the observation is not in {space}: {shortened(str(what), 500)}") from problem
        with np.errstate(over="ignore"):
            obs: Floats = given.astype(np.float32)
        return obs

    def _number(self, i: int, raw: Any) -> float:
        """Return a reward of any type as a number; an array with one element counts as one."""
        given = as_array(raw)
        if given.size != 1 or given.dtype.kind not in "biuf":
            raise self._wrong(i, f"the reward is {shown(raw)}, not a number")
        return float(given.reshape(()))

    def _flag(self, i: int, name: str, raw: Any) -> bool:
        """Return a flag of any type as a bool."""
        given = as_array(raw)
        if given.size != 1 or given.dtype.kind not in "biuf" or given.reshape(()) not in (0, 1):
            raise self._wrong(i, f"{name} is {shown(raw)}, not True or False")
        return bool(given.reshape(()))

    def _wrong(self, i: int, what: str) -> EnvError:
        return EnvError(f"{self._where(i)}: {what}.")

    def _failure(self, i: int, call: str, problem: Raised | EnvError) -> EnvError:
        """Return the EnvError for a failed call, with the circumstances."""
        sentence = f"{self._where(i)}: {call}() raised {problem}." if isinstance(problem, Raised) else str(problem)
        traceback = problem.traceback if isinstance(problem, Raised) else problem.whole
        return EnvError(
            sentence,
            index=i,
            call="reset" if isinstance(problem, EnvError) and problem.call == "reset" else call,
            episode=self._episode[i],
            length=self._length[i],
            obs=self._obs[i],
            whole=traceback,
        )

    def _where(self, i: int) -> str:
        return f"{self.name}, copy {i}, episode {self._episode[i]}, step {self._length[i]}"


def as_array(raw: Any) -> NDArray[Any]:
    """Convert an untrusted value to an array; return an object array if that fails."""
    try:
        return np.asarray(calling(lambda: np.asarray(raw)))
    except Raised:
        return np.array(None, object)


def obs_layout(space: spaces.Space[Any], name: str) -> Layout:
    """Return the layout of the observations; raise T3DError if they hold no numbers."""
    layout = describe(space, name)
    if size(layout) == 0:
        raise T3DError(f"{name} has an observation without numbers: there is nothing to learn from.")
    if size(layout) > LARGEST:
        raise T3DError(f"{name} has an observation of {size(layout):,} numbers; at most {LARGEST:,} are supported.")
    return layout
