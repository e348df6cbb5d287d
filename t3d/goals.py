"""[step 1] Hindsight: what an episode has reached is taken for what it was to reach, and its rows are stored once more.

A goal task observes a Dict of `observation`, `achieved_goal` and `desired_goal`, and can say what a step would have
been worth with another goal (`compute_reward`). When an episode ends, each of its rows is stored again K times, each
time with a goal that was achieved in the same step or later in the episode, and with the reward of that goal.

Shapes: L steps of an episode, K goals for each, W numbers in a row, O in an observation.
"""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from t3d import rng
from t3d.envs import Source
from t3d.errors import T3DError
from t3d.rng import Purpose

PARTS = ("observation", "achieved_goal", "desired_goal")


class Goals:
    """Where goals stand in the observations of a task, and the task itself, to ask what a goal is worth."""

    def __init__(self, source: Source, count: int) -> None:
        env, self.count = source.one(), count
        space = env.observation_space
        self._task: Any = env.unwrapped
        if not isinstance(space, spaces.Dict) or set(PARTS) - set(space.spaces):
            raise T3DError(
                f"--relabel is for goal tasks, whose observations have {', '.join(PARTS)}; {source.name} is none."
            )
        if not callable(getattr(self._task, "compute_reward", None)):
            raise T3DError(f"--relabel asks {source.name} what other goals are worth, and it has no compute_reward().")
        self._where: dict[str, slice] = {}
        end = 0
        for name, part in space.spaces.items():  # in the order in which gymnasium.spaces.flatten lays them out
            begin, end = end, end + spaces.flatdim(part)
            self._where[name] = slice(begin, end)
        self._goal = space["desired_goal"]
        self.obs_dim = end
        self.env = env

    def relabelled(self, rows: NDArray[np.float32], seed: int, counter: int) -> NDArray[np.float32]:
        """The rows (L, W) of an episode with other goals: (L · K, W). `counter` tells the seed's episodes apart."""
        length = len(rows)
        bits = rng.bits32(torch.tensor([seed]), Purpose.RELABELLING, counter, (length, self.count))[0].numpy()
        now = np.arange(length)[:, None]
        later = (now + (bits * (length - now) >> 32)).reshape(-1)  # (L · K,)
        new = np.repeat(rows, self.count, 0)
        begin_next = rows.shape[1] - 3 - self.obs_dim
        obs, next_obs = new[:, : self.obs_dim], new[:, begin_next:-3]
        goals = rows[later, begin_next:-3][:, self._where["achieved_goal"]]
        obs[:, self._where["desired_goal"]] = next_obs[:, self._where["desired_goal"]] = goals
        achieved = next_obs[:, self._where["achieved_goal"]]
        for row, reached, goal in zip(new, achieved, goals, strict=True):
            pair = self._shaped(reached), self._shaped(goal)
            row[-3] = float(self._task.compute_reward(*pair, {}))
            if hasattr(self._task, "compute_terminated"):
                row[-2] = float(self._task.compute_terminated(*pair, {}))
        if not np.isfinite(new).all():
            raise T3DError(
                "compute_reward() gave a reward that is not a finite number; nothing can be learned from that."
            )
        return new

    def _shaped(self, goal: NDArray[np.float32]) -> Any:
        """A goal as the task knows it."""
        return spaces.unflatten(self._goal, goal)
