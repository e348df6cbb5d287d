"""The contract itself; the package's first lines say what each field means."""

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from t3d.envs.actions import ActionRange

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


class Moved(NamedTuple):
    """What one step of N environments gives."""

    obs: Floats
    reward: NDArray[np.float64]
    terminated: Flags
    truncated: Flags
    final_obs: Floats
    valid: Flags


class EnvBatch(Protocol):
    """N environments of one kind."""

    count: int
    obs_shape: tuple[int, ...]
    obs_dim: int
    actions: ActionRange

    def reset(self) -> Floats: ...

    def step(self, actions: NDArray[Any], active: Flags | None = None) -> Moved:
        """Rows that are not `active` stand still and come back as not valid."""
        ...

    def close(self) -> None: ...
