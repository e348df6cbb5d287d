"""Conversion of actions in [−1, 1], which T3D uses everywhere, to the units of the environment."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from t3d.errors import T3DError

DTYPES = ("float16", "float32", "float64")  # of an action


@dataclass(frozen=True)
class ActionRange:
    """The bounds of each action dimension. `low` and `high` have the shape and dtype of an action."""

    low: NDArray[Any]
    high: NDArray[Any]

    @staticmethod
    def of(space: spaces.Space[Any], env: str) -> "ActionRange":
        """Return the range of a Box; raise T3DError for any other space."""
        if not isinstance(space, spaces.Box):
            discrete = isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)
            why = "TD3 needs continuous ones (a Box)" if discrete else "only a Box is supported"
            raise T3DError(f"{env} has the action space {space}; {why}.")
        if not np.issubdtype(space.dtype, np.floating):
            raise T3DError(f"{env} has actions that are whole numbers ({space.dtype}); TD3 needs continuous ones.")
        if str(space.dtype) not in DTYPES:
            raise T3DError(f"{env} has actions of the type {space.dtype}; it must be {', '.join(DTYPES)}.")
        if space.low.size == 0:
            raise T3DError(f"{env} has an action with no dimensions: there is nothing to learn.")
        if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            raise T3DError(
                f"{env} has unbounded actions ({space}); TD3 needs finite bounds."
                " Set low and high of the space, or wrap the environment in gymnasium.wrappers.RescaleAction."
            )
        if not (space.low < space.high).all():
            raise T3DError(f"{env} has an action dimension whose low is not below its high ({space}).")
        return ActionRange(space.low.copy(), space.high.copy())

    @cached_property
    def _is_unit(self) -> bool:
        return bool((self.low == -1).all() and (self.high == 1).all())

    @property
    def dim(self) -> int:
        return int(self.low.size)

    def to_env(self, action: NDArray[Any]) -> NDArray[Any]:
        """Convert (N, A) in [−1, 1] to a new array (N, *shape) in the environment's units; ±1 give the exact bounds."""
        if action.dtype != self.low.dtype or action.ndim != self.low.ndim + 1:
            action = action.astype(self.low.dtype).reshape(-1, *self.low.shape)
        if self._is_unit:
            return action.copy()  # bit for bit; a copy, because the environment may write into it
        t = (action + 1) / 2
        # low + t · (high − low) would miss `high` by a rounding error.
        mapped: NDArray[Any] = np.clip(self.low * (1 - t) + self.high * t, self.low, self.high)
        return mapped
