"""What happened in the current episodes: `resume` replays their actions, hindsight relabels their transitions.

Shapes: S seeds, N environments a seed, T steps.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from t3d.replay import Flags

Array = NDArray[np.float32]


class EpisodeLog:
    """Numbers of the last steps, (T, S, N, W), the newest last; 0 before an episode began.

    All environments step together, so a step is one write. The current episode of an environment is its last
    `lengths[k, i]` steps.
    """

    def __init__(self, lengths: NDArray[np.int64], width: int) -> None:
        """`lengths` (S, N) are those of the current episodes; whoever steps the environments updates them in place."""
        self._lengths = lengths
        self._kept, self._end = np.zeros((0, *lengths.shape, width), np.float32), 0

    @property
    def step_bytes(self) -> int:
        """Bytes of one step."""
        return 4 * int(np.prod(self._kept.shape[1:]))

    def resize(self, steps: int) -> None:
        """Hold `steps` steps of 0, to load saved ones into."""
        self._kept, self._end = np.zeros((steps, *self._kept.shape[1:]), np.float32), steps

    def add(self, steps: Sequence[tuple[Array, Flags]]) -> None:
        """Several steps (S, N, W), each where it is `valid` (S, N)."""
        for new, valid in steps:
            if self._end == len(self._kept):
                longest = max(int(self._lengths.max()), 1)
                kept = self._kept[-longest:]
                self._kept = np.concatenate([kept, np.zeros((max(128, longest), *new.shape), np.float32)])
                self._end = len(kept)
            self._kept[self._end] = new
            self._end += 1
            if np.count_nonzero(valid) < valid.size:  # an environment that did not step keeps its last steps last
                self._kept[1 : self._end, ~valid] = self._kept[: self._end - 1, ~valid]
                self._kept[0, ~valid] = 0

    def episode(self, k: int, i: int) -> Array:
        """The current episode of environment i of seed k: (steps, W), a view."""
        return self._kept[self._end - int(self._lengths[k, i]) : self._end, k, i]

    def forget(self, ended: Flags) -> None:
        """Clear the episodes (S, N) that ended."""
        self._kept[: self._end, ended] = 0

    def saved_parts(self) -> dict[str, Any]:
        """For state dicts: as many steps as the longest current episode has."""
        longest = min(int(self._lengths.max()), self._end)
        return {"steps": self._kept[self._end - longest : self._end]}
