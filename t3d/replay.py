"""[steps 1 and 4] The replay memory: a ring for each seed, on the learner's device.

A transition is one row of numbers, so storing is one write and sampling one gather:

    obs | action | next_obs | reward | terminated | span

`terminated` is 1 only where the episode truly ended: a row cut off by a time limit keeps 0 and its true last
observation. `span` is how many environment steps the row covers; the batch carries `discount` = γ^span.

Shapes: S seeds, N new rows, C capacity, B batch. rows (S, C + 1, width), head and length (S,).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Batch:
    """[step 4] What one update reads: (S, B, O) or (S, B, A), and (S, B) for the scalars."""

    obs: Tensor
    action: Tensor
    reward: Tensor
    next_obs: Tensor
    terminated: Tensor
    discount: Tensor


class Replay:
    """[step 1] Fixed size, filled transition by transition, the oldest overwritten; for each seed by itself."""

    def __init__(
        self,
        seeds: int,
        capacity: int,
        obs_dim: int,
        action_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.capacity = capacity
        self.obs_dim, self.action_dim = obs_dim, action_dim
        # One row more than the capacity: rows that are no transition are written there and never read.
        # Nor is any row read before it is written: `empty` leaves untouched memory to the system.
        self.rows = torch.empty(seeds, capacity + 1, row_width(obs_dim, action_dim), dtype=dtype, device=device)
        self.head = torch.zeros(seeds, dtype=torch.int64, device=device)
        self.length = torch.zeros(seeds, dtype=torch.int64, device=device)

    def add(
        self,
        obs: Tensor,
        action: Tensor,
        reward: Tensor,
        next_obs: Tensor,
        terminated: Tensor,
        span: Tensor,
        valid: Tensor,
    ) -> None:
        """[step 1] Store N rows a seed, those that are `valid` (S, N), over the oldest ones if full."""
        scalars = torch.stack([reward, terminated, span], -1)  # (S, N, 3)
        new = torch.cat([obs, action, next_obs, scalars], -1)  # (S, N, width)
        order = valid.long().cumsum(1)  # (S, N): 1 for the first valid row, 2 for the second, …
        where = (self.head[:, None] + order - 1) % self.capacity
        where = torch.where(valid, where, self.capacity)
        self.rows.scatter_(1, where[..., None].expand_as(new), new)
        stored = order[:, -1]
        self.head.copy_((self.head + stored) % self.capacity)
        self.length.copy_((self.length + stored).clamp(max=self.capacity))

    def sample(self, bits: Tensor, gamma: float) -> Batch:
        """[step 4] A batch drawn evenly from what is stored; `bits` are 32 random bits for each row, (S, B)."""
        # In integers: a float32 uniform cannot address ten million rows evenly.
        index = (bits * self.length[:, None]) >> 32  # (S, B)
        base = torch.arange(len(index), device=index.device) * (self.capacity + 1)  # (S,)
        rows = self.rows.flatten(0, 1).index_select(0, (index + base[:, None]).flatten())
        sizes = [self.obs_dim, self.action_dim, self.obs_dim, 1, 1, 1]
        obs, action, next_obs, reward, terminated, span = torch.split(rows.view(*index.shape, -1), sizes, -1)
        discount = gamma ** span.squeeze(-1)
        return Batch(obs, action, reward.squeeze(-1), next_obs, terminated.squeeze(-1), discount)

    def seed(self, k: int) -> "Replay":
        """The memory of seed `k` alone; it shares its storage with this one."""
        view = object.__new__(Replay)
        view.capacity, view.obs_dim, view.action_dim = self.capacity, self.obs_dim, self.action_dim
        view.rows, view.head, view.length = (t[k : k + 1] for t in (self.rows, self.head, self.length))
        return view


def row_width(obs_dim: int, action_dim: int) -> int:
    """Numbers in a row."""
    return 2 * obs_dim + action_dim + 3
