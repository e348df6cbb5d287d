"""Gymnasium environments, one by one, in this process or in workers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from t3d.envs.actions import ActionRange
from t3d.envs.batch import LONGEST_EPISODE, EpisodeSeed, Flags, Floats, Moved, refuse_unlearnable
from t3d.envs.slots import Lost, Raised, Slot
from t3d.envs.workers import Worker
from t3d.errors import T3DError
from t3d.layout import Layout, describe, flatten, size
from t3d.sight import Sight


class GymBatch:
    """N Gymnasium environments, each in its slot."""

    sight: Sight | None = None
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
        self.layout = observable(observation_space, name)
        self.obs_dim = size(self.layout)
        self.cut = 0
        self._slots, self._workers = slots, workers
        self._space, self._episode_seed = observation_space, episode_seed
        self._limit = time_limit or LONGEST_EPISODE
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
        for i in range(self.count):
            self._obs[i] = self._reset_one(i)
        return self._obs.copy()

    def step(self, actions: NDArray[Any], active: Flags | None = None) -> Moved:
        to_env = self.actions.to_env(np.asarray(actions))
        reward = np.zeros(self.count)
        terminated, truncated = np.zeros(self.count, bool), np.zeros(self.count, bool)
        valid = np.ones(self.count, bool) if active is None else active.copy()
        final_obs = self._obs.copy()
        playing = [int(i) for i in np.flatnonzero(valid)]
        for i in playing:
            self._slots[i].begin(to_env[i])
        for i in playing:
            self._length[i] += 1
            try:
                stepped = self._slots[i].end()
            except Raised as problem:
                raise T3DError(f"{self._where(i)}: step() raised {problem}") from problem
            except Lost:
                valid[i], truncated[i] = False, True
                continue
            if stepped.broke_down:
                # MuJoCo began anew by itself: what it returned is not what the action led to.
                self.cut += 1
                valid[i], truncated[i] = False, True
                continue
            reward[i] = self._checked_reward(i, stepped.reward)
            final_obs[i] = self._checked(i, stepped.obs)
            terminated[i] = stepped.terminated
            truncated[i] = stepped.truncated or (self._length[i] >= self._limit and not stepped.terminated)
        # Only now: a worker answers in the order it was asked.
        for i in playing:
            self._obs[i] = self._reset_one(i) if terminated[i] or truncated[i] else final_obs[i]
        return Moved(self._obs.copy(), reward, terminated, truncated, final_obs, valid)

    def close(self) -> None:
        for slot in self._slots:
            slot.close()
        for worker in self._workers:
            worker.close()

    def _reset_one(self, i: int) -> Floats:
        while True:
            # A new episode has a seed of its own, also after a loss.
            self._episode[i] += 1
            self._length[i] = 0
            try:
                return self._checked(i, self._slots[i].reset(self._episode_seed(i, self._episode[i])))
            except Lost:
                continue
            except Raised as problem:
                raise T3DError(f"{self._where(i)}: reset() raised {problem}") from problem

    def _checked(self, i: int, raw: Any) -> Floats:
        """The observation as a flat float32 row, if it can be learned from."""
        try:
            given = flatten(self.layout, raw)
        except Exception as problem:
            raise T3DError(f"{self._where(i)}: the observation is not in {self._space}: {problem}.") from problem
        with np.errstate(over="ignore"):
            obs: Floats = given.astype(np.float32)
        refuse_unlearnable(lambda _: self._where(i), obs[None])
        return obs

    def _checked_reward(self, i: int, raw: Any) -> float:
        """The reward as a number; an array of one number is one too."""
        given = np.asarray(raw)
        if given.size != 1 or given.dtype.kind not in "biuf":
            raise T3DError(f"{self._where(i)}: the reward is {raw!r}, not a number.")
        reward = float(given.reshape(()))
        refuse_unlearnable(lambda _: self._where(i), self._obs[:0], np.array([reward]))
        return reward

    def _where(self, i: int) -> str:
        return f"{self.name}, copy {i}, episode {self._episode[i]}, step {self._length[i]}"


def observable(space: spaces.Space[Any], name: str) -> Layout:
    """How its observations are laid out, if they can be learned from."""
    layout = describe(space, name)
    if size(layout) == 0:
        raise T3DError(f"{name} has an observation of no numbers: there is nothing to learn from.")
    return layout
