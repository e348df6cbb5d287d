"""The manifest of a checkpoint: its files with their sizes and hashes. A manifest is untrusted input."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from t3d import files
from t3d.errors import T3DError
from t3d.files import Folder, Written
from t3d.replay import Ring
from t3d.runs.metrics import Mark

FORMAT = 6
NAME = "manifest.json"
SPARE = 2**20  # bytes for the header of a file
MOST_SEGMENTS = 1_000  # in a manifest
MOST_PARTS = 4 * MOST_SEGMENTS  # objects and lists in a manifest: a segment has three
MOST_CANDIDATES = 8  # only the newest checkpoints are examined
LARGEST = 2**53  # counts in a manifest are smaller

FOLDER_NAME = re.compile(r"step-(0|[1-9][0-9]{0,14})", re.ASCII)
STATE_NAME = re.compile(r"state(-[0-9]{1,6})?\.safetensors", re.ASCII)
SEGMENT_NAME = re.compile(r"step-([0-9]{1,15})(-together)?(-[0-9]{1,6})?\.safetensors", re.ASCII)
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
_CHAIN = re.compile(r"[0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True)
class Segment:
    """A file of rows in replay/: rows `first` to `last` of each ring, and the hash of its parity file."""

    file: str
    size: int
    sha256: str
    parity_sha256: str
    first: list[int]
    last: list[int]


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint."""

    run: str  # `Run.identity`
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
    """The sorted steps of all checkpoints, including unfinished ones."""
    found = (FOLDER_NAME.fullmatch(name) for name in checkpoints.names())
    return sorted(int(match[1]) for match in found if match)


def candidates(checkpoints: Folder) -> tuple[list[int], list[str]]:
    """The newest steps, newest first, and a message if there are older ones, which are not examined."""
    steps = steps_in(checkpoints)[::-1]
    more = len(steps) - MOST_CANDIDATES
    message = f"{checkpoints.path}: {more:,} older checkpoints were not examined."
    return steps[:MOST_CANDIDATES], [message] if more > 0 else []


def most_manifest(rings: int) -> int:
    """The size limit of a manifest in bytes; a longer one is not parsed."""
    return 2**19 + 2**13 * rings


def read_manifest(folder: Folder, step: int, most: int, identity: str) -> Manifest:
    """Read and check the manifest in a checkpoint's folder; `most` is its size limit in bytes."""
    path = folder.path / NAME
    values = files.without_sum(files.parse_object(folder.read(NAME, most), path, MOST_PARTS), path)
    files.refuse_format(path, values.pop("format", None), FORMAT)
    try:
        state, mark = Written(**values.pop("state")), Mark(**values.pop("metrics"))
        segments = [Segment(**part) for part in values.pop("segments")]
        manifest = Manifest(state=state, segments=segments, metrics=mark, **values)
        _check(manifest, step)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise T3DError(f"{path} is not the manifest of a checkpoint ({error}).") from error
    if manifest.run != identity:
        raise T3DError(f"{path} belongs to a different run than config.json: the settings differ.")
    return manifest


def _check(manifest: Manifest, step: int) -> None:
    """Refuse a manifest that no run would write."""
    if not (_is_count(manifest.step) and manifest.step == step):
        raise ValueError(f"its step is {manifest.step!r}")
    if not isinstance(manifest.run, str):
        raise ValueError(f"its run is {manifest.run!r}")
    if not (STATE_NAME.fullmatch(manifest.state_file) and isinstance(manifest.about, dict)):
        raise ValueError(f"{manifest.state_file!r} is not the name of a state file")
    mark = manifest.metrics
    if not (_is_count(mark.size) and _is_count(mark.rows) and _CHAIN.fullmatch(mark.chain)):
        raise ValueError(f"metrics cannot be {mark}")
    if mark.rows == 0 and mark != Mark():
        raise ValueError(f"metrics have no rows and cannot be {mark}")
    if not all(map(_is_count, manifest.capacities)) or len(manifest.segments) > MOST_SEGMENTS:
        raise ValueError("its counts are not valid")
    if len({part.file for part in manifest.segments}) < len(manifest.segments):
        raise ValueError("it lists a segment twice")
    rings = len(manifest.capacities)
    hashed: list[Written | Segment] = [manifest.state, *manifest.segments]
    for file in hashed:
        if not (_is_count(file.size) and _HASH.fullmatch(file.sha256)):
            raise ValueError(f"{file} has no valid size and hash")
    for part in manifest.segments:
        if not (SEGMENT_NAME.fullmatch(part.file) and _HASH.fullmatch(part.parity_sha256)):
            raise ValueError(f"{part.file!r} is not the name of a segment file")
        if not (len(part.first) == len(part.last) == rings and all(map(_is_count, [*part.first, *part.last]))):
            raise ValueError(f"{part.file} does not list its rows")
        if any(first > last for first, last in zip(part.first, part.last, strict=True)):
            raise ValueError(f"{part.file} has a last row before its first")
    for before, after in pairwise(manifest.segments):
        if any(last > first for last, first in zip(before.last, after.first, strict=True)):
            raise ValueError(f"{after.file} has rows of {before.file}")


def _is_count(number: Any) -> bool:
    return type(number) is int and 0 <= number < LARGEST


def refuse_misfit(manifest: Manifest, rings: Sequence[Ring], most_state: int, most_segment: int, where: Path) -> None:
    """Refuse a manifest that does not fit this run's replay memory and state, before its files are read."""
    if len(manifest.capacities) != len(rings):
        raise T3DError(f"{where} belongs to a run with a different number of seeds or different observations.")
    if manifest.state.size > most_state:
        raise T3DError(
            f"{where}: the state has {manifest.state.size:,} bytes, more than the state of this run can have."
        )
    widths = [ring.rows[0].nbytes for ring in rings]
    for part in manifest.segments:
        counts = [last - first for first, last in zip(part.first, part.last, strict=True)]
        size = sum(count * width for count, width in zip(counts, widths, strict=True))
        if not size <= part.size <= size + SPARE or part.size > most_segment + SPARE:
            raise T3DError(
                f"{where}: {part.file} cannot have {part.size:,} bytes with the rows that the manifest lists."
            )
    for k, (ring, capacity) in enumerate(zip(rings, manifest.capacities, strict=True)):
        stored = manifest.segments[-1].last[k] if manifest.segments else 0
        if capacity > ring.capacity or _rows_held(manifest.segments, k) < min(stored, capacity):
            raise T3DError(f"{where}: the segments do not hold all rows of the replay memory.")


def _rows_held(segments: Sequence[Segment], k: int) -> int:
    """The number of newest rows of ring k that the segments hold without a gap."""
    if not segments:
        return 0
    begin = end = segments[-1].last[k]
    for part in reversed(segments):
        if part.last[k] < begin:
            break
        begin = min(begin, part.first[k])
    return end - begin


def newest_manifest(run: Folder, seeds: int, identity: str) -> Manifest | None:
    """The manifest of the newest checkpoint with a valid manifest, or None. `t3d resume` reports the damaged ones."""
    with suppress(T3DError):
        for manifest, _ in _manifests(run, seeds, identity, []):
            return manifest
    return None


def newest_shapes(run: Folder, seeds: int, identity: str) -> tuple[dict[str, tuple[int, ...]] | None, list[str]]:
    """Read the tensor shapes of the newest state with the right size, from its header alone.

    Return them, or None if there is no such state, and the reasons why newer checkpoints were skipped.
    """
    skipped: list[str] = []
    for manifest, folder in _manifests(run, seeds, identity, skipped):
        try:
            return files.shapes(folder, manifest.state_file, manifest.state.size), skipped
        except T3DError as error:
            skipped.append(f"{error} The checkpoint of step {manifest.step:,} is skipped.")
    return None, skipped


def _manifests(run: Folder, seeds: int, identity: str, skipped: list[str]) -> Iterator[tuple[Manifest, Folder]]:
    """Yield valid manifests, newest first; append the errors of the others to `skipped`."""
    if run.kind("checkpoints") is None:
        return
    with run.inside("checkpoints") as checkpoints:
        steps, older = candidates(checkpoints)
        for step in steps:
            try:
                with checkpoints.inside(f"step-{step}") as folder:
                    if folder.kind(NAME) is None:
                        continue  # unfinished
                    manifest = read_manifest(folder, step, most_manifest(2 * seeds), identity)
                    yield manifest, folder
            except T3DError as error:
                skipped.append(f"{error} The checkpoint of step {step:,} is skipped.")
    skipped += older
