"""[step 1] Hindsight experience replay: stores transitions again with goals that the episode achieved.

A goal task observes a Dict of `observation`, `achieved_goal` and `desired_goal`, and computes the reward of a step for
any goal (`compute_reward`). When an episode ends, each transition is stored K more times, each time with a goal that
was achieved in the same step or later in the episode, and with the reward for that goal.

Shapes: L steps of an episode, K goals per step, W numbers in a row, O in an observation.
"""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from t3d import rng
from t3d.envs import EnvFactory
from t3d.envs.worker import said
from t3d.errors import T3DError
from t3d.layout import describe, leaves, size
from t3d.rng import Purpose

PARTS = ("observation", "achieved_goal", "desired_goal")


class Hindsight:
    """Relabels the rows of an episode; uses an environment of the task to compute rewards."""

    def __init__(self, factory: EnvFactory, count: int) -> None:
        self.env, self.count, self.name = factory.one(), count, factory.name
        space = self.env.observation_space
        if not isinstance(space, spaces.Dict) or set(PARTS) - set(space.spaces):
            raise T3DError(
                f"--her needs a goal task, whose observations have {', '.join(PARTS)}; {self.name} is not one."
            )
        self._goal = space["desired_goal"]
        if space["achieved_goal"].shape != self._goal.shape or not isinstance(self._goal, spaces.Box):
            raise T3DError(f"--her: achieved_goal and desired_goal of {self.name} must be arrays of the same shape.")
        if not self.env.has_wrapper_attr("compute_reward") or not callable(self._ask("compute_reward")):
            raise T3DError(f"--her computes rewards with compute_reward(), but {self.name} has none.")
        if any(leaf["kind"] == "image" for leaf in leaves(describe(space, self.name))):
            raise T3DError(f"--her needs numeric observations; {self.name} has images.")
        self._ends = self.env.has_wrapper_attr("compute_terminated")
        self._where: dict[str, slice] = {}
        end = 0
        for name, part in describe(space, self.name)["parts"].items():
            begin, end = end, end + size(part)
            self._where[name] = slice(begin, end)
        self.obs_dim = end
        self._compared = False  # whether compute_reward() was compared with the rewards of an episode

    def _ask(self, name: str) -> Any:
        return self.env.get_wrapper_attr(name)

    def relabeled(self, rows: NDArray[np.float32], seed: int, counter: int) -> NDArray[np.float32]:
        """Relabel the rows (L, W) of an episode: (L · K, W). `counter` must differ between the episodes of a seed."""
        if not self._compared:
            self._compare(rows)
            self._compared = True
        length = len(rows)
        bits = rng.bits32(torch.tensor([seed]), Purpose.HINDSIGHT, counter, (length, self.count))[0].numpy()
        now = np.arange(length)[:, None]
        later = (now + (bits * (length - now) >> 32)).reshape(-1)  # (L · K,)
        new = np.repeat(rows, self.count, 0)
        obs, next_obs = self._parts_of(new)
        goals = self._parts_of(rows)[1][later][:, self._where["achieved_goal"]]
        obs[:, self._where["desired_goal"]] = next_obs[:, self._where["desired_goal"]] = goals
        for row, reached, goal in zip(new, next_obs[:, self._where["achieved_goal"]], goals, strict=True):
            row[-3] = self._worth("compute_reward", reached, goal)
            if self._ends:
                row[-2] = self._worth("compute_terminated", reached, goal)
        return new

    def _parts_of(self, rows: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Views of the observations and the next observations."""
        return rows[:, : self.obs_dim], rows[:, rows.shape[1] - 3 - self.obs_dim : -3]

    def _compare(self, rows: NDArray[np.float32]) -> None:
        """Raise T3DError if compute_reward() does not reproduce the rewards of the episode."""
        obs, next_obs = self._parts_of(rows)
        for row, reached, goal in zip(
            rows, next_obs[:, self._where["achieved_goal"]], obs[:, self._where["desired_goal"]], strict=True
        ):
            again = self._worth("compute_reward", reached, goal)
            if not np.isclose(again, row[-3], rtol=1e-3, atol=1e-4):
                raise T3DError(
                    f"--her: a step of {self.name} had the reward {row[-3]:g}, but compute_reward() returns {again:g}"
                    " for the same goal: rewards for other goals would be wrong."
                )

    def _worth(self, name: str, reached: NDArray[np.float32], goal: NDArray[np.float32]) -> float:
        shape, dtype = self._goal.shape, self._goal.dtype
        try:
            given = np.asarray(
                self._ask(name)(reached.reshape(shape).astype(dtype), goal.reshape(shape).astype(dtype), {})
            )
        except Exception as problem:
            raise T3DError(f"{self.name}: {name}() raised {said(problem)}") from problem
        if given.size != 1 or given.dtype.kind not in "biuf" or not np.isfinite(given).all():
            raise T3DError(f"{self.name}: {name}() returned {given!r}, which is not a finite number.")
        return float(given.reshape(()))

    def close(self) -> None:
        self.env.close()
