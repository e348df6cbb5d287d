"""Checkpoints: the state of a run on disk, from which it resumes bit for bit after any crash.

    checkpoints/step-N/state.safetensors    the state of the run without the rows of the replay memory
    checkpoints/step-N/manifest.json        written last; a checkpoint without it does not count
    replay/step-N.safetensors               a segment: the rows that were new at step N, never changed
    replay/step-N.safetensors.parity        parity data that repairs the segment

The manifest lists every file, including the segments of the replay memory, with its size and SHA-256. A checkpoint
writes new rows only. Nothing is overwritten: a checkpoint is removed once two newer ones are complete, and a segment
once no checkpoint needs it. A background thread writes one checkpoint at a time while training continues.

A run folder is untrusted input. T3D removes only regular files with the names above, and only if a manifest with a
valid checksum lists them or an interrupted write left them. It checks sizes before it reads a file.

A ring holds the rows or the frames of one seed. Its items are numbered from 0 over the whole run; a segment holds the
items from `first` to `last` of each ring.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from t3d import files
from t3d.errors import T3DError
from t3d.files import Folder
from t3d.replay import Replay, Ring
from t3d.runs import manifest as manifests
from t3d.runs.folder import Run
from t3d.runs.manifest import (
    SEGMENT_NAME,
    STATE_NAME,
    Manifest,
    Segment,
    candidates,
    most_manifest,
    read_manifest,
    refuse_misfit,
    steps_in,
)
from t3d.runs.metrics import Mark
from t3d.runs.parity import parity, parity_size, repaired

KEPT = 2  # checkpoints to keep: the older one is used if the newest is damaged
PARITY = ".parity"  # the suffix of a segment's parity file
MOST_SEGMENTS = 64  # more are merged,
LARGE = 2**29  # into at most twice as many bytes, because a merge loads them into memory


@dataclass
class Snapshot:
    """A copy of a run at one step, to be written while training continues."""

    step: int
    state: dict[str, Tensor]
    rows: list[Tensor]  # of each ring, the new ones
    first: list[int]
    last: list[int]
    capacities: list[int]
    mark: Mark
    copied: Any  # a CUDA event after the copies, or None

    def to_host(self) -> None:
        """Wait for the copies, and for nothing that was started later."""
        if self.copied is not None:
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                torch.cuda.current_stream().wait_event(self.copied)
                self.state = {name: tensor.cpu() for name, tensor in self.state.items()}
                self.rows = [tensor.cpu() for tensor in self.rows]


class Checkpoints:
    """The checkpoints of a run folder. `say` gets messages about repairs and skipped checkpoints."""

    def __init__(
        self,
        run: Run,
        about: dict[str, Any],
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.run, self.metrics, self.about, self.say = run, run.log, about, say
        self.segments: list[Segment] = []
        self._most = 0  # the size limit of a manifest in bytes
        self._hashes: dict[tuple[int, ...], str] = {}  # of the files read by `newest`
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        for name in ("checkpoints", "replay"):
            with self._folder(name):
                pass

    @contextmanager
    def _folder(self, name: str, inside: str | None = None) -> Iterator[Folder]:
        """Open a folder of the run, or a subfolder of it; make it if it does not exist."""
        with self.run.folder() as run, run.inside(name, make=True) as folder:
            if inside is None:
                yield folder
            else:
                with folder.inside(inside, make=True) as inner:
                    yield inner

    # ------------------------------------------------------------------------------------------ writing

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written; raises the error of one that failed."""
        if self._writing is not None and self._writing.done():
            done, self._writing = self._writing, None
            done.result()
        return self._writing is not None

    def save(self, step: int, state: Mapping[str, Tensor], memory: Replay) -> None:
        """Copy the state now, and write it while training continues."""
        self.wait()
        mark = self.metrics.sync()
        # Copy on the device: training waits for it, and a copy to the host is slow.
        copy = {name: tensor.detach().clone() for name, tensor in state.items()}
        rings = memory.rings()
        self._most = most_manifest(len(rings))
        stored, capacities = [int(ring.stored[0]) for ring in rings], [ring.capacity for ring in rings]
        self._drop_segments(stored, capacities)
        written_up_to = self.segments[-1].last if self.segments else [0] * len(rings)
        # Older rows may be overwritten already.
        first = [max(*numbers) for numbers in zip(written_up_to, np.subtract(stored, capacities).tolist(), strict=True)]
        rows = [ring.since(begin) for ring, begin in zip(rings, first, strict=True)]
        copied: Any = None
        if memory.rows.is_cuda:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        snapshot = Snapshot(step, copy, rows, first, stored, capacities, mark, copied)
        self._writing = self._worker.submit(self._write, snapshot)

    def _drop_segments(self, stored: list[int], capacities: list[int]) -> None:
        """Drop segments without current rows. If another one is missing, drop all: all rows are written again."""
        self.segments = [part for part in self.segments if any(_needed(part, stored, capacities))]
        with self._folder("replay") as replay:
            for part in self.segments:
                if replay.kind(part.file) != "file" or replay.size(part.file) != part.size:
                    self.say(
                        f"{replay.path / part.file} was removed or changed during the run:"
                        " all rows of the replay memory are written again."
                    )
                    self.segments = []
                    return

    def wait(self) -> None:
        """Wait until the checkpoint is written; raise the error of one that failed."""
        if self._writing is not None:
            done, self._writing = self._writing, None
            done.result()

    def close(self) -> None:
        self._worker.shutdown(wait=True)

    def _write(self, new: Snapshot) -> None:
        new.to_host()
        segments, step = list(self.segments), new.step
        with self._folder("replay") as replay:
            if new.first != new.last:
                name = _free_name(replay, f"step-{step}")
                segments.append(_write_segment(replay, name, dict(enumerate(new.rows)), new.first, new.last))
            if len(segments) > MOST_SEGMENTS:
                segments = self._merge(replay, step, segments)
        with self._folder("checkpoints", f"step-{step}") as folder:
            # A run may be saved twice at one step: replacing the manifest switches to the new state file atomically.
            name = _free_name(folder, "state")
            saved = folder.write(name, files.pack(new.state))
            if folder.sha256(name) != saved.sha256:
                raise T3DError(f"{folder.path / name}: reading it back gave other data than were written.")
            about = saved, segments, new.capacities, new.mark, self.about
            # The checkpoint is committed here: with its manifest it exists, without one there is none.
            folder.write_json(manifests.NAME, Manifest(self.run.identity, step, name, *about).to_json())
        with self._folder("checkpoints") as checkpoints:
            checkpoints.sync()
        self.segments = segments
        self._remove_old()

    def _merge(self, replay: Folder, step: int, segments: list[Segment]) -> list[Segment]:
        """Merge adjacent segments of the older half that are not large into one file."""
        begin = next((i for i, part in enumerate(segments) if part.size < LARGE), 0)
        end = begin + 1
        while end < len(segments) // 2 and segments[end].first == segments[end - 1].last and segments[end].size < LARGE:
            if sum(part.size for part in segments[begin : end + 1]) > 2 * LARGE:
                break
            end += 1
        if end - begin < 2:
            return segments
        old = segments[begin:end]
        parts = [_read_tensors(replay, part.file, part.size, part.sha256) for part in old]
        rows = {int(name): torch.cat([part[name] for part in parts]) for name in parts[0]}
        name = _free_name(replay, f"step-{step}-together")
        return [*segments[:begin], _write_segment(replay, name, rows, old[0].first, old[-1].last), *segments[end:]]

    def _remove_old(self) -> None:
        """Remove old checkpoints and their segments; leave damaged checkpoints alone."""
        with self._folder("checkpoints") as checkpoints, self._folder("replay") as replay:
            valid: dict[int, Manifest] = {}
            for step in steps_in(checkpoints):
                with suppress(T3DError), checkpoints.inside(f"step-{step}") as folder:
                    valid[step] = read_manifest(folder, step, self._most, self.run.identity)
            kept = sorted(valid)[-KEPT:]
            needed = {part.file for step in kept for part in valid[step].segments}
            for step in sorted(valid)[:-KEPT]:
                # The manifest last: it lists the files to remove.
                for part in valid[step].segments:
                    if part.file not in needed:
                        _remove(replay, part.file, part.file + PARITY)
                with suppress(T3DError), checkpoints.inside(f"step-{step}") as folder:
                    _remove_states(folder)
                    _remove(folder, manifests.NAME)
                checkpoints.remove_empty(f"step-{step}")

    # ------------------------------------------------------------------------------------------ reading

    def written(self) -> list[int]:
        """The steps of all finished checkpoints, including damaged ones."""
        with self._folder("checkpoints") as checkpoints:
            return [step for step in steps_in(checkpoints) if _has_manifest(checkpoints, step)]

    def newest(self, memory: Replay, most_state: int) -> Manifest | None:
        """Find the newest checkpoint that is intact or repairable and fits this memory; None if there is none.

        `most_state` is the size limit of the state. Newer checkpoints that are skipped are reported with the reason.
        """
        rings, positions = memory.rings(), self.metrics.positions()
        self._most = most_manifest(len(rings))
        self._hashes.clear()
        with self._folder("checkpoints") as checkpoints, self._folder("replay") as replay:
            steps, older = candidates(checkpoints)
            for step in steps:
                try:
                    with checkpoints.inside(f"step-{step}") as folder:
                        if folder.kind(manifests.NAME) is None:
                            self.say(f"{folder.path} is incomplete: the run ended while writing it. It is skipped.")
                            continue
                        found = read_manifest(folder, step, self._most, self.run.identity)
                        most = max(sum(ring.rows[: ring.capacity].nbytes for ring in rings), 2 * LARGE)
                        refuse_misfit(found, rings, most_state, most, folder.path / manifests.NAME)
                        positions.check(found.metrics)
                        self._check(folder, found.state_file, found.state.size, found.state.sha256)
                    for part in found.segments:
                        self._check_or_repair(replay, part)
                    return found
                except T3DError as error:
                    self.say(f"{error} The checkpoint of step {step:,} is skipped.")
            for sentence in older:
                self.say(sentence)
        return None

    def _check(self, folder: Folder, name: str, size: int, sha256: str) -> None:
        path = folder.path / name
        if folder.kind(name) is None:
            raise T3DError(f"{path} is missing.")
        if (now := folder.size(name)) != size:
            raise T3DError(f"{path} has {now:,} bytes, but {size:,} were written: it is damaged.")
        if folder.sha256(name, self._hashes) != sha256:
            raise T3DError(f"{path} does not match its checksum: it is damaged.")

    def _check_or_repair(self, replay: Folder, part: Segment) -> None:
        """Repair a segment from its parity file, or the parity file from the segment; raise T3DError if both fail."""
        parity_file = part.file + PARITY
        try:
            self._check(replay, part.file, part.size, part.sha256)
        except T3DError as damage:
            content = _repaired(replay, part)
            if content is None:
                raise
            replay.write(part.file, content)
            self.say(f"{damage} It was repaired from {parity_file}.")
        try:
            self._check(replay, parity_file, parity_size(part.size), part.parity_sha256)
        except T3DError as damage:
            if replay.kind(parity_file) in ("file", None):
                replay.write(parity_file, parity(replay.read(part.file, part.size)))
                self.say(f"{damage} It was written again.")

    def load(self, found: Manifest, memory: Replay) -> dict[str, Tensor]:
        """Fill the memory and return the state; remove newer files."""
        self.discard_unfinished(found)
        rings = memory.rings()
        with self._folder("replay") as replay:
            for part in found.segments:
                rows = _read_tensors(replay, part.file, part.size, part.sha256)
                _refuse_other_rows(replay.path / part.file, rows, part, rings)
                for k, ring in enumerate(rings):
                    ring.put(part.first[k], rows[str(k)])
        self.segments = list(found.segments)
        with self._folder("checkpoints", f"step-{found.step}") as folder:
            state = _read_tensors(folder, found.state_file, found.state.size, found.state.sha256)
            step = state.get("step", torch.empty(0))
            if step.dtype != torch.int64 or step.numel() != 1 or int(step) != found.step:
                raise T3DError(f"{folder.path}: the state is from a different step.")
            for name, stored in memory.counts().items():
                if not np.array_equal(state.get(f"learner.memory.{name}", ()), stored):
                    raise T3DError(f"{folder.path}: the state and the segments have different numbers of rows.")
        self.metrics.begin(found.metrics)
        return state

    def discard_unfinished(self, found: Manifest | None = None) -> None:
        """Remove files of interrupted writes and files newer than the checkpoint `found`."""
        now = -1 if found is None else found.step
        with self._folder("checkpoints") as checkpoints, self._folder("replay") as replay:
            for step in steps_in(checkpoints):
                if step > now or not _has_manifest(checkpoints, step):
                    with suppress(T3DError), checkpoints.inside(f"step-{step}") as folder:
                        # The manifest first: without it the remaining files are not a checkpoint.
                        _remove(folder, manifests.NAME)
                        _remove_states(folder)
                    checkpoints.remove_empty(f"step-{step}")
            needed = set() if found is None else {part.file for part in found.segments}
            for name in replay.names():
                match = SEGMENT_NAME.fullmatch(_final_name(name).removesuffix(PARITY))
                # Older segments may belong to an older checkpoint.
                if match and int(match[1]) >= now and (match[0] not in needed or name.startswith(".")):
                    _remove(replay, name)


def _final_name(name: str) -> str:
    """NAME for `.NAME.part`, the temporary file of a write; otherwise the name itself."""
    return name[1:-5] if name.startswith(".") and name.endswith(".part") else name


def _remove_states(folder: Folder) -> None:
    _remove(folder, *(name for name in folder.names() if STATE_NAME.fullmatch(_final_name(name))))


def _remove(folder: Folder, *names: str) -> None:
    """Remove regular files; ignore errors, because a run must not stop for a cleanup."""
    for name in names:
        with suppress(T3DError):
            folder.remove(name)


def _has_manifest(checkpoints: Folder, step: int) -> bool:
    try:
        with checkpoints.inside(f"step-{step}") as folder:
            return folder.kind(manifests.NAME) is not None
    except T3DError:
        return False  # for example a link


def _read_tensors(folder: Folder, name: str, size: int, sha256: str) -> dict[str, Tensor]:
    """Read tensors; check the hash again, because the file may have changed since the last check."""
    content = folder.read(name, size)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise T3DError(f"{folder.path / name} does not match its checksum: it is damaged.")
    return files.unpack(content, folder.path / name)


def _repaired(replay: Folder, part: Segment) -> bytes | None:
    """The repaired content of a segment, or None. The file may be longer or shorter than it was."""
    if replay.kind(part.file) != "file" or replay.kind(part.file + PARITY) != "file":
        return None
    with os.fdopen(replay.open_file(part.file, os.O_RDONLY), "rb") as file:
        content = file.read(part.size).ljust(part.size, b"\0")
    content = repaired(content, replay.read(part.file + PARITY, parity_size(part.size)))
    return content if hashlib.sha256(content).hexdigest() == part.sha256 else None


def _refuse_other_rows(path: Path, rows: Mapping[str, Tensor], part: Segment, rings: Sequence[Ring]) -> None:
    """Refuse a segment with unexpected rows: a matching hash does not make it trusted."""
    expected = {
        str(k): ((part.last[k] - part.first[k], *ring.rows.shape[1:]), ring.rows.dtype) for k, ring in enumerate(rings)
    }
    if {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in rows.items()} != expected:
        raise T3DError(f"{path} does not hold the rows that its manifest lists.")
    files.refuse_numbers(path, rows, lambda name, tensor: False)


def _write_segment(folder: Folder, name: str, rows: Mapping[int, Tensor], first: list[int], last: list[int]) -> Segment:
    """Write a segment and its parity file; both kept checkpoints depend on the segment."""
    content = files.pack({str(k): tensor for k, tensor in rows.items()})
    written = folder.write(name, content)
    parity_file = folder.write(name + PARITY, parity(content))
    return Segment(name, written.size, written.sha256, parity_file.sha256, first, last)


def _free_name(folder: Folder, stem: str) -> str:
    """An unused name, STEM.safetensors or STEM-2.safetensors, …: files in a manifest must not be overwritten."""
    names = (f"{stem}{f'-{number}' if number > 1 else ''}.safetensors" for number in count(1))
    return next(name for name in names if folder.kind(name) is None)


def _needed(part: Segment, stored: list[int], capacities: list[int]) -> list[bool]:
    """For each ring, whether it still holds a row of the segment."""
    return [last > count - size for last, count, size in zip(part.last, stored, capacities, strict=True)]
