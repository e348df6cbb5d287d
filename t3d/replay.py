"""[steps 1 and 4] The replay memory: a ring for each seed, on the learner's device.

A transition is one row of numbers, so storing is one write and sampling one gather:

    obs | action | next_obs | reward | terminated | span

`terminated` is 1 only where the episode truly ended: a row cut off by a time limit keeps 0 and its true last
observation. `span` is how many environment steps the row covers; the batch carries `discount` = γ^span.

Image observations are in a `FrameStore` beside the rows (`frames`): a row refers to its frames by number.

Shapes: S seeds, N new rows, C capacity, B batch. rows (S, C + 1 or a few more, width); (S,) for how many were ever
stored, and how many of them can be sampled now.
"""

from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from t3d.normalizer import RunningStatistics, Scaling, normalize
from t3d.state_dict import NOT_SAVED

if TYPE_CHECKING:
    from t3d.pixels.frame_store import Frames, FrameStore

Flags = NDArray[np.bool_]
Shapes = dict[str, tuple[tuple[int, ...], type]]
ONE = np.array(1)


class Transitions(NamedTuple):
    """Transitions to store, (S, N, …); those that are not `valid` are left out."""

    obs: ArrayLike
    action: ArrayLike
    reward: ArrayLike
    next_obs: ArrayLike
    terminated: ArrayLike
    span: ArrayLike
    valid: Flags
    frames: "Frames | None" = None


@dataclass
class Batch:
    """[step 4] What one update reads: (S, B, O) or (S, B, A), and (S, B) for the scalars."""

    obs: Tensor
    action: Tensor
    reward: Tensor
    next_obs: Tensor
    terminated: Tensor
    discount: Tensor


@dataclass(init=False, eq=False)
class Replay:
    """[step 1] Fixed size, filled transition by transition, the oldest overwritten; each seed has its own ring.

    `tensor_options` are those of `torch.empty`: dtype and device.
    """

    rows: Tensor = field(metadata=NOT_SAVED)  # checkpoints keep them in segments
    length: Tensor = field(metadata=NOT_SAVED)  # (S,) rows that can be sampled; follows from `stored`
    stored: NDArray[np.int64]  # (S,) rows ever stored
    statistics: RunningStatistics | None  # of observations, where they are normalized
    frames: "FrameStore | None"

    def __init__(
        self,
        seeds: int,
        capacity: int,
        obs_dim: int,
        action_dim: int,
        *,
        normalize: bool = False,
        frames: "FrameStore | None" = None,
        **tensor_options: Any,
    ) -> None:
        self.capacity, self.obs_dim, self.action_dim, self.frames = capacity, obs_dim, action_dim, frames
        self._capacity = np.array(capacity)  # arithmetic with arrays would convert a Python int at every use
        # One row more than the capacity: rows that are no transition are written there and never read.
        # Nor is any row read before it is written: `empty` leaves untouched memory to the system.
        # Four rows are a multiple of 16 bytes, so each seed's rows begin aligned for a GPU.
        places = capacity + 4 - capacity % 4
        self.rows = torch.empty(seeds, places, row_width(obs_dim, action_dim), **tensor_options)
        self.length = torch.zeros(seeds, dtype=torch.int64, device=self.rows.device)
        self.stored = np.zeros(seeds, np.int64)
        self.first = np.arange(seeds)[:, None] * places  # (S, 1) each seed's first row, counted over all
        numbers = obs_dim if frames is None else len(frames.frame_stack.numbers)
        self.statistics = RunningStatistics.create(seeds, numbers, self.rows.device) if normalize and numbers else None
        if frames is not None:
            self.rows[:, :1] = 0  # a GPU's warm-up samples row 0 before it is written: its frame numbers must exist
        self._staging: dict[tuple[int, int], Staging] | None = {}

    @property
    def input_dim(self) -> int:
        """Numbers in an observation as the networks see it."""
        return self.obs_dim if self.frames is None else self.frames.frame_stack.dim

    # ---------------------------------------------------------------------------------------- step 1: storing

    def add(self, new: Transitions) -> None:
        """[step 1] Store N rows a seed, over the oldest ones if full."""
        assert self._staging is not None
        size = new.valid.shape[1], 0 if new.frames is None else new.frames.where.shape[1]
        staging = self._staging.get(size) or self._staging.setdefault(size, Staging(self, *size))
        self.stage(staging.arrays, new)
        self.write(staging.tensors if self.rows.is_cpu else staging.to(self.rows.device))

    def staging_shapes(self, count: int, frames: int) -> Shapes:
        """The arrays that so many rows and frames are staged in on their way to the device: shapes and types."""
        dtype: type = np.float32 if self.rows.dtype == torch.float32 else np.float64
        seeds = len(self.rows)
        shapes: Shapes = {
            "rows": ((seeds, count, self.rows.shape[-1]), dtype),
            "where": ((seeds, count), np.int64),
            "length": ((seeds,), np.int64),
        }
        return shapes if self.frames is None else {**shapes, **self.frames.staging_shapes(frames)}

    def stage(self, into: dict[str, NDArray[Any]], new: Transitions) -> None:
        """Pack N rows a seed, count them, and decide their places in the ring."""
        pack(into["rows"], new, self.obs_dim)
        valid, where = new.valid, into["where"]
        if valid.shape[1] == 1 and np.count_nonzero(valid) == valid.size:  # the usual case, in fewer operations
            where[:] = self.stored[:, None] % self._capacity
            self.stored += ONE
        else:
            order = valid.cumsum(1)  # (S, N): 1 for the first valid row, 2 for the second, …
            where[:] = (self.stored[:, None] + order - 1) % self.capacity
            where[~valid] = self.capacity
            self.stored += order[:, -1]
        where += self.first  # counted over all seeds
        if self.frames is None:
            np.minimum(self.stored, self._capacity, out=into["length"])
        else:
            self.frames.stage(into, new, self.stored)

    def stage_nothing(self, into: dict[str, NDArray[Any]]) -> None:
        """Stage no row: a write of fixed shape that changes nothing."""
        into["where"][:] = self.first + self.capacity
        if self.frames is None:
            np.minimum(self.stored, self._capacity, out=into["length"])
        else:
            self.frames.stage_nothing(into, self.stored)

    def write(self, new: dict[str, Tensor]) -> None:
        """Write staged rows to their places on the device, and count their observations."""
        put(self.rows, new["where"], new["rows"])
        if self.statistics is not None:
            numbers, places = self.statistics.mean.shape[-1], self.rows.shape[1]
            obs, valid = new["rows"][..., self.obs_dim - numbers : self.obs_dim], new["where"] % places != self.capacity
            self.statistics.add(obs, valid)
        if new["length"] is not self.length:
            self.length.copy_(new["length"])
        if self.frames is not None:
            self.frames.write(new)

    # ---------------------------------------------------------------------------------------- step 4: sampling

    def scaling(self) -> Scaling | None:
        """The current observation normalization, or None."""
        return None if self.statistics is None else self.statistics.scaling()

    def sample(self, bits: Tensor, gamma: float, reward_scale: float = 1.0) -> Batch:
        """[step 4] A batch drawn uniformly from what is stored; the lower 32 of the `bits` (S, B) draw the rows."""
        # In integers: a float32 uniform cannot address ten million rows evenly.
        index = ((bits & 0xFFFFFFFF) * self.length[:, None]) >> 32
        if self.frames is not None:
            index = (self.frames.begin[:, None] + index) % self.capacity
        base = torch.arange(len(index), device=index.device) * self.rows.shape[1]  # (S,)
        rows = self.rows.flatten(0, 1).index_select(0, (index + base[:, None]).flatten())
        sizes = [self.obs_dim, self.action_dim, self.obs_dim, 1, 1, 1]
        obs, action, next_obs, reward, terminated, span = torch.split(rows.view(*index.shape, -1), sizes, -1)
        discount = gamma ** span.squeeze(-1)
        if self.frames is not None:  # the upper bits draw the random shifts
            obs, next_obs = self.frames.gather(obs, bits >> 32), self.frames.gather(next_obs, bits >> 48)
        if (scaling := self.scaling()) is not None:
            obs, next_obs = normalize(obs, scaling), normalize(next_obs, scaling)
        reward = reward.squeeze(-1) if reward_scale == 1 else reward_scale * reward.squeeze(-1)
        return Batch(obs, action, reward, next_obs, terminated.squeeze(-1), discount)

    # ---------------------------------------------------------------------------------------- parts of it

    def seed(self, k: int) -> Self:
        """The replay memory of seed `k` alone, a view of this one."""
        view = copy(self)
        view.rows, view.length = self.rows[k : k + 1], self.length[k : k + 1]
        view.stored, view.first = self.stored[k : k + 1], self.first[:1]
        if self.statistics is not None:
            view.statistics = RunningStatistics(**{n: t[k : k + 1] for n, t in vars(self.statistics).items()})
        view.frames = None if self.frames is None else self.frames.seed(k)
        view._staging = {}
        return view

    def rings(self) -> list["Ring"]:
        """Everything that is stored item by item: checkpoints keep it in segments."""
        rows = [Ring(self.rows[k], self.stored[k : k + 1], self.capacity) for k in range(len(self.rows))]
        return rows if self.frames is None else rows + self.frames.rings()

    def counts(self) -> dict[str, NDArray[np.int64]]:
        """How many items were ever stored, by the names in a state dict."""
        counts = {"stored": self.stored}
        return counts if self.frames is None else {**counts, "frames.stored": self.frames.stored}

    def restored(self, pending: NDArray[np.float32]) -> None:
        """Work out what follows from the restored rings and counters; `pending` are observations of unfinished rows."""
        if self.frames is None:
            self.length.copy_(torch.from_numpy(np.minimum(self.stored, self.capacity)))
        else:
            self.frames.restored(self, pending)
            self.length.copy_(torch.from_numpy(self.stored - self.frames.lost))

    @property
    def nbytes(self) -> int:
        """Bytes of everything that grows until the memory is full."""
        return self.rows.nbytes + (0 if self.frames is None else self.frames.nbytes)


class Staging:
    """Host buffers for so many rows and frames, as arrays and as tensors; every step needs the same ones."""

    def __init__(self, memory: Replay, count: int, frames: int) -> None:
        shapes = memory.staging_shapes(count, frames)
        self.arrays: dict[str, NDArray[Any]] = {name: np.empty(shape, dtype) for name, (shape, dtype) in shapes.items()}
        self.tensors = {name: torch.from_numpy(part) for name, part in self.arrays.items()}
        if memory.length.is_cpu:  # counted in place
            self.arrays["length"], self.tensors["length"] = memory.length.numpy(), memory.length

    def to(self, device: torch.device) -> dict[str, Tensor]:
        return {name: tensor.to(device) for name, tensor in self.tensors.items()}


class Ring(NamedTuple):
    """Items of which the newest are kept: the i-th ever stored lies in place i modulo `capacity`."""

    rows: Tensor  # (at least capacity, …)
    stored: NDArray[np.int64]  # (1,) how many ever were
    capacity: int

    def since(self, first: int) -> Tensor:
        """A copy of the rows from the `first`-th on, in the order they were stored, on the device."""
        where = torch.arange(first, int(self.stored[0]), device=self.rows.device) % self.capacity
        return self.rows.index_select(0, where)

    def put(self, first: int, part: Tensor) -> None:
        """Put rows that `since` gave back in their places, from the oldest to the newest."""
        part, first = part[-self.capacity :], first + max(0, len(part) - self.capacity)
        where = torch.arange(first, first + len(part)) % self.capacity
        self.rows.index_copy_(0, where.to(self.rows.device), part.to(self.rows.device))
        self.stored[0] = first + len(part)


def put(storage: Tensor, where: Tensor, new: Tensor) -> None:
    """Write items (S, N, …) to their places (S, N), counted over all seeds."""
    if storage.is_cpu:  # NumPy has less overhead than PyTorch for small writes
        places = storage.numpy().reshape(-1, *storage.shape[2:])
        if where.numel() == 1:  # and a single row less still
            places[int(where)] = new.numpy()[0, 0]
        else:
            places[where.numpy()] = new.numpy()
    else:
        storage.flatten(0, 1).index_copy_(0, where.flatten(), new.flatten(0, 1))


def pack(into: NDArray[Any], rows: Transitions, obs_dim: int) -> None:
    """Write the parts of transitions side by side, (S, N, W)."""
    into[..., :obs_dim] = rows.obs
    into[..., obs_dim : -obs_dim - 3] = rows.action
    into[..., -obs_dim - 3 : -3] = rows.next_obs
    into[..., -3], into[..., -2], into[..., -1] = rows.reward, rows.terminated, rows.span


def unpack(row: NDArray[Any], obs_dim: int) -> Transitions:
    """The inverse of `pack`: (S, N, W), all of them valid."""
    obs, action, next_obs = row[..., :obs_dim], row[..., obs_dim : -obs_dim - 3], row[..., -obs_dim - 3 : -3]
    valid = np.ones(row.shape[:2], bool)
    return Transitions(obs, action, row[..., -3], next_obs, row[..., -2], row[..., -1], valid)


def row_width(obs_dim: int, action_dim: int) -> int:
    """Numbers in a row."""
    return 2 * obs_dim + action_dim + 3
