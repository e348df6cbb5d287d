"""[step 1] n-step returns: turns single steps into transitions over up to n steps, before they are stored.

Shapes: S seeds, N environments a seed.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from t3d.replay import Flags, Transitions
from t3d.state_dict import NOT_SAVED


@dataclass(init=False, eq=False)
class NStep:
    """r₀ + γ r₁ + … + γⁿ⁻¹ rₙ₋₁, and the observation n steps on, for every environment by itself.

    When an episode ends, every pending step comes out at once, with the true last observation and a shorter span. A
    transition never reaches into the next episode.
    """

    n: int = field(metadata=NOT_SAVED)
    gamma: float = field(metadata=NOT_SAVED)
    obs: NDArray[Any]  # the last n steps, the newest last
    action: NDArray[Any]
    reward: NDArray[np.float64]
    pending: NDArray[np.int64]  # (S, N) how many of them belong to the current episode

    def __init__(self, n: int, gamma: float, lanes: tuple[int, int], obs_dim: int, action_dim: int) -> None:
        """`lanes` are how many seeds, and environments of each, there are."""
        self.n, self.gamma = n, gamma
        self.obs = np.zeros((n, *lanes, obs_dim), np.float32)
        self.action = np.zeros((n, *lanes, action_dim), np.float32)
        self.reward = np.zeros((n, *lanes))
        self.pending = np.zeros(lanes, np.int64)

    def add(self, new: Transitions, truncated: Flags) -> Transitions:
        """One step of every environment, (S, N, …), in; complete transitions, (S, N · n, …), out, the oldest first.

        A step that is not `valid` is no transition. If it is `truncated`, the episode was lost there, and the pending
        steps end with the last transition before it.
        """
        if self.n == 1:
            return new
        valid, terminated = new.valid, np.asarray(new.terminated)
        next_obs, ended = self._push(new), terminated | truncated
        total = np.zeros_like(self.reward[0])
        rows: list[tuple[NDArray[Any], ...]] = []
        for span in range(1, self.n + 1):  # the transition that began `span` steps ago
            total = self.reward[-span] + self.gamma * total
            full = valid & (self.pending >= span) & (span == self.n)
            # If the episode was lost at this step, the full transition came out one step ago.
            cut = ended & (self.pending >= span) & (valid | (span < self.n))
            filled = np.full(total.shape, float(span))
            rows.append((self.obs[-span], self.action[-span], total, next_obs, terminated & valid, filled, full | cut))
        self.pending[ended] = 0
        rows.reverse()
        joined = (np.concatenate(parts, axis=1) for parts in zip(*rows, strict=True))
        return Transitions._make([*joined, new.frames])

    def _push(self, new: Transitions) -> NDArray[Any]:
        """Append the valid steps; returns the observation that each environment shows after its newest one."""
        valid = new.valid
        for ring, part in ((self.obs, new.obs), (self.action, new.action), (self.reward, new.reward)):
            part = np.asarray(part)
            mask = valid.reshape(valid.shape + (1,) * (part.ndim - valid.ndim))
            ring[:-1] = np.where(mask, ring[1:], ring[:-1])
            ring[-1] = np.where(mask, part, ring[-1])
        self.pending = np.where(valid, np.minimum(self.pending + 1, self.n), self.pending)
        # Without a step, `obs` is still what the last transition led to.
        return np.where(valid[..., None], new.next_obs, new.obs)
