"""Checkpoints: everything that changes during a run, on the disk, so that it goes on after any crash bit for bit.

    checkpoints/step-N/state.safetensors    every number of the run's state but the replay memory's rows
    checkpoints/step-N/manifest.json        written last: with it the checkpoint exists, without it there is none
    replay/step-N.safetensors               the rows that were new at step N, never changed again
    replay/step-N.safetensors.parity        what would mend it

The manifest names every file with its size and SHA-256, also the segments of the replay memory that belong to it. A
checkpoint costs what is new. Nothing is overwritten: an old checkpoint is removed when two newer ones are whole, a
segment when no checkpoint that is left needs it. Writing goes on beside training, one checkpoint at a time.

A ring is a seed's rows, or its frames. What is stored in it is counted from 0 over the run; a segment holds what came
from `first` to `last`, ring by ring.
"""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from t3d import files
from t3d.errors import T3DError
from t3d.replay import Replay
from t3d.runs.parity import mended, parity

FORMAT = 4
KEPT = 2  # checkpoints that stay: if the newest is damaged, there is one before it
PARITY = ".parity"  # behind a segment's name
MOST_SEGMENTS = 64  # then older ones are put together,
LARGE = 2**29  # but never more bytes than twice this: it is all in memory at once


@dataclass(frozen=True)
class Segment:
    """A file of rows."""

    file: str
    size: int
    sha256: str
    first: list[int]
    last: list[int]


@dataclass(frozen=True)
class Checkpoint:
    """A manifest, read."""

    folder: Path
    step: int
    state_file: str
    state: files.Written
    segments: list[Segment]
    metrics: int  # bytes of metrics.jsonl that were written by then
    about: dict[str, Any]  # versions, device, threads


class Checkpoints:
    """The checkpoints of a run folder."""

    def __init__(self, run: Path, about: dict[str, Any]) -> None:
        self.run, self.about = run, about
        self.segments: list[Segment] = []
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        for name in ("checkpoints", "replay"):
            files.make_folder(run / name)

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
        metrics = files.sync(self.run / "metrics.jsonl")
        # On the device: it has to copy before it goes on, and the way to the host is long.
        copy = {name: tensor.detach().clone() for name, tensor in state.items()}
        rings = memory.rings()
        stored, capacities = [int(ring.stored[0]) for ring in rings], [ring.capacity for ring in rings]
        told = self.segments[-1].last if self.segments else [0] * len(rings)
        # The oldest may be overwritten already.
        first = [max(*numbers) for numbers in zip(told, np.subtract(stored, capacities).tolist(), strict=True)]
        rows = [ring.since(begin) for ring, begin in zip(rings, first, strict=True)]
        copied: Any = None
        if memory.rows.is_cuda:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._writing = self._worker.submit(self._write, step, copy, rows, first, stored, capacities, metrics, copied)

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
        metrics: int,
        copied: Any,
    ) -> None:
        if copied is not None:
            # In a stream of its own, so that it waits for the copies and for nothing that was asked for since.
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                torch.cuda.current_stream().wait_event(copied)
                state = {name: tensor.cpu() for name, tensor in state.items()}
                rows = [tensor.cpu() for tensor in rows]
        segments = [part for part in self.segments if any(_needed(part, last, capacities))]
        if first != last:
            name = f"replay/{_free_name(self.run / 'replay', f'step-{step}')}"
            segments.append(self._write_segment(name, {str(k): t for k, t in enumerate(rows)}, first, last))
        if len(segments) > MOST_SEGMENTS:
            segments = self._together(step, segments)
        folder = files.make_folder(self.run / "checkpoints" / f"step-{step}")
        # A run may be stopped twice in one step: the manifest then turns from one file to the other, at once.
        name = _free_name(folder, "state")
        saved = files.write_tensors(folder / name, state)
        manifest = {
            "format": FORMAT,
            "step": step,
            "metrics_bytes": metrics,
            "state_file": name,
            "state": asdict(saved),
            "segments": [asdict(part) for part in segments],
            **self.about,
        }
        files.write_json(folder / "manifest.json", {"sha256": _digest(manifest), **manifest})
        files.sync_folder(folder.parent)
        if files.sha256(folder / name) != saved.sha256:
            raise T3DError(f"{folder} does not hold what was written to it: the disk is not to be trusted.")
        self.segments = segments
        self._tidy()

    def _together(self, step: int, segments: list[Segment]) -> list[Segment]:
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
        parts = [self._read_segment(part) for part in old]
        rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        name = f"replay/{_free_name(self.run / 'replay', f'step-{step}-together')}"
        return [*segments[:begin], self._write_segment(name, rows, old[0].first, old[-1].last), *segments[end:]]

    def _write_segment(self, name: str, rows: Mapping[str, Tensor], first: list[int], last: list[int]) -> Segment:
        """Both checkpoints that are kept need it, so it is written with what would mend it."""
        written = files.write_tensors(self.run / name, rows)
        files.write_bytes(self.run / (name + PARITY), parity(files.read_bytes(self.run / name)))
        return Segment(name, written.size, written.sha256, first, last)

    def _tidy(self) -> None:
        """Remove what no checkpoint needs that stays."""
        found, whole = sorted(self._folders(), reverse=True), sorted(self.written(), reverse=True)
        stay = whole[:KEPT]
        for step in found:
            if step not in stay and (step in whole or step < max(stay, default=0)):
                # The manifest first: a folder without it is no checkpoint, whatever is left of it.
                files.remove(self._folder(step) / "manifest.json")
                files.remove(self._folder(step))
        needed = {part.file for part in self.segments}
        for step in stay:
            needed |= {part["file"] for part in files.read_json(self._folder(step) / "manifest.json")["segments"]}
        for path in (self.run / "replay").iterdir():
            if f"replay/{path.name.removesuffix(PARITY)}" not in needed:
                files.remove(path)

    # ------------------------------------------------------------------------------------------ reading

    def _folder(self, step: int) -> Path:
        return self.run / "checkpoints" / f"step-{step}"

    def _folders(self) -> list[int]:
        names = (path.name.removeprefix("step-") for path in (self.run / "checkpoints").iterdir())
        return [int(name) for name in names if name.isdecimal()]

    def written(self) -> list[int]:
        """The steps of all checkpoints that were ever finished and are still there, damaged ones too."""
        return [step for step in self._folders() if (self._folder(step) / "manifest.json").exists()]

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that is whole, and a sentence for each newer one that is not.

        If none is whole, because a segment is damaged that all of them need, it is mended.
        """
        found, skipped = self._newest(mend=False)
        return self._newest(mend=True) if found is None and self.written() else (found, skipped)

    def _newest(self, mend: bool) -> tuple[Checkpoint | None, list[str]]:
        said: list[str] = []
        for step in sorted(self._folders(), reverse=True):
            folder = self._folder(step)
            if not (folder / "manifest.json").exists():
                said.append(f"{folder}: was being written when the run ended; skipped.")
                continue
            try:
                checkpoint = self._verified(folder)
                for part in checkpoint.segments:
                    said += self._mended(part) if mend else []
                    self._check(self.run / part.file, part.size, part.sha256)
                return checkpoint, said
            except T3DError as error:
                said.append(f"{error} That checkpoint is skipped.")
        return None, said

    def _mended(self, part: Segment) -> list[str]:
        """Put a segment right if it is damaged and can be; what was done, in a sentence."""
        path, beside = self.run / part.file, self.run / (part.file + PARITY)
        if not (path.is_file() and beside.is_file()) or files.sha256(path) == part.sha256:
            return []
        content = mended(files.read_bytes(path), files.read_bytes(beside))
        if hashlib.sha256(content).hexdigest() != part.sha256:
            return []
        files.write_bytes(path, content)
        return [f"{path} was damaged; it was mended from {beside.name}."]

    def _verified(self, folder: Path) -> Checkpoint:
        """A manifest that is as it was written, and its state too; the segments are for others to look at."""
        path = folder / "manifest.json"
        values = files.read_json(path)
        if values.pop("sha256", None) != _digest(values):
            raise T3DError(f"{path} is not as it was written: it is damaged.")
        if values.pop("format", None) != FORMAT:
            raise T3DError(f"{path} has another format than {FORMAT}.")
        try:
            state = files.Written(**values.pop("state"))
            segments = [Segment(**part) for part in values.pop("segments")]
            step, name, metrics = (values.pop(key) for key in ("step", "state_file", "metrics_bytes"))
            checkpoint = Checkpoint(folder, step, name, state, segments, metrics, values)
            if Path(name).name != name:
                raise ValueError(f"{name} is no file of it")
            if f"step-{checkpoint.step}" != folder.name or type(checkpoint.metrics) is not int:
                raise ValueError("it belongs to another folder")
            for part in segments:
                if Path(part.file).parent != Path("replay") or len(part.first) != len(part.last):
                    raise ValueError(f"{part.file} is no segment")
        except (KeyError, TypeError, ValueError) as error:
            raise T3DError(f"{path} is no manifest of a checkpoint ({error}).") from error
        self._check(folder / name, state.size, state.sha256)
        return checkpoint

    def _check(self, path: Path, size: int, sha256: str) -> None:
        if not path.is_file():
            raise T3DError(f"{path} is missing.")
        if path.stat().st_size != size or files.sha256(path) != sha256:
            raise T3DError(f"{path} is not as it was written: it is damaged.")

    def load(self, checkpoint: Checkpoint, memory: Replay) -> dict[str, Tensor]:
        """Fill the memory and return the state; everything newer than this checkpoint is removed."""
        for step in self._folders():
            if step > checkpoint.step or not (self._folder(step) / "manifest.json").exists():
                files.remove(self._folder(step))
        for part in checkpoint.segments:
            rows = [tensor for _, tensor in sorted(self._read_segment(part).items(), key=_number)]
            for ring, first, of_ring in zip(memory.rings(), part.first, rows, strict=True):
                ring.put(first, of_ring)
        self.segments = list(checkpoint.segments)
        self._tidy()
        files.cut(self.run / "metrics.jsonl", checkpoint.metrics)
        return files.read_tensors(checkpoint.folder / checkpoint.state_file)

    def _read_segment(self, part: Segment) -> dict[str, Tensor]:
        return files.read_tensors(self.run / part.file)


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _free_name(folder: Path, stem: str) -> str:
    """STEM.safetensors, or STEM-2, STEM-3, …: nothing that a manifest may name is overwritten."""
    names = (f"{stem}{f'-{number}' if number > 1 else ''}.safetensors" for number in count(1))
    return next(name for name in names if not (folder / name).exists())


def _number(item: tuple[str, Tensor]) -> int:
    return int(item[0])


def _needed(part: Segment, stored: list[int], capacities: list[int]) -> list[bool]:
    """Ring by ring, whether it still holds one of its rows."""
    return [last > count - size for last, count, size in zip(part.last, stored, capacities, strict=True)]
