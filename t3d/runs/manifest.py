"""The manifest of a checkpoint: which files belong to it, of what size and hash. What is read here may be anybody's."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from t3d import files
from t3d.errors import T3DError
from t3d.files import Folder, Written
from t3d.replay import Ring
from t3d.runs.metrics import Mark

FORMAT = 6
NAME = "manifest.json"
SPARE = 2**20  # bytes that the header of a file may have
MOST_SEGMENTS = 1_000  # that a file may speak of
LARGEST = 2**53  # a count that a file may speak of

FOLDER_NAME = re.compile(r"step-(0|[1-9][0-9]{0,14})", re.ASCII)
STATE_NAME = re.compile(r"state(-[0-9]{1,6})?\.safetensors", re.ASCII)
SEGMENT_NAME = re.compile(r"step-([0-9]{1,15})(-together)?(-[0-9]{1,6})?\.safetensors", re.ASCII)
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
_CHAIN = re.compile(r"[0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True)
class Segment:
    """A file of rows in replay/, and what its parity's hash is."""

    file: str
    size: int
    sha256: str
    parity_sha256: str
    first: list[int]
    last: list[int]


@dataclass(frozen=True)
class Manifest:
    """A checkpoint, told by its files."""

    run: str  # the identity of its config
    step: int
    state_file: str
    state: Written
    segments: list[Segment]
    capacities: list[int]  # of each ring
    metrics: Mark
    about: dict[str, Any]  # versions, device, threads

    def to_json(self) -> dict[str, Any]:
        values = {name: value for name, value in asdict(self).items() if name != "about"}
        return files.with_sum({"format": FORMAT, **values, "about": self.about})


def steps_in(checkpoints: Folder) -> list[int]:
    """The steps of all checkpoints, also of those that were not finished, in order."""
    found = (FOLDER_NAME.fullmatch(name) for name in checkpoints.names())
    return sorted(int(match[1]) for match in found if match)


def most_manifest(rings: int) -> int:
    """Bytes that the manifest of a run with so many rings can have: what is longer is not even parsed."""
    return 2**20 + 2**13 * rings


def read_manifest(folder: Folder, step: int, most: int, identity: str) -> Manifest:
    """The manifest in the folder of a run's checkpoint, if it is as it was written and has at most so many bytes."""
    path = folder.path / NAME
    values = files.without_sum(files.parse_object(folder.read(NAME, most), path), path)
    files.refuse_format(path, values.pop("format", None), FORMAT)
    try:
        state, mark = Written(**values.pop("state")), Mark(**values.pop("metrics"))
        segments = [Segment(**part) for part in values.pop("segments")]
        manifest = Manifest(state=state, segments=segments, metrics=mark, **values)
        _check(manifest, step)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise T3DError(f"{path} is not the manifest of a checkpoint ({error}).") from error
    if manifest.run != identity:
        raise T3DError(f"{path} belongs to another run than config.json, which has other settings.")
    return manifest


def _check(manifest: Manifest, step: int) -> None:
    """Refuse what no run would have written."""
    if not (_count(manifest.step) and manifest.step == step):
        raise ValueError(f"it is of step {manifest.step!r}")
    if not isinstance(manifest.run, str):
        raise ValueError(f"it is of the run {manifest.run!r}")
    if not (STATE_NAME.fullmatch(manifest.state_file) and isinstance(manifest.about, dict)):
        raise ValueError(f"{manifest.state_file!r} is not the name of a state")
    mark = manifest.metrics
    if not (_count(mark.size) and _count(mark.rows) and _CHAIN.fullmatch(mark.chain)):
        raise ValueError(f"metrics cannot be {mark}")
    if not all(map(_count, manifest.capacities)) or len(manifest.segments) > MOST_SEGMENTS:
        raise ValueError("its counts are not counts")
    if len({part.file for part in manifest.segments}) < len(manifest.segments):
        raise ValueError("it names a segment twice")
    rings = len(manifest.capacities)
    hashed: list[Written | Segment] = [manifest.state, *manifest.segments]
    for file in hashed:
        if not (_count(file.size) and _HASH.fullmatch(file.sha256)):
            raise ValueError(f"{file} has no size and hash")
    for part in manifest.segments:
        if not (SEGMENT_NAME.fullmatch(part.file) and _HASH.fullmatch(part.parity_sha256)):
            raise ValueError(f"{part.file!r} is not the name of a segment")
        if not (len(part.first) == len(part.last) == rings and all(map(_count, [*part.first, *part.last]))):
            raise ValueError(f"{part.file} does not say which rows it holds")
        if any(first > last for first, last in zip(part.first, part.last, strict=True)):
            raise ValueError(f"{part.file} ends before it begins")


def _count(number: Any) -> bool:
    return type(number) is int and 0 <= number < LARGEST


def refuse_misfit(manifest: Manifest, rings: Sequence[Ring], most_state: int, most_segment: int, where: Path) -> None:
    """Refuse, before any of it is read, what this run's replay memory and state cannot have been."""
    if len(manifest.capacities) != len(rings):
        raise T3DError(f"{where} belongs to a run with another number of seeds, or of other observations.")
    if manifest.state.size > most_state:
        raise T3DError(f"{where}: the state has {manifest.state.size:,} bytes, more than this run's could have.")
    widths = [ring.rows[0].nbytes for ring in rings]
    for part in manifest.segments:
        counts = [last - first for first, last in zip(part.first, part.last, strict=True)]
        size = sum(count * width for count, width in zip(counts, widths, strict=True))
        if not size <= part.size <= size + SPARE or part.size > most_segment + SPARE:
            raise T3DError(f"{where}: {part.file} cannot have {part.size:,} bytes with the rows that it is to hold.")
    for k, (ring, capacity) in enumerate(zip(rings, manifest.capacities, strict=True)):
        stored = manifest.segments[-1].last[k] if manifest.segments else 0
        if capacity > ring.capacity or _held(manifest.segments, k) < min(stored, capacity):
            raise T3DError(f"{where}: its segments do not hold all rows of the replay memory.")


def _held(segments: Sequence[Segment], k: int) -> int:
    """How many of the newest rows of a ring are in segments, without a gap."""
    if not segments:
        return 0
    begin = end = segments[-1].last[k]
    for part in reversed(segments):
        if part.last[k] < begin:
            break
        begin = min(begin, part.first[k])
    return end - begin


def newest_manifest(run: Folder, seeds: int, identity: str) -> Manifest | None:
    """Of the newest checkpoint whose manifest is whole. Whoever resumes is told of the others."""
    with suppress(T3DError):
        for manifest, _ in _manifests(run, seeds, identity, []):
            return manifest
    return None


def newest_shapes(run: Folder, seeds: int, identity: str) -> tuple[dict[str, tuple[int, ...]] | None, list[str]]:
    """The shapes of the newest state that is there in its size, and why newer ones were passed over.

    None where there is no such state; nothing but headers is read.
    """
    passed: list[str] = []
    for manifest, folder in _manifests(run, seeds, identity, passed):
        try:
            return files.shapes(folder, manifest.state_file, manifest.state.size), passed
        except T3DError as error:
            passed.append(f"{error} The checkpoint of step {manifest.step:,} is skipped.")
    return None, passed


def _manifests(run: Folder, seeds: int, identity: str, passed: list[str]) -> Iterator[tuple[Manifest, Folder]]:
    """The newest first; those that are not whole are added to `passed`."""
    if run.kind("checkpoints") is None:
        return
    with run.inside("checkpoints") as checkpoints:
        for step in reversed(steps_in(checkpoints)):
            try:
                with checkpoints.inside(f"step-{step}") as folder:
                    if folder.kind(NAME) is None:
                        continue  # it was not finished
                    manifest = read_manifest(folder, step, most_manifest(2 * seeds), identity)
                    yield manifest, folder
            except T3DError as error:
                passed.append(f"{error} The checkpoint of step {step:,} is skipped.")
