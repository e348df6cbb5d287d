"""The border between actions in [−1, 1], where everything inside lives, and the environment's own units."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from t3d.errors import T3DError


@dataclass(frozen=True)
class ActionRange:
    """The bounds of each action dimension by itself: `low` and `high` have the action's shape and dtype."""

    low: NDArray[Any]
    high: NDArray[Any]

    @staticmethod
    def of(space: spaces.Space[Any], env: str) -> "ActionRange":
        """The range of a Box; any other space is refused with the reason."""
        if not isinstance(space, spaces.Box):
            discrete = isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)
            why = "TD3 needs continuous ones (a Box)" if discrete else "only a Box is supported"
            raise T3DError(f"{env} has actions of the kind {space}; {why}.")
        if not np.issubdtype(space.dtype, np.floating):
            raise T3DError(f"{env} has whole numbers ({space.dtype}) as actions; TD3 needs continuous ones.")
        if space.low.size == 0:
            raise T3DError(f"{env} has an action of no dimensions: there is nothing to learn.")
        if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            raise T3DError(
                f"{env} has unbounded actions ({space}); TD3 needs finite bounds:"
                " wrap it in gymnasium.wrappers.RescaleAction or give the space a low and a high."
            )
        if not (space.low < space.high).all():
            raise T3DError(f"{env} has an action dimension whose low is not below its high ({space}).")
        return ActionRange(space.low.copy(), space.high.copy())

    @cached_property
    def _unit(self) -> bool:
        return bool((self.low == -1).all() and (self.high == 1).all())

    @property
    def dim(self) -> int:
        return int(self.low.size)

    def to_env(self, action: NDArray[Any]) -> NDArray[Any]:
        """(N, A) in [−1, 1] -> (N, *shape) in the environment's units; ±1 are exactly the bounds."""
        if action.dtype != self.low.dtype or action.ndim != self.low.ndim + 1:
            action = action.astype(self.low.dtype).reshape(-1, *self.low.shape)
        if self._unit:
            return action.copy()  # as they are, to the last bit; an environment may do to its own what it likes
        t = (action + 1) / 2
        # low + t · (high − low) would miss `high` by a rounding.
        mapped: NDArray[Any] = np.clip(self.low * (1 - t) + self.high * t, self.low, self.high)
        return mapped
