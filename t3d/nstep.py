"""[step 1] What becomes a row of the replay memory: one environment step, or several whose rewards are added up.

Shapes: S seeds, N environments a seed.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from t3d.replay import Flags, Transitions


class NStep:
    """Turns single steps into rows of up to n: r₀ + γ r₁ + … + γⁿ⁻¹ rₙ₋₁, and the observation n steps on.

    Every environment of every seed by itself. When an episode ends, all that is still under way comes out at once,
    shorter and shorter, with the true last observation; a row never reaches into the next episode.
    """

    def __init__(self, n: int, gamma: float, seeds: int, envs: int, obs_dim: int, action_dim: int) -> None:
        self.n, self.gamma = n, gamma
        # The last n steps, the newest behind; `pending` of them belong to the episode under way.
        self.obs = np.zeros((n, seeds, envs, obs_dim), np.float32)
        self.action = np.zeros((n, seeds, envs, action_dim), np.float32)
        self.reward = np.zeros((n, seeds, envs))
        self.pending = np.zeros((seeds, envs), np.int64)
        self._one = np.ones((seeds, envs))

    def add(
        self,
        obs: NDArray[Any],
        action: NDArray[Any],
        reward: NDArray[Any],
        next_obs: NDArray[Any],
        terminated: NDArray[Any],
        truncated: NDArray[Any],
        valid: Flags,
    ) -> Transitions:
        """One step of every environment, (S, N, …), in; what is complete, (S, N · n, …), out, the oldest first.

        A step that is not `valid` is no transition; if it is `truncated` the episode was lost there, and what was
        under way ends with the last transition before it.
        """
        if self.n == 1:
            return Transitions(obs, action, reward, next_obs, terminated, self._one, valid)
        for ring, new in ((self.obs, obs), (self.action, action), (self.reward, reward)):
            # Only where there is a transition: elsewhere the newest one stays the newest.
            mask = valid.reshape(valid.shape + (1,) * (new.ndim - valid.ndim))
            ring[:-1] = np.where(mask, ring[1:], ring[:-1])
            ring[-1] = np.where(mask, new, ring[-1])
        # Where there is none, `obs` is still what the last transition led to.
        next_obs = np.where(valid[..., None], next_obs, obs)
        self.pending = np.where(valid, np.minimum(self.pending + 1, self.n), self.pending)

        ended = terminated | truncated
        total = np.zeros_like(self.reward[0])
        rows: list[tuple[NDArray[Any], ...]] = []
        for span in range(1, self.n + 1):  # the row that began `span` steps ago
            total = self.reward[-span] + self.gamma * total
            full = valid & (self.pending >= span) & (span == self.n)
            # A row that was full has gone out already when an episode is lost after it.
            cut = ended & (self.pending >= span) & (valid | (span < self.n))
            filled = np.full(total.shape, float(span))
            rows.append((self.obs[-span], self.action[-span], total, next_obs, terminated & valid, filled, full | cut))
        self.pending[ended] = 0
        rows.reverse()
        return Transitions._make([*(np.concatenate(parts, axis=1) for parts in zip(*rows, strict=True)), None])
