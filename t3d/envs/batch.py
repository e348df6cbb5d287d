"""The contract itself; the package's first lines say what each field means."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from t3d.envs.actions import ActionRange
from t3d.errors import T3DError
from t3d.layout import Layout
from t3d.sight import Sight

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
EpisodeSeed = Callable[[int, int], int]

# Where an environment declares no time limit, an episode is cut here: evaluations and whole episodes must end.
LONGEST_EPISODE = 10_000
LARGEST_REWARD = 1e30


class Moved(NamedTuple):
    """What one step of N environments gives."""

    obs: Floats
    reward: NDArray[np.float64]
    terminated: Flags
    truncated: Flags
    final_obs: Floats
    valid: Flags

    def begun(self, active: Flags | None) -> Flags:
        """(N,) whose `obs` is not what came before it, of those that were `active`: an episode began there."""
        return self.terminated | self.truncated | (~self.valid if active is None else active & ~self.valid)


class EnvBatch(Protocol):
    """N environments of one kind."""

    name: str
    count: int
    layout: Layout
    obs_dim: int
    actions: ActionRange
    together: bool  # whether they can only move all at once, those that are not active too
    sight: Sight | None  # how its observations are put together, where they have pictures

    @property
    def lost(self) -> int:
        """Worker processes that died or hung and were replaced."""
        ...

    @property
    def cut(self) -> int:
        """Episodes that were cut because a simulation broke down."""
        ...

    @property
    def episodes(self) -> list[int]:
        """(N,) the episode that each environment is in, counted from 0."""
        ...

    def reset(self, episodes: Sequence[int] | None = None) -> Floats:
        """The first observations of episode 0 of each, or of the `episodes` named."""
        ...

    def step(self, actions: NDArray[Any], active: Flags | None = None) -> Moved:
        """Rows that are not `active` stand still and come back as not valid."""
        ...

    def close(self) -> None: ...


def refuse_unlearnable(where: Callable[[int], str], obs: Floats, reward: NDArray[np.float64] | None = None) -> None:
    """Name the first observation or reward that is not a finite number: nothing could be learned from it."""
    flat = obs.ravel()
    if flat.dot(flat) < 1e30 and (reward is None or reward.dot(reward) < 1e30):
        return  # the usual case, told by two products: no number is large, let alone not finite
    if not np.isfinite(obs).all():
        row, column = np.argwhere(~np.isfinite(obs))[0]
        what = f"observation[{column}] is {obs[row, column]}"
        raise T3DError(f"{where(int(row))}: {what}; nothing can be learned from that.")
    if reward is not None and not (np.abs(reward) <= LARGEST_REWARD).all():
        row = int(np.flatnonzero(~(np.abs(reward) <= LARGEST_REWARD))[0])
        raise T3DError(f"{where(row)}: the reward is {reward[row]}; nothing can be learned from that.")
