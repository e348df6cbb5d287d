"""[steps 1 and 4] A replay memory for observations with images: every frame is stored once, in bytes.

A row holds no images but the numbers of the places where they lie, those of all frames that were seen at once: what
was seen is put together from them when it is sampled, and can never reach across an episode's border.

    places of obs's frames | numbers || action || places of next_obs's frames | numbers || reward | terminated | span

An episode of T steps has T + 1 frames, so there are places for a few more frames than rows. Where episodes are so short
that those do not suffice, a frame is overwritten together with all rows that need it: these are not drawn any more.

Shapes: S seeds, N environments a seed, K frames seen at once, F bytes of a frame, V numbers, B batch.
"""

from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from t3d.pixels.frame_stack import FrameStack
from t3d.replay import Flags, Frames, Replay, Ring, Transitions, Which, put

LARGEST = 2**24  # frames of a seed: their places are kept in float32, exactly


class FrameReplay(Replay):
    """[step 1] Transitions, frames, and which frames each environment has before its eyes."""

    def __init__(
        self,
        seeds: int,
        capacity: int,
        frame_stack: FrameStack,
        action_dim: int,
        envs: int,
        n_step: int = 1,
        augment: bool = False,
        **options: Any,
    ) -> None:
        numbers = len(frame_stack.numbers)
        super().__init__(seeds, capacity, frame_stack.stack + numbers, action_dim, numbers=numbers, **options)
        self.frame_stack, self.input_dim, self.frames_per_step = frame_stack, frame_stack.dim, 2 * envs
        # A shift of a twentieth of the image, as pixel agents do it: 4 of 84.
        self.shift = min(frame_stack.height, frame_stack.width) // 20 if augment else 0
        self.rows[:, :1] = 0  # read once before it is written, when a GPU is warmed up; what is read there is a place
        self.places = places_for(capacity, envs * (frame_stack.stack + n_step))
        self.apart = envs * (
            2 * frame_stack.stack + 3 * n_step
        )  # rows that may need older frames than a row before them
        # At least one more, for what is no frame and is never read; each seed's begin where a GPU likes to read.
        self.room = self.places + 16 - self.places % 16
        size = (seeds, self.room, frame_stack.frame_size)
        self.frames = torch.empty(size, dtype=torch.uint8, device=self.rows.device)
        self.begin = torch.zeros(seeds, dtype=torch.int64, device=self.rows.device)
        self.framed = np.zeros(seeds, np.int64)  # frames ever stored
        self.recent = np.zeros(
            (seeds, envs, frame_stack.stack), np.int64
        )  # before each environment's eyes; counted from 0
        self.needs = np.zeros((seeds, capacity), np.int64)  # the oldest frame of each row
        self.lost = np.zeros(seeds, np.int64)  # rows whose frames are overwritten: all before this one
        self.modulus = np.array([self.places])  # what rows that were saved counted places by

    # ---------------------------------------------------------------------------------------- what is seen

    def refer(self, obs: NDArray[Any]) -> NDArray[Any]:
        return self._rows(self.recent, obs)

    def look(
        self, obs: NDArray[Any], final_obs: NDArray[Any], next_obs: NDArray[Any], valid: Flags, which: Which
    ) -> tuple[NDArray[Any], NDArray[Any], Frames]:
        before, begun = self.refer(obs), which()
        after = self.recent.copy()
        numbers = self._numbered(np.concatenate([valid, begun], 1))
        moved, first = np.split(numbers, 2, 1)
        after[valid] = np.concatenate([after[valid][:, 1:], moved[valid][:, None]], 1)
        self.recent[:] = np.where(begun[..., None], first[..., None], after)
        pixels = np.concatenate([self._newest(final_obs), self._newest(next_obs)], 1)
        return before, self._rows(after, final_obs), Frames(pixels, self._where(numbers))

    def start(self, obs: NDArray[Any], begun: Flags) -> None:
        numbers = self._numbered(begun)
        self.recent[begun] = numbers[begun][:, None]
        device = self.rows.device
        new = torch.from_numpy(self._newest(obs)), torch.from_numpy(self._where(numbers))
        put(self.frames, new[1].to(device), new[0].to(device))

    def _numbered(self, wanted: Flags) -> NDArray[np.int64]:
        """The numbers of new frames, one for each that is `wanted` (S, M), and -1 for the others."""
        order = wanted.cumsum(1)
        numbers = np.where(wanted, self.framed[:, None] + order - 1, -1)
        self.framed += order[:, -1]
        return numbers

    def _where(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        seeds = np.arange(len(self.frames))[:, None] * self.room
        return np.where(numbers >= 0, numbers % self.places, self.places) + seeds

    def _newest(self, obs: NDArray[Any]) -> NDArray[np.uint8]:
        """The newest frame of observations (S, N, dim)."""
        end = self.frame_stack.stack * self.frame_stack.frame_size
        return obs[..., end - self.frame_stack.frame_size : end].astype(np.uint8)

    def _rows(self, frames: NDArray[np.int64], obs: NDArray[Any]) -> NDArray[np.float32]:
        """Frames by number (S, N, K) and the numbers of observations, as rows have them."""
        numbers = obs[..., self.frame_stack.stack * self.frame_stack.frame_size :]
        return np.concatenate([(frames % self.places).astype(np.float32), numbers], -1)

    # ---------------------------------------------------------------------------------------- what is stored

    def incoming(self, count: int, frames: int) -> dict[str, tuple[tuple[int, ...], type]]:
        seeds = len(self.rows)
        return {
            **super().incoming(count, frames),
            "begin": ((seeds,), np.int64),
            "frames": ((seeds, frames, self.frame_stack.frame_size), np.uint8),
            "frames_where": ((seeds, frames), np.int64),
        }

    def with_frames(self, into: dict[str, NDArray[Any]], rows: Transitions) -> None:
        if rows.frames is not None:
            into["frames"][:], into["frames_where"][:] = rows.frames
        oldest = self._number(into["rows"][..., 0])
        for k, of_seed in enumerate(rows.valid):
            new = oldest[k, of_seed]
            self.needs[k, np.arange(self.stored[k] - len(new), self.stored[k]) % self.capacity] = new

    def _number(self, place: NDArray[Any], places: int | None = None) -> NDArray[np.int64]:
        """The newest frame (S, …) that lay in a place, of so many places."""
        newest = (self.framed - 1).reshape(-1, *[1] * (place.ndim - 1))
        return newest - (newest - place.astype(np.int64)) % (places or self.places)

    def tell(self, into: dict[str, NDArray[Any]]) -> None:
        np.maximum(self.lost, self.stored - self.capacity, out=self.lost)
        for k, oldest in enumerate(self.framed - self.places):
            while True:
                rows = np.arange(self.lost[k], min(self.lost[k] + self.apart, self.stored[k]))
                gone = np.flatnonzero(self.needs[k, rows % self.capacity] < oldest)
                if not len(gone):
                    break
                self.lost[k] += gone[-1] + 1
        into["begin"][:], into["length"][:] = self.lost, self.stored - self.lost

    def nothing(self, into: dict[str, NDArray[Any]]) -> None:
        super().nothing(into)
        into["frames_where"][:] = self._where(np.full(into["frames_where"].shape, -1))

    def write(self, new: dict[str, Tensor]) -> None:
        super().write(new)
        self.begin.copy_(new["begin"])
        put(self.frames, new["frames_where"], new["frames"])

    # ---------------------------------------------------------------------------------------- what is sampled

    def drawn(self, bits: Tensor) -> Tensor:
        return (self.begin[:, None] + super().drawn(bits)) % self.capacity

    def seen(self, obs: Tensor, next_obs: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
        return self._seen(obs, bits >> 32), self._seen(next_obs, bits >> 48)  # the upper half is for this

    def _seen(self, rows: Tensor, bits: Tensor) -> Tensor:
        """Frames (S, B, K · F) in the place of their places, shifted at random if they are to be, and the numbers."""
        frame_stack, shift = self.frame_stack, self.shift
        places, numbers = rows[..., : frame_stack.stack].long(), rows[..., frame_stack.stack :]
        seeds = torch.arange(len(rows), device=rows.device)[:, None, None] * self.room
        frames, where = self.frames.flatten(0, 1), places + seeds
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

    # ---------------------------------------------------------------------------------------- what is kept

    def rings(self) -> list[Ring]:
        frames = [Ring(self.frames[k], self.framed[k : k + 1], self.places) for k in range(len(self.frames))]
        return super().rings() + frames

    def restored(self, under_way: NDArray[np.float32]) -> None:
        before, stack = int(self.modulus[0]), self.frame_stack.stack
        self._refuse_places(before, under_way)
        for k, stored in enumerate(self.stored):
            view, filled = self.seed(k), min(int(stored), self.capacity)
            if before != self.places:  # a run that was made longer has more room
                for first in (0, self.obs_dim + self.action_dim):
                    part = view.rows[:, :filled, first : first + stack]
                    part.copy_(torch.from_numpy(view._number(part.cpu().numpy(), before) % self.places))
                waiting = under_way[:, k : k + 1, :, :stack]
                waiting[:] = np.moveaxis(view._number(np.moveaxis(waiting, 1, 0), before), 0, 1) % self.places
            view.needs[:, :filled] = view._number(view.rows[:, :filled, 0].cpu().numpy())
        self.modulus[0] = self.places
        self.begin.copy_(torch.from_numpy(self.lost))
        self.length.copy_(torch.from_numpy(self.stored - self.lost))

    def _refuse_places(self, places: int, under_way: NDArray[np.float32]) -> None:
        """Refuse rows that name frames which there are not: they may come from anybody's file."""
        wrong = not 0 < places <= self.places or bool((self.lost > self.stored).any())
        for k, stored in enumerate(self.stored):
            filled = self.rows[k, : min(int(stored), self.capacity)]
            for rows in (filled, filled[:, self.obs_dim + self.action_dim :], torch.from_numpy(under_way[:, k])):
                named = rows[..., : self.frame_stack.stack]
                wrong |= bool(((named < 0) | (named >= self.places)).any())
        if wrong:
            raise ValueError("a row names a frame that the replay memory does not have")

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.frames.nbytes + self.needs.nbytes

    def counters(self) -> dict[str, NDArray[np.int64]]:
        return {
            **super().counters(),
            "framed": self.framed,
            "recent": self.recent,
            "lost": self.lost,
            "modulus": self.modulus,
        }

    def seed(self, k: int) -> Self:
        view = super().seed(k)
        for name in ("framed", "recent", "needs", "lost"):
            setattr(view, name, getattr(self, name)[k : k + 1])
        return view

    def tensors(self) -> dict[str, Tensor]:
        return {**super().tensors(), "frames": self.frames, "begin": self.begin}

    def with_tensors(self, given: dict[str, Tensor]) -> Self:
        other = super().with_tensors(given)
        other.frames, other.begin = given["frames"], given["begin"]
        return other


def places_for(capacity: int, under_way: int) -> int:
    """Places for frames: one for each row, some for the beginnings of episodes, and for what is not in a row yet."""
    return capacity + capacity // 50 + 2 * under_way + 2
