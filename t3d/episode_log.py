"""What happened at the last steps of all environments, as far back as their episodes under way reach.

Shapes: S seeds, N environments a seed, T steps.
"""

import numpy as np
from numpy.typing import NDArray

from t3d.replay import Flags

Array = NDArray[np.float32]


class EpisodeLog:
    """Numbers of the last steps, (T, S, N, W), the newest behind; 0 where an episode had not begun.

    All environments move at once. So a step is written in one piece, wherever their episodes are, and an episode is
    what its environment has behind.
    """

    def __init__(self, seeds: int, envs: int, width: int) -> None:
        self._kept, self._end = np.zeros((0, seeds, envs, width), np.float32), 0

    @property
    def step_bytes(self) -> int:
        """Bytes of one step."""
        return 4 * int(np.prod(self._kept.shape[1:]))

    def rewind(self, steps: int) -> None:
        """Nothing but so many steps of 0."""
        self._kept, self._end = np.zeros((steps, *self._kept.shape[1:]), np.float32), steps

    def add(self, new: Array, valid: Flags, lengths: NDArray[np.int64]) -> None:
        """One step (S, N, W), where it is `valid` (S, N); `lengths` (S, N) are those of the episodes with it."""
        if self._end == len(self._kept):
            longest = int(lengths.max())
            kept = self._kept[-longest:]
            self._kept = np.concatenate([kept, np.zeros((max(128, longest), *new.shape), np.float32)])
            self._end = len(kept)
        self._kept[self._end] = new
        self._end += 1
        if np.count_nonzero(valid) < valid.size:  # who did not move has the same behind as before
            self._kept[1 : self._end, ~valid] = self._kept[: self._end - 1, ~valid]
            self._kept[0, ~valid] = 0

    def last(self, steps: int) -> Array:
        """(steps, S, N, W), not a copy."""
        return self._kept[self._end - steps : self._end]

    def forget(self, ended: Flags) -> None:
        """Episodes (S, N) that are over."""
        self._kept[: self._end, ended] = 0
