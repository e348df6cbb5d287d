"""[steps 1 and 4] The frames of a replay memory with image observations: every frame is stored once, in bytes.

A row of the replay memory holds the places of its frames instead of their pixels, those of a whole frame stack: an
observation is gathered from them when it is sampled, and never reaches across the border of an episode.

    places of obs's frames | numbers || action || places of next_obs's frames | numbers || reward | terminated | span

An episode of T steps has T + 1 frames, so there are a few more places than rows. Where episodes are so short that those
do not suffice, a frame is overwritten together with all rows that need it: these rows are not sampled any more.

Shapes: S seeds, N environments a seed, M new frames, K frames in a stack, F bytes of a frame, V numbers, B batch.
"""

from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from t3d.pixels.frame_stack import FrameStack
from t3d.replay import Flags, Replay, Ring, Shapes, Transitions, put
from t3d.state_dict import NOT_SAVED

MAX_FRAMES = 2**24  # frames of a seed: rows keep their places in float32, exactly


class Frames(NamedTuple):
    """New frames that come with transitions: (S, M, F) bytes, and their places (S, M)."""

    pixels: NDArray[np.uint8]
    where: NDArray[np.int64]


@dataclass(init=False, eq=False)
class FrameStore:
    """[step 1] Frames, and which of them each environment sees now."""

    pixels: Tensor = field(metadata=NOT_SAVED)  # (S, room, F); checkpoints keep them in segments
    begin: Tensor = field(metadata=NOT_SAVED)  # (S,) the oldest row that can be sampled: `lost`, on the device
    needs: NDArray[np.int64] = field(metadata=NOT_SAVED)  # (S, C) the oldest frame of each row; follows from the rows
    stored: NDArray[np.int64]  # (S,) frames ever stored
    recent: NDArray[np.int64]  # (S, N, K) the numbers of the frames that each environment sees
    lost: NDArray[np.int64]  # (S,) rows whose frames are overwritten: all before this one
    modulus: NDArray[np.int64]  # (1,) the number of places that saved rows refer to

    def __init__(
        self, frame_stack: FrameStack, capacity: int, lanes: tuple[int, int], n_step: int, augment: bool, device: Any
    ) -> None:
        """For a memory of `capacity` rows a seed; `lanes` are how many seeds, and environments of each, there are."""
        seeds, envs = lanes
        self.frame_stack, self.frames_per_step, self.capacity = frame_stack, 2 * envs, capacity
        # A shift of a twentieth of the image, as is usual for agents that see pixels: 4 of 84.
        self.shift = min(frame_stack.height, frame_stack.width) // 20 if augment else 0
        self.places = places_for(capacity, envs * (frame_stack.stack + n_step))
        # Environments take turns in storing, so the oldest frames of rows do not ascend: so many rows are out of order.
        self.apart = envs * (2 * frame_stack.stack + 3 * n_step)
        # At least one place more, for what is no frame and is never read; each seed's frames begin aligned for a GPU.
        self.room = self.places + 16 - self.places % 16
        self.pixels = torch.empty((seeds, self.room, frame_stack.frame_size), dtype=torch.uint8, device=device)
        self.begin = torch.zeros(seeds, dtype=torch.int64, device=device)
        self.stored, self.lost = np.zeros(seeds, np.int64), np.zeros(seeds, np.int64)
        self.recent = np.zeros((seeds, envs, frame_stack.stack), np.int64)
        self.needs = np.zeros((seeds, capacity), np.int64)
        self.modulus = np.array([self.places])

    # ---------------------------------------------------------------------------------------- while collecting

    def refer(self, obs: NDArray[Any]) -> NDArray[Any]:
        """The observations (S, N, …) that environments show now, as rows hold them."""
        return self._rows(self.recent, obs)

    def start(self, obs: NDArray[Any], begun: Flags) -> None:
        """[step 1] Store the first observations (S, N, …) of episodes that have `begun` without a step before them."""
        numbers = self._numbered(begun)
        self.recent[begun] = numbers[begun][:, None]
        device = self.pixels.device
        new = torch.from_numpy(self._newest(obs)), torch.from_numpy(self._where(numbers))
        put(self.pixels, new[1].to(device), new[0].to(device))

    def step(self, transitions: Transitions, next_obs: NDArray[Any], begun: Flags) -> Transitions:
        """One step of every environment, as rows hold it, with its new frames.

        `next_obs` is what environments show after it; it is a first observation where an episode has `begun`.
        """
        final_obs, valid = np.asarray(transitions.next_obs), transitions.valid
        before = self.refer(np.asarray(transitions.obs))
        after = self.recent.copy()
        numbers = self._numbered(np.concatenate([valid, begun], 1))
        moved, first = np.split(numbers, 2, 1)
        after[valid] = np.concatenate([after[valid][:, 1:], moved[valid][:, None]], 1)
        self.recent[:] = np.where(begun[..., None], first[..., None], after)
        pixels = np.concatenate([self._newest(final_obs), self._newest(next_obs)], 1)
        frames = Frames(pixels, self._where(numbers))
        return transitions._replace(obs=before, next_obs=self._rows(after, final_obs), frames=frames)

    def _numbered(self, wanted: Flags) -> NDArray[np.int64]:
        """The numbers of new frames, one for each that is `wanted` (S, M), and -1 for the others."""
        order = wanted.cumsum(1)
        numbers = np.where(wanted, self.stored[:, None] + order - 1, -1)
        self.stored += order[:, -1]
        return numbers

    def _where(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        seeds = np.arange(len(self.pixels))[:, None] * self.room
        return np.where(numbers >= 0, numbers % self.places, self.places) + seeds

    def _newest(self, obs: NDArray[Any]) -> NDArray[np.uint8]:
        """The newest frame of observations (S, N, dim)."""
        end = self.frame_stack.stack * self.frame_stack.frame_size
        return obs[..., end - self.frame_stack.frame_size : end].astype(np.uint8)

    def _rows(self, frames: NDArray[np.int64], obs: NDArray[Any]) -> NDArray[np.float32]:
        """Frames by number (S, N, K) and the numbers of observations, as rows hold them."""
        numbers = obs[..., self.frame_stack.stack * self.frame_stack.frame_size :]
        return np.concatenate([(frames % self.places).astype(np.float32), numbers], -1)

    # ---------------------------------------------------------------------------------------- step 1: storing

    def staging_shapes(self, frames: int) -> Shapes:
        """What is staged of so many frames, beside the rows: shapes and types."""
        seeds = len(self.pixels)
        return {
            "begin": ((seeds,), np.int64),
            "frames": ((seeds, frames, self.frame_stack.frame_size), np.uint8),
            "frames_where": ((seeds, frames), np.int64),
        }

    def stage(self, into: dict[str, NDArray[Any]], new: Transitions, stored: NDArray[np.int64]) -> None:
        """Stage the frames that come with rows; `stored` (S,) counts the rows, these included."""
        if new.frames is not None:
            into["frames"][:], into["frames_where"][:] = new.frames
        oldest = self._number(into["rows"][..., 0])
        for k, valid in enumerate(new.valid):
            needed = oldest[k, valid]
            self.needs[k, np.arange(stored[k] - len(needed), stored[k]) % self.capacity] = needed
        self._stage_lengths(into, stored)

    def stage_nothing(self, into: dict[str, NDArray[Any]], stored: NDArray[np.int64]) -> None:
        """Stage no frame."""
        into["frames_where"][:] = self._where(np.full(into["frames_where"].shape, -1))
        self._stage_lengths(into, stored)

    def _stage_lengths(self, into: dict[str, NDArray[Any]], stored: NDArray[np.int64]) -> None:
        """Give up rows whose frames are overwritten; stage where the others begin, and how many there are."""
        np.maximum(self.lost, stored - self.capacity, out=self.lost)
        for k, oldest in enumerate(self.stored - self.places):
            while True:
                rows = np.arange(self.lost[k], min(self.lost[k] + self.apart, stored[k]))
                gone = np.flatnonzero(self.needs[k, rows % self.capacity] < oldest)
                if not len(gone):
                    break
                self.lost[k] += gone[-1] + 1
        into["begin"][:], into["length"][:] = self.lost, stored - self.lost

    def _number(self, place: NDArray[Any], places: int | None = None) -> NDArray[np.int64]:
        """The newest frame (S, …) that lay in a place, of so many places."""
        newest = (self.stored - 1).reshape(-1, *[1] * (place.ndim - 1))
        return newest - (newest - place.astype(np.int64)) % (places or self.places)

    def write(self, new: dict[str, Tensor]) -> None:
        """Write staged frames to their places on the device."""
        self.begin.copy_(new["begin"])
        put(self.pixels, new["frames_where"], new["frames"])

    # ---------------------------------------------------------------------------------------- step 4: sampling

    def gather(self, rows: Tensor, bits: Tensor) -> Tensor:
        """Observations (S, B, K · F + V) from places and numbers (S, B, K + V), shifted at random if augmented."""
        frame_stack, shift = self.frame_stack, self.shift
        places, numbers = rows[..., : frame_stack.stack].long(), rows[..., frame_stack.stack :]
        seeds = torch.arange(len(rows), device=rows.device)[:, None, None] * self.room
        frames, where = self.pixels.flatten(0, 1), places + seeds
        if shift:
            # Two numbers from 0 to 2 · shift; what comes in from beyond the border is the border again.
            down, across = (((part & 0xFF) * (2 * shift + 1)) >> 8 for part in (bits, bits >> 8))
            y, x = (
                (torch.arange(side, device=rows.device) + move[..., None] - shift).clamp(0, side - 1)
                for side, move in ((frame_stack.height, down), (frame_stack.width, across))
            )
            images = frames.view(-1, frame_stack.height, frame_stack.width, frame_stack.channels)
            pixels = images[where[..., None, None], y[:, :, None, :, None], x[:, :, None, None, :]]
        else:
            pixels = frames.index_select(0, where.flatten())
        return torch.cat([pixels.reshape(*rows.shape[:2], -1).to(rows.dtype), numbers], -1)

    # ---------------------------------------------------------------------------------------- checkpoints

    def rings(self) -> list[Ring]:
        """The frames of each seed: checkpoints keep them in segments."""
        return [Ring(self.pixels[k], self.stored[k : k + 1], self.places) for k in range(len(self.pixels))]

    def restored(self, memory: Replay, pending: NDArray[np.float32]) -> None:
        """Work out what follows from restored rows and counters; `pending` are observations of unfinished rows."""
        before, stack = int(self.modulus[0]), self.frame_stack.stack
        self._refuse_places(before, memory, pending)
        for k, stored in enumerate(memory.stored):
            view, rows = self.seed(k), memory.rows[k : k + 1, : min(int(stored), self.capacity)]
            if before != self.places:  # a run that was made longer has more room
                for first in (0, memory.obs_dim + memory.action_dim):
                    part = rows[..., first : first + stack]
                    part.copy_(torch.from_numpy(view._number(part.cpu().numpy(), before) % self.places))
                waiting = pending[:, k : k + 1, :, :stack]
                waiting[:] = np.moveaxis(view._number(np.moveaxis(waiting, 1, 0), before), 0, 1) % self.places
            view.needs[:, : rows.shape[1]] = view._number(rows[..., 0].cpu().numpy())
        self.modulus[0] = self.places
        self.begin.copy_(torch.from_numpy(self.lost))

    def _refuse_places(self, places: int, memory: Replay, pending: NDArray[np.float32]) -> None:
        """Refuse rows that refer to frames which do not exist: they may come from anybody's file."""
        wrong = not 0 < places <= self.places or bool((self.lost > memory.stored).any())
        for k, stored in enumerate(memory.stored):
            filled = memory.rows[k, : min(int(stored), self.capacity)]
            for rows in (filled, filled[:, memory.obs_dim + memory.action_dim :], torch.from_numpy(pending[:, k])):
                named = rows[..., : self.frame_stack.stack]
                wrong |= bool(((named < 0) | (named >= self.places)).any())
        if wrong:
            raise ValueError("a row names a frame that the replay memory does not have")

    def seed(self, k: int) -> Self:
        """The frames of seed `k` alone, a view."""
        view = copy(self)
        for name in ("pixels", "begin", "stored", "recent", "needs", "lost"):
            setattr(view, name, getattr(self, name)[k : k + 1])
        return view

    @property
    def nbytes(self) -> int:
        return self.pixels.nbytes + self.needs.nbytes


def places_for(capacity: int, pending: int) -> int:
    """Places for frames: one for each row, some for the beginnings of episodes, and for rows that are not full yet."""
    return capacity + capacity // 50 + 2 * pending + 2
