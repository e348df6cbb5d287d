"""[steps 1 and 4] The replay memory: a ring for each seed, on the learner's device; n-step returns before it.

A transition is one row of numbers, so storing is one write and sampling one gather:

    obs | action | next_obs | reward | terminated | span

`terminated` is 1 only where the episode truly ended: a row cut off by a time limit keeps 0 and its true last
observation. `span` is how many environment steps the row covers; the batch carries `discount` = γ^span.

Shapes: S seeds, N new rows, C capacity, B batch. rows (S, C + 1 or a few more, width); (S,) for how many were ever
stored, and how many of them are there now.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
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

    def sample(self, bits: Tensor, gamma: float) -> "Batch":
        """[step 4] Itself: a batch that was drawn elsewhere stands in for the memory it came from."""
        return self


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
        normalize: bool = False,
        reward_scale: float = 1.0,
    ) -> None:
        self.capacity, self.reward_scale = capacity, reward_scale
        self.statistics = Statistics.of(seeds, obs_dim, device) if normalize else None
        self.obs_dim, self.action_dim = obs_dim, action_dim
        # One row more than the capacity: rows that are no transition are written there and never read.
        # Nor is any row read before it is written: `empty` leaves untouched memory to the system.
        # Four rows are a multiple of 16 bytes: so each seed's begin where a GPU likes to read.
        places = capacity + 4 - capacity % 4
        self.rows = torch.empty(seeds, places, row_width(obs_dim, action_dim), dtype=dtype, device=device)
        self.stored = np.zeros(seeds, np.int64)
        self.first = np.arange(seeds)[:, None] * places  # (S, 1) each seed's first row, counted over all
        self.length = torch.zeros(seeds, dtype=torch.int64, device=device)

    def add(
        self,
        obs: ArrayLike,
        action: ArrayLike,
        reward: ArrayLike,
        next_obs: ArrayLike,
        terminated: ArrayLike,
        span: ArrayLike,
        valid: NDArray[np.bool_],
    ) -> None:
        """[step 1] Store N rows a seed, those that are `valid` (S, N), over the oldest ones if full."""
        self.add_rows(Rows(obs, action, reward, next_obs, terminated, span, valid))

    def add_rows(self, rows: "Rows") -> None:
        """[step 1] The same, of rows that come in one piece."""
        dtype = np.float32 if self.rows.dtype == torch.float32 else float
        new = np.empty((*rows.valid.shape, self.rows.shape[-1]), dtype)
        where = self.lay_out(new, rows)
        there = torch.from_numpy(new).to(self.rows.device), torch.from_numpy(where).to(self.rows.device)
        if self.rows.device.type == "cpu":
            self.rows.numpy().reshape(-1, new.shape[-1])[where] = new
            self.note(*there)
        else:
            self.write(*there)
        self.length.copy_(torch.from_numpy(np.minimum(self.stored, self.capacity)))

    def lay_out(self, into: NDArray[Any], rows: "Rows") -> NDArray[np.int64]:
        """Put N rows a seed together in `into` (S, N, width) and count them; returns where they go, (S, N)."""
        # On the host: NumPy does small things in less time than PyTorch.
        into_row(into, rows, self.obs_dim)
        valid = rows.valid
        # (S, N): 1 for the first valid row, 2 for the second, …
        order = valid.astype(np.int64) if valid.shape[1] == 1 else valid.cumsum(1)
        where = (self.stored[:, None] + order - 1) % self.capacity
        where[~valid] = self.capacity
        self.stored += order[:, -1]
        counted_over_all_seeds: NDArray[np.int64] = where + self.first
        return counted_over_all_seeds

    def write(self, new: Tensor, where: Tensor) -> None:
        """Rows that were laid out (S, N, width), on the device, into their places (S, N)."""
        self.rows.flatten(0, 1).index_copy_(0, where.flatten(), new.flatten(0, 1))
        self.note(new, where)

    def note(self, new: Tensor, where: Tensor) -> None:
        """Count the observations of rows that are stored."""
        if self.statistics is not None:
            places = self.rows.shape[1]
            self.statistics.add(new[..., : self.obs_dim], where % places != self.capacity)

    def lens(self) -> "Lens | None":
        """What stands between an observation and the networks now, if anything does."""
        return None if self.statistics is None else self.statistics.lens()

    def sample(self, bits: Tensor, gamma: float) -> Batch:
        """[step 4] A batch drawn evenly from what is stored; `bits` are 32 random bits for each row, (S, B)."""
        # In integers: a float32 uniform cannot address ten million rows evenly.
        index = (bits * self.length[:, None]) >> 32  # (S, B)
        base = torch.arange(len(index), device=index.device) * self.rows.shape[1]  # (S,)
        rows = self.rows.flatten(0, 1).index_select(0, (index + base[:, None]).flatten())
        sizes = [self.obs_dim, self.action_dim, self.obs_dim, 1, 1, 1]
        obs, action, next_obs, reward, terminated, span = torch.split(rows.view(*index.shape, -1), sizes, -1)
        discount = gamma ** span.squeeze(-1)
        lens = self.lens()
        obs, next_obs = seen_through(lens, obs), seen_through(lens, next_obs)
        reward = reward.squeeze(-1) if self.reward_scale == 1 else self.reward_scale * reward.squeeze(-1)
        return Batch(obs, action, reward, next_obs, terminated.squeeze(-1), discount)

    def since(self, first: NDArray[np.int64]) -> list[Tensor]:
        """Copies of each seed's rows from the `first`-th (S,) on, in the order they were stored, on the device."""
        rows = []
        for k, (begin, end) in enumerate(zip(first.tolist(), self.stored.tolist(), strict=True)):
            where = torch.arange(begin, end, device=self.rows.device) % self.capacity
            rows.append(self.rows[k].index_select(0, where))
        return rows

    def put(self, first: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Rows that `since` gave, back in their places; segments go in from the oldest to the newest."""
        for k, (begin, part) in enumerate(zip(first, rows, strict=True)):
            part, begin = part[-self.capacity :], begin + max(0, len(part) - self.capacity)
            where = torch.arange(begin, begin + len(part)) % self.capacity
            self.rows[k].index_copy_(0, where.to(self.rows.device), part.to(self.rows.device))
            self.stored[k] = begin + len(part)
        self.length.copy_(torch.from_numpy(np.minimum(self.stored, self.capacity)))

    def seed(self, k: int) -> "Replay":
        """The memory of seed `k` alone; it shares its storage with this one."""
        view = self.with_tensors({name: tensor[k : k + 1] for name, tensor in self.tensors().items()})
        view.stored, view.first = self.stored[k : k + 1], self.first[:1]
        return view

    def tensors(self) -> dict[str, Tensor]:
        """All that is on the device, by name."""
        return {"rows": self.rows, "length": self.length, **(vars(self.statistics) if self.statistics else {})}

    def with_tensors(self, given: dict[str, Tensor]) -> "Replay":
        """The same memory with other tensors in it."""
        other = copy(self)
        other.rows, other.length = given["rows"], given["length"]
        if self.statistics is not None:
            other.statistics = Statistics(**{name: given[name] for name in vars(self.statistics)})
        return other


@dataclass
class Statistics:
    """Each seed's observations so far: how many (S, 1), their mean and their squared distances from it (S, O)."""

    count: Tensor
    mean: Tensor
    squares: Tensor

    @staticmethod
    def of(seeds: int, obs_dim: int, device: torch.device | str) -> "Statistics":
        # In float64: a million squares added up in float32 are off by a per cent.
        shapes = ((seeds, 1), (seeds, obs_dim), (seeds, obs_dim))
        return Statistics(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    def add(self, obs: Tensor, valid: Tensor) -> None:
        """Count those that are `valid` (S, N) of the observations (S, N, O)."""
        weight = valid.double()[..., None]
        new = weight.sum(1)  # (S, 1)
        mean = (obs * weight).sum(1) / new.clamp(min=1)
        squares = ((obs - mean[:, None]) ** 2 * weight).sum(1)
        share = new / (self.count + new).clamp(min=1)
        apart = mean - self.mean
        self.squares.add_(squares + apart**2 * self.count * share)
        self.mean.add_(apart * share)
        self.count.add_(new)

    def lens(self) -> "Lens":
        """To mean 0 and deviation 1; as it is until there are two."""
        deviation = (self.squares / self.count.clamp(min=1) + 1e-8).sqrt()
        enough = self.count > 1
        shift = torch.where(enough, self.mean, 0.0)
        scale = torch.where(enough, 1 / deviation, 1.0)
        return Lens(shift.float()[:, None], scale.float()[:, None])


class Lens(NamedTuple):
    """(S, 1, O) what is taken from an observation, and what the rest is multiplied with."""

    shift: Tensor
    scale: Tensor


def seen_through(lens: Lens | None, obs: Tensor) -> Tensor:
    """Observations (S, B, O) as the networks see them: within ±10, so that what was never seen stays within reason."""
    return obs if lens is None else ((obs - lens.shift) * lens.scale).clamp(-10, 10).to(obs.dtype)


class Rows(NamedTuple):
    """Transitions on their way into the memory, (S, N, …), of which those that are `valid` will be stored."""

    obs: ArrayLike
    action: ArrayLike
    reward: ArrayLike
    next_obs: ArrayLike
    terminated: ArrayLike
    span: ArrayLike
    valid: NDArray[np.bool_]


def into_row(into: NDArray[Any], rows: Rows, obs_dim: int) -> None:
    """The parts of transitions side by side, (S, N, W)."""
    into[..., :obs_dim] = rows.obs
    into[..., obs_dim : -obs_dim - 3] = rows.action
    into[..., -obs_dim - 3 : -3] = rows.next_obs
    into[..., -3], into[..., -2], into[..., -1] = rows.reward, rows.terminated, rows.span


def out_of_row(row: NDArray[Any], obs_dim: int) -> Rows:
    """The same the other way round: (S, N, W), all of them valid."""
    obs, action, next_obs = row[..., :obs_dim], row[..., obs_dim : -obs_dim - 3], row[..., -obs_dim - 3 : -3]
    valid = np.ones(row.shape[:2], bool)
    return Rows(obs, action, row[..., -3], next_obs, row[..., -2], row[..., -1], valid)


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
        valid: NDArray[np.bool_],
    ) -> Rows:
        """One step of every environment, (S, N, …), in; what is complete, (S, N · n, …), out, the oldest first.

        A step that is not `valid` is no transition; if it is `truncated` the episode was lost there, and what was
        under way ends with the last transition before it.
        """
        if self.n == 1:
            return Rows(obs, action, reward, next_obs, terminated, self._one, valid)
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
        rows: list[Rows] = []
        for span in range(1, self.n + 1):  # the row that began `span` steps ago
            total = self.reward[-span] + self.gamma * total
            full = valid & (self.pending >= span) & (span == self.n)
            # A row that was full has gone out already when an episode is lost after it.
            cut = ended & (self.pending >= span) & (valid | (span < self.n))
            filled = np.full(total.shape, float(span))
            rows.append(
                Rows(self.obs[-span], self.action[-span], total, next_obs, terminated & valid, filled, full | cut)
            )
        self.pending[ended] = 0
        rows.reverse()
        return Rows(*(np.concatenate(parts, axis=1) for parts in zip(*rows, strict=True)))


def row_width(obs_dim: int, action_dim: int) -> int:
    """Numbers in a row."""
    return 2 * obs_dim + action_dim + 3
