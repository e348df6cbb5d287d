"""Checkpoints: everything that changes during a run, on the disk, so that it goes on after any crash bit for bit.

    checkpoints/step-N/state.safetensors    every number of the run's state but the replay memory's rows
    checkpoints/step-N/manifest.json        written last: with it the checkpoint exists, without it there is none
    replay/step-N.safetensors               the rows that were new at step N, never changed again
    replay/step-N.safetensors.parity        what would repair it

The manifest names every file with its size and SHA-256, also the segments of the replay memory that belong to it. A
checkpoint costs what is new. Nothing is overwritten: an old checkpoint is removed when two newer ones are whole, a
segment when no checkpoint that is left needs it. Writing goes on beside training, one checkpoint at a time.

The folder may come from anybody. Only regular files with the names above are ever removed, and only where a manifest
that matches its checksum names them or an interrupted write left them. Sizes are compared with what this run can have
before anything is read.

A ring is a seed's rows, or its frames. What is stored in it is counted from 0 over the run; a segment holds what came
from `first` to `last`, ring by ring.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
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
    most_manifest,
    read_manifest,
    refuse_misfit,
    steps_in,
)
from t3d.runs.metrics import Mark
from t3d.runs.parity import parity, parity_size, repaired

KEPT = 2  # checkpoints that stay: if the newest is damaged, there is one before it
PARITY = ".parity"  # behind a segment's name
MOST_SEGMENTS = 64  # then older ones are put together,
LARGE = 2**29  # but never more bytes than twice this: it is all in memory at once


class Checkpoints:
    """The checkpoints of a run folder. `say` is told what is repaired or passed over."""

    def __init__(
        self,
        run: Run,
        about: dict[str, Any],
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.run, self.metrics, self.about, self.say = run, run.log, about, say
        self.segments: list[Segment] = []
        self._most = 0  # bytes of a manifest
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        for name in ("checkpoints", "replay"):
            with self._folder(name):
                pass

    @contextmanager
    def _folder(self, name: str, inside: str | None = None) -> Iterator[Folder]:
        """A folder of the run, or one inside that; made if need be."""
        with self.run.folder() as run, run.inside(name, make=True) as folder:
            if inside is None:
                yield folder
            else:
                with folder.inside(inside, make=True) as inner:
                    yield inner

    # ------------------------------------------------------------------------------------------ writing

    @property
    def busy(self) -> bool:
        """Whether one is still being written; what went wrong in it is raised here."""
        if self._writing is not None and self._writing.done():
            done, self._writing = self._writing, None
            done.result()
        return self._writing is not None

    def save(self, step: int, state: Mapping[str, Tensor], memory: Replay) -> None:
        """Take a copy of everything now, and write it while training goes on."""
        self.wait()
        mark = self.metrics.sync()
        # On the device: it has to copy before it goes on, and the way to the host is long.
        copy = {name: tensor.detach().clone() for name, tensor in state.items()}
        rings = memory.rings()
        self._most = most_manifest(len(rings))
        stored, capacities = [int(ring.stored[0]) for ring in rings], [ring.capacity for ring in rings]
        self._keep_what_is_there(stored, capacities)
        told = self.segments[-1].last if self.segments else [0] * len(rings)
        # The oldest may be overwritten already.
        first = [max(*numbers) for numbers in zip(told, np.subtract(stored, capacities).tolist(), strict=True)]
        rows = [ring.since(begin) for ring, begin in zip(rings, first, strict=True)]
        copied: Any = None
        if memory.rows.is_cuda:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._writing = self._worker.submit(self._write, step, copy, rows, first, stored, capacities, mark, copied)

    def _keep_what_is_there(self, stored: list[int], capacities: list[int]) -> None:
        """Forget segments that no row is needed of any more; if another is gone, all rows are written again."""
        self.segments = [part for part in self.segments if any(_needed(part, stored, capacities))]
        with self._folder("replay") as replay:
            for part in self.segments:
                if replay.kind(part.file) != "file" or replay.size(part.file) != part.size:
                    self.say(
                        f"{replay.path / part.file} was removed or changed while the run was going on:"
                        " all rows of the replay memory are written again."
                    )
                    self.segments = []
                    return

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._writing is not None:
            done, self._writing = self._writing, None
            done.result()

    def close(self) -> None:
        self._worker.shutdown(wait=True)

    def _write(
        self,
        step: int,
        state: Mapping[str, Tensor],
        rows: list[Tensor],
        first: list[int],
        last: list[int],
        capacities: list[int],
        mark: Mark,
        copied: Any,
    ) -> None:
        if copied is not None:
            # In a stream of its own, so that it waits for the copies and for nothing that was asked for since.
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                torch.cuda.current_stream().wait_event(copied)
                state = {name: tensor.cpu() for name, tensor in state.items()}
                rows = [tensor.cpu() for tensor in rows]
        segments = list(self.segments)
        with self._folder("replay") as replay:
            if first != last:
                name = _free_name(replay, f"step-{step}")
                segments.append(_write_segment(replay, name, dict(enumerate(rows)), first, last))
            if len(segments) > MOST_SEGMENTS:
                segments = self._together(replay, step, segments)
        with self._folder("checkpoints", f"step-{step}") as folder:
            # A run may be stopped twice in one step: the manifest then turns from one file to the other, at once.
            name = _free_name(folder, "state")
            saved = folder.write(name, files.pack(state))
            folder.write_json(
                manifests.NAME,
                Manifest(self.run.identity, step, name, saved, segments, capacities, mark, self.about).to_json(),
            )
            if folder.sha256(name) != saved.sha256:
                raise T3DError(f"{folder.path} does not hold what was written to it: the disk cannot be trusted.")
        with self._folder("checkpoints") as checkpoints:
            checkpoints.sync()
        self.segments = segments
        self._tidy()

    def _together(self, replay: Folder, step: int, segments: list[Segment]) -> list[Segment]:
        """Of the older half of the segments those in one file that follow each other and are not large yet."""
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

    def _tidy(self) -> None:
        """Remove the checkpoints that are older than those that stay; one that is damaged is left alone."""
        with self._folder("checkpoints") as checkpoints, self._folder("replay") as replay:
            whole: dict[int, Manifest] = {}
            for step in steps_in(checkpoints):
                with suppress(T3DError), checkpoints.inside(f"step-{step}") as folder:
                    whole[step] = read_manifest(folder, step, self._most, self.run.identity)
            stay = sorted(whole)[-KEPT:]
            needed = {part.file for step in stay for part in whole[step].segments}
            for step in sorted(whole)[:-KEPT]:
                # The manifest last: as long as it is there, it says what else is to go.
                for part in whole[step].segments:
                    if part.file not in needed:
                        _remove(replay, part.file, part.file + PARITY)
                with suppress(T3DError), checkpoints.inside(f"step-{step}") as folder:
                    _remove_states(folder)
                    _remove(folder, manifests.NAME)
                checkpoints.remove_empty(f"step-{step}")

    # ------------------------------------------------------------------------------------------ reading

    def written(self) -> list[int]:
        """The steps of all checkpoints that were ever finished and are still there, damaged ones too."""
        with self._folder("checkpoints") as checkpoints:
            return [step for step in steps_in(checkpoints) if _has_manifest(checkpoints, step)]

    def newest(self, memory: Replay, most_state: int) -> Manifest | None:
        """The newest checkpoint that is whole or can be repaired, for this memory and a state of so many bytes.

        Each newer one that is passed over is said, with the reason.
        """
        rings = memory.rings()
        self._most = most_manifest(len(rings))
        with self._folder("checkpoints") as checkpoints, self._folder("replay") as replay:
            for step in reversed(steps_in(checkpoints)):
                try:
                    with checkpoints.inside(f"step-{step}") as folder:
                        if folder.kind(manifests.NAME) is None:
                            self.say(f"{folder.path} was being written when the run ended: it is skipped.")
                            continue
                        found = read_manifest(folder, step, self._most, self.run.identity)
                        most = max(sum(ring.rows[: ring.capacity].nbytes for ring in rings), 2 * LARGE)
                        refuse_misfit(found, rings, most_state, most, folder.path / manifests.NAME)
                        self.metrics.check(found.metrics)
                        _check(folder, found.state_file, found.state.size, found.state.sha256)
                    for part in found.segments:
                        self._check_or_repair(replay, part)
                    return found
                except T3DError as error:
                    self.say(f"{error} The checkpoint of step {step:,} is skipped.")
        return None

    def _check_or_repair(self, replay: Folder, part: Segment) -> None:
        """Put a segment right from its parity, or its parity from the segment; refuse it if neither can be."""
        beside = part.file + PARITY
        try:
            _check(replay, part.file, part.size, part.sha256)
        except T3DError as damage:
            content = _repaired(replay, part)
            if content is None:
                raise
            replay.write(part.file, content)
            self.say(f"{damage} It was repaired from {beside}.")
        try:
            _check(replay, beside, parity_size(part.size), part.parity_sha256)
        except T3DError as damage:
            if replay.kind(beside) in ("file", None):
                replay.write(beside, parity(replay.read(part.file, part.size)))
                self.say(f"{damage} It was written again.")

    def load(self, found: Manifest, memory: Replay) -> dict[str, Tensor]:
        """Fill the memory and return the state; what is newer than this checkpoint is removed."""
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
            if "step" not in state or state["step"].numel() != 1 or int(state["step"]) != found.step:
                raise T3DError(f"{folder.path}: its state is of another step.")
            for name, stored in memory.counts().items():
                if not np.array_equal(state.get(f"learner.memory.{name}", ()), stored):
                    raise T3DError(f"{folder.path}: its state and its segments disagree about how many rows there are.")
        self.metrics.begin(found.metrics)
        return state

    def discard_unfinished(self, found: Manifest | None = None) -> None:
        """Remove what an interrupted write left, and what is newer than the checkpoint that the run goes on from."""
        now = -1 if found is None else found.step
        with self._folder("checkpoints") as checkpoints, self._folder("replay") as replay:
            for step in steps_in(checkpoints):
                if step > now or not _has_manifest(checkpoints, step):
                    with suppress(T3DError), checkpoints.inside(f"step-{step}") as folder:
                        # The manifest first: without it the rest is no checkpoint, whatever is left of it.
                        _remove(folder, manifests.NAME)
                        _remove_states(folder)
                    checkpoints.remove_empty(f"step-{step}")
            needed = set() if found is None else {part.file for part in found.segments}
            for name in replay.names():
                match = SEGMENT_NAME.fullmatch(_written_as(name).removesuffix(PARITY))
                # Older ones may belong to an older checkpoint.
                if match and int(match[1]) >= now and (match[0] not in needed or name.startswith(".")):
                    _remove(replay, name)


def _written_as(name: str) -> str:
    """The name that a file was to have: of `.NAME.part`, which an interrupted write leaves, it is NAME."""
    return name[1:-5] if name.startswith(".") and name.endswith(".part") else name


def _remove_states(folder: Folder) -> None:
    _remove(folder, *(name for name in folder.names() if STATE_NAME.fullmatch(_written_as(name))))


def _remove(folder: Folder, *names: str) -> None:
    """Regular files; what cannot be removed stays, because tidying is no reason to stop a run."""
    for name in names:
        with suppress(T3DError):
            folder.remove(name)


def _has_manifest(checkpoints: Folder, step: int) -> bool:
    try:
        with checkpoints.inside(f"step-{step}") as folder:
            return folder.kind(manifests.NAME) is not None
    except T3DError:
        return False  # a link, say


def _check(folder: Folder, name: str, size: int | None, sha256: str) -> None:
    path = folder.path / name
    if folder.kind(name) is None:
        raise T3DError(f"{path} is missing.")
    now = folder.size(name)
    if size is not None and now != size:
        raise T3DError(f"{path} has {now:,} bytes where {size:,} were written: it is damaged.")
    if folder.sha256(name) != sha256:
        raise T3DError(f"{path} is not as it was written: it is damaged.")


def _read_tensors(folder: Folder, name: str, size: int, sha256: str) -> dict[str, Tensor]:
    """The tensors of a file that has just been checked, checked once more as they are read."""
    content = folder.read(name, size)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise T3DError(f"{folder.path / name} is not as it was written: it is damaged.")
    return files.unpack(content, folder.path / name)


def _repaired(replay: Folder, part: Segment) -> bytes | None:
    """What a damaged segment was, if its parity tells; it may also be too long, or too short."""
    if replay.kind(part.file) != "file" or replay.kind(part.file + PARITY) != "file":
        return None
    with os.fdopen(replay.open_file(part.file, os.O_RDONLY), "rb") as file:
        content = file.read(part.size).ljust(part.size, b"\0")
    content = repaired(content, replay.read(part.file + PARITY, parity_size(part.size)))
    return content if hashlib.sha256(content).hexdigest() == part.sha256 else None


def _refuse_other_rows(path: Path, rows: Mapping[str, Tensor], part: Segment, rings: Sequence[Ring]) -> None:
    """A segment that matches its hash may still be somebody else's work."""
    expected = {
        str(k): ((part.last[k] - part.first[k], *ring.rows.shape[1:]), ring.rows.dtype) for k, ring in enumerate(rings)
    }
    if {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in rows.items()} != expected:
        raise T3DError(f"{path} does not hold the rows that its manifest speaks of.")
    files.refuse_numbers(path, rows, lambda name, tensor: False)


def _write_segment(folder: Folder, name: str, rows: Mapping[int, Tensor], first: list[int], last: list[int]) -> Segment:
    """Both checkpoints that are kept need it, so it is written with what would repair it."""
    content = files.pack({str(k): tensor for k, tensor in rows.items()})
    written = folder.write(name, content)
    beside = folder.write(name + PARITY, parity(content))
    return Segment(name, written.size, written.sha256, beside.sha256, first, last)


def _free_name(folder: Folder, stem: str) -> str:
    """STEM.safetensors, or STEM-2, STEM-3, …: nothing that a manifest may name is overwritten."""
    names = (f"{stem}{f'-{number}' if number > 1 else ''}.safetensors" for number in count(1))
    return next(name for name in names if folder.kind(name) is None)


def _needed(part: Segment, stored: list[int], capacities: list[int]) -> list[bool]:
    """Ring by ring, whether it still holds one of its rows."""
    return [last > count - size for last, count, size in zip(part.last, stored, capacities, strict=True)]
