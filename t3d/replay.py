"""[steps 1 and 4] The replay memory: a ring for each seed, on the learner's device.

A transition is one row of numbers, so storing is one write and sampling one gather:

    obs | action | next_obs | reward | terminated | span

`terminated` is 1 only where the episode truly ended: a row cut off by a time limit keeps 0 and its true last
observation. `span` is how many environment steps the row covers; the batch carries `discount` = γ^span.

Shapes: S seeds, N new rows, C capacity, B batch. rows (S, C + 1 or a few more, width); (S,) for how many were ever
stored, and how many of them are there now.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Flags = NDArray[np.bool_]
Which = Callable[[], Flags]
ONE = np.array(1)


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
        numbers: int | None = None,
    ) -> None:
        self.capacity, self.reward_scale = capacity, reward_scale
        self._capacity = np.array(capacity)  # beside arrays a number of Python's is made into one at every use
        # What is normalised of an observation stands at its end.
        numbers = obs_dim if numbers is None else numbers
        self.statistics = RunningStatistics.of(seeds, numbers, device) if normalize and numbers else None
        self.obs_dim, self.action_dim = obs_dim, action_dim
        self.input_dim = obs_dim  # numbers in an observation as networks see it
        self.frames_per_step = 0
        # One row more than the capacity: rows that are no transition are written there and never read.
        # Nor is any row read before it is written: `empty` leaves untouched memory to the system.
        # Four rows are a multiple of 16 bytes: so each seed's begin where a GPU likes to read.
        places = capacity + 4 - capacity % 4
        self.rows = torch.empty(seeds, places, row_width(obs_dim, action_dim), dtype=dtype, device=device)
        self.stored = np.zeros(seeds, np.int64)
        self.first = np.arange(seeds)[:, None] * places  # (S, 1) each seed's first row, counted over all
        self.length = torch.zeros(seeds, dtype=torch.int64, device=device)
        self._kept: tuple[tuple[int, ...], dict[str, NDArray[Any]], dict[str, Tensor]] | None = None

    def add(
        self,
        obs: ArrayLike,
        action: ArrayLike,
        reward: ArrayLike,
        next_obs: ArrayLike,
        terminated: ArrayLike,
        span: ArrayLike,
        valid: Flags,
    ) -> None:
        """[step 1] Store N rows a seed, those that are `valid` (S, N), over the oldest ones if full."""
        self.add_rows(Transitions(obs, action, reward, next_obs, terminated, span, valid))

    def add_rows(self, rows: "Transitions") -> None:
        """[step 1] The same, of rows that come in one piece."""
        into, new = self._desk(rows.valid.shape[1], 0 if rows.frames is None else rows.frames.where.shape[1])
        self.lay_out(into, rows)
        if self.rows.device.type != "cpu":
            new = {name: tensor.to(self.rows.device) for name, tensor in new.items()}
        self.write(new)

    def _desk(self, count: int, frames: int) -> tuple[dict[str, NDArray[Any]], dict[str, Tensor]]:
        """Arrays to lay so many rows out in, and the same as tensors; kept, because every step needs as many."""
        size = self.rows.data_ptr(), len(self.rows), count, frames
        if self._kept is None or self._kept[0] != size:
            shapes = self.incoming(count, frames)
            into: dict[str, NDArray[Any]] = {name: np.empty(shape, dtype) for name, (shape, dtype) in shapes.items()}
            new = {name: torch.from_numpy(part) for name, part in into.items()}
            if self.length.device.type == "cpu":  # counted where it is kept
                into["length"], new["length"] = self.length.numpy(), self.length
            self._kept = size, into, new
        return self._kept[1], self._kept[2]

    def incoming(self, count: int, frames: int) -> dict[str, tuple[tuple[int, ...], type]]:
        """The arrays that so many rows and frames are laid out in on their way to the device: shapes and types."""
        dtype: type = np.float32 if self.rows.dtype == torch.float32 else np.float64
        seeds = len(self.rows)
        return {
            "rows": ((seeds, count, self.rows.shape[-1]), dtype),
            "where": ((seeds, count), np.int64),
            "length": ((seeds,), np.int64),
        }

    def lay_out(self, into: dict[str, NDArray[Any]], rows: "Transitions") -> None:
        """Put N rows a seed together and count them: the rows themselves, and where they go."""
        pack(into["rows"], rows, self.obs_dim)
        valid, where = rows.valid, into["where"]
        if valid.shape[1] == 1 and np.count_nonzero(valid) == valid.size:  # the usual case, in fewer operations
            where[:] = self.stored[:, None] % self._capacity
            self.stored += ONE
        else:
            order = valid.cumsum(1)  # (S, N): 1 for the first valid row, 2 for the second, …
            where[:] = (self.stored[:, None] + order - 1) % self.capacity
            where[~valid] = self.capacity
            self.stored += order[:, -1]
        where += self.first  # counted over all seeds
        self.with_frames(into, rows)
        self.tell(into)

    def with_frames(self, into: dict[str, NDArray[Any]], rows: "Transitions") -> None:
        """The frames that come with rows, where there are images."""

    def nothing(self, into: dict[str, NDArray[Any]]) -> None:
        """Arrays that bring no row."""
        into["where"][:] = self.first + self.capacity
        self.tell(into)

    def tell(self, into: dict[str, NDArray[Any]]) -> None:
        """How many rows there are now."""
        np.minimum(self.stored, self._capacity, out=into["length"])

    def write(self, new: dict[str, Tensor]) -> None:
        """What was laid out, on the device, into its places."""
        put(self.rows, new["where"], new["rows"])
        self.note(new["rows"], new["where"])
        if new["length"] is not self.length:
            self.length.copy_(new["length"])

    def note(self, new: Tensor, where: Tensor) -> None:
        """Count the observations of rows that are stored."""
        if self.statistics is not None:
            numbers, places = self.statistics.mean.shape[-1], self.rows.shape[1]
            self.statistics.add(new[..., self.obs_dim - numbers : self.obs_dim], where % places != self.capacity)

    def refer(self, obs: NDArray[Any]) -> NDArray[Any]:
        """(S, N, …) the observations that are acted on now as rows have them: here, as they are."""
        return obs

    def start(self, obs: NDArray[Any], begun: Flags) -> None:
        """[step 1] First observations (S, N, …) of episodes that have `begun` without a step before them."""

    def look(
        self, obs: NDArray[Any], final_obs: NDArray[Any], next_obs: NDArray[Any], valid: Flags, which: Which
    ) -> tuple[NDArray[Any], NDArray[Any], "Frames | None"]:
        """One step of every environment, (S, N, …), as rows have it: `obs`, `final_obs`, and frames to store with them.

        `which` tells, if it is asked, where an episode has begun: there `next_obs` is its first observation.
        """
        return obs, final_obs, None

    def normalizer(self) -> "Normalizer | None":
        """What stands between an observation and the networks now, if anything does."""
        return None if self.statistics is None else self.statistics.normalizer()

    def sample(self, bits: Tensor, gamma: float) -> Batch:
        """[step 4] A batch drawn evenly from what is stored; `bits` are random bits for each row, (S, B).

        The lower 32 of them draw the row.
        """
        index = self.drawn(bits)
        base = torch.arange(len(index), device=index.device) * self.rows.shape[1]  # (S,)
        rows = self.rows.flatten(0, 1).index_select(0, (index + base[:, None]).flatten())
        sizes = [self.obs_dim, self.action_dim, self.obs_dim, 1, 1, 1]
        obs, action, next_obs, reward, terminated, span = torch.split(rows.view(*index.shape, -1), sizes, -1)
        discount = gamma ** span.squeeze(-1)
        normalizer = self.normalizer()
        obs, next_obs = (normalize(normalizer, part) for part in self.seen(obs, next_obs, bits))
        reward = reward.squeeze(-1) if self.reward_scale == 1 else self.reward_scale * reward.squeeze(-1)
        return Batch(obs, action, reward, next_obs, terminated.squeeze(-1), discount)

    def drawn(self, bits: Tensor) -> Tensor:
        """[step 4] Which rows, (S, B)."""
        # In integers: a float32 uniform cannot address ten million rows evenly.
        return ((bits & 0xFFFFFFFF) * self.length[:, None]) >> 32

    def seen(self, obs: Tensor, next_obs: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
        """[step 4] Observations (S, B, …) of a batch as they were seen: here, as rows have them."""
        return obs, next_obs

    def rings(self) -> list["Ring"]:
        """All that is stored bit by bit, for each seed: what checkpoints keep in segments."""
        return [Ring(self.rows[k], self.stored[k : k + 1], self.capacity) for k in range(len(self.rows))]

    def counters(self) -> dict[str, NDArray[np.int64]]:
        """What is counted on the host."""
        return {"stored": self.stored}

    def restored(self, under_way: NDArray[np.float32]) -> None:
        """The rings are full again, and everything else is as it was saved, also what is `under_way` to be a row."""
        self.length.copy_(torch.from_numpy(np.minimum(self.stored, self.capacity)))

    @property
    def nbytes(self) -> int:
        """Of everything that grows until the memory is full."""
        return self.rows.nbytes

    def seed(self, k: int) -> Self:
        """The memory of seed `k` alone; it shares its storage with this one."""
        view = self.with_tensors({name: tensor[k : k + 1] for name, tensor in self.tensors().items()})
        view.stored, view.first = self.stored[k : k + 1], self.first[:1]
        return view

    def tensors(self) -> dict[str, Tensor]:
        """All that is on the device, by name."""
        return {"rows": self.rows, "length": self.length, **(vars(self.statistics) if self.statistics else {})}

    def with_tensors(self, given: dict[str, Tensor]) -> Self:
        """The same memory with other tensors in it."""
        other = copy(self)
        other.rows, other.length = given["rows"], given["length"]
        if self.statistics is not None:
            other.statistics = RunningStatistics(**{name: given[name] for name in vars(self.statistics)})
        return other


class Ring(NamedTuple):
    """Transitions of which the newest are there: the i-th ever stored lies in place i modulo `capacity`."""

    rows: Tensor  # (at least capacity, …)
    stored: NDArray[np.int64]  # (1,) how many ever were
    capacity: int

    def since(self, first: int) -> Tensor:
        """A copy of the rows from the `first`-th on, in the order they were stored, on the device."""
        where = torch.arange(first, int(self.stored[0]), device=self.rows.device) % self.capacity
        return self.rows.index_select(0, where)

    def put(self, first: int, part: Tensor) -> None:
        """Transitions that `since` gave, back in their places; they go in from the oldest to the newest."""
        part, first = part[-self.capacity :], first + max(0, len(part) - self.capacity)
        where = torch.arange(first, first + len(part)) % self.capacity
        self.rows.index_copy_(0, where.to(self.rows.device), part.to(self.rows.device))
        self.stored[0] = first + len(part)


def put(storage: Tensor, where: Tensor, new: Tensor) -> None:
    """Transitions (S, N, …) into their places (S, N), counted over all seeds."""
    if storage.device.type == "cpu":  # NumPy does small things in less time than PyTorch
        places = storage.numpy().reshape(-1, *storage.shape[2:])
        if where.numel() == 1:  # and a single one in less still
            places[int(where)] = new.numpy()[0, 0]
        else:
            places[where.numpy()] = new.numpy()
    else:
        storage.flatten(0, 1).index_copy_(0, where.flatten(), new.flatten(0, 1))


@dataclass
class RunningStatistics:
    """Each seed's observations so far: how many (S, 1), their mean and their squared distances from it (S, O)."""

    count: Tensor
    mean: Tensor
    squares: Tensor

    @staticmethod
    def of(seeds: int, obs_dim: int, device: torch.device | str) -> "RunningStatistics":
        # In float64: a million squares added up in float32 are off by a per cent.
        shapes = ((seeds, 1), (seeds, obs_dim), (seeds, obs_dim))
        return RunningStatistics(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

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

    def normalizer(self) -> "Normalizer":
        """To mean 0 and deviation 1; as it is until there are two."""
        deviation = (self.squares / self.count.clamp(min=1) + 1e-8).sqrt()
        enough = self.count > 1
        shift = torch.where(enough, self.mean, 0.0)
        scale = torch.where(enough, 1 / deviation, 1.0)
        return Normalizer(shift.float()[:, None], scale.float()[:, None])


class Normalizer(NamedTuple):
    """(S, 1, O) what is taken from an observation, and what the rest is multiplied with."""

    shift: Tensor
    scale: Tensor


def normalize(normalizer: Normalizer | None, obs: Tensor) -> Tensor:
    """Observations (S, B, O) as the networks see them: within ±10, so that what was never seen stays within reason.

    Where there are frames in front of the numbers, they stay as they are.
    """
    if normalizer is None:
        return obs
    frames = obs.shape[-1] - normalizer.shift.shape[-1]
    normal = ((obs[..., frames:] - normalizer.shift) * normalizer.scale).clamp(-10, 10).to(obs.dtype)
    return torch.cat([obs[..., :frames], normal], -1) if frames else normal


class Transitions(NamedTuple):
    """Transitions on their way into the memory, (S, N, …), of which those that are `valid` will be stored."""

    obs: ArrayLike
    action: ArrayLike
    reward: ArrayLike
    next_obs: ArrayLike
    terminated: ArrayLike
    span: ArrayLike
    valid: Flags
    frames: "Frames | None" = None


class Frames(NamedTuple):
    """Frames on their way into the memory with them: (S, M, F) bytes, and (S, M) where they go."""

    pixels: NDArray[np.uint8]
    where: NDArray[np.int64]


def pack(into: NDArray[Any], rows: Transitions, obs_dim: int) -> None:
    """The parts of transitions side by side, (S, N, W)."""
    into[..., :obs_dim] = rows.obs
    into[..., obs_dim : -obs_dim - 3] = rows.action
    into[..., -obs_dim - 3 : -3] = rows.next_obs
    into[..., -3], into[..., -2], into[..., -1] = rows.reward, rows.terminated, rows.span


def unpack(row: NDArray[Any], obs_dim: int) -> Transitions:
    """The same the other way round: (S, N, W), all of them valid."""
    obs, action, next_obs = row[..., :obs_dim], row[..., obs_dim : -obs_dim - 3], row[..., -obs_dim - 3 : -3]
    valid = np.ones(row.shape[:2], bool)
    return Transitions(obs, action, row[..., -3], next_obs, row[..., -2], row[..., -1], valid)


def row_width(obs_dim: int, action_dim: int) -> int:
    """Numbers in a row."""
    return 2 * obs_dim + action_dim + 3
