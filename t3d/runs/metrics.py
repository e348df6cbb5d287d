"""metrics.jsonl: one appended row per event; every row has a number and a checksum.

    {"n": 17, "kind": "episode", "step": 400, "seed": 0, "return": -812.4, …, "chain": "9f86d081884c7d65"}

`chain` is a hash of the row (up to "chain") and of the previous row's chain, so changed, missing and moved rows are
detected. A crash may truncate the last row and lose rows after the newest checkpoint; the resumed run writes them
again.
"""

import json
import os
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite
from pathlib import Path
from typing import Any

from t3d.errors import T3DError, warn
from t3d.files import Folder

NAME = "metrics.jsonl"
LONGEST = 2**20  # bytes of a row
MOST_STEPS = 2**63  # the limit of steps and seeds
_DIGITS = 16
_TAIL = len(', "chain": "') + _DIGITS + len('"}')


@dataclass(frozen=True)
class Mark:
    """A position in the file: bytes, rows, and the last row's `chain`."""

    size: int = 0
    rows: int = 0
    chain: str = "0" * _DIGITS


class Metrics:
    """The metrics.jsonl of a run folder."""

    def __init__(self, run: Path, folder: Callable[[], Folder] | None = None) -> None:
        self.path = run / NAME
        self._folder = folder or (lambda: Folder.open(run))  # opens the run folder
        self.mark = Mark()
        self.say: Callable[[str], None] = lambda sentence: None
        self._descriptor: int | None = None
        self._deflate, self._copy = zlib.compressobj(1), list[bytes]()  # a compressed copy of the whole file

    # ------------------------------------------------------------------------------------------ writing

    def begin(self, mark: Mark | None = None) -> None:
        """Start writing: a new file with the existing content up to `mark`, or an empty one."""
        mark = mark or Mark()
        with self._folder() as folder:
            # Copy instead of truncating, so that hard links (backups) keep their content.
            content = b""
            if mark.size:
                with os.fdopen(folder.open_file(NAME, os.O_RDONLY), "rb") as file:
                    content = file.read(mark.size)
            folder.write(NAME, content)
            self._open(folder, mark)
        self._deflate = zlib.compressobj(1)
        self._copy = [self._deflate.compress(content)]

    def _open(self, folder: Folder, mark: Mark) -> None:
        self.close()
        self._descriptor, self.mark = folder.open_file(NAME, os.O_RDWR | os.O_APPEND), mark

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows."""
        assert self._descriptor is not None, "call begin() first"
        lines, mark = [], self.mark
        for row in rows:
            text = json.dumps({"n": mark.rows, **row}, allow_nan=False).encode()
            chain = _chain(mark.chain, text)
            lines.append(text[:-1] + f', "chain": "{chain}"}}\n'.encode())
            mark = Mark(mark.size + len(lines[-1]), mark.rows + 1, chain)
        try:
            content, written = b"".join(lines), 0
            while written < len(content):
                written += os.write(self._descriptor, content[written:])
        except OSError as error:
            raise T3DError(f"cannot write {self.path}: {error.strerror}.") from error
        self.mark = mark
        self._copy.append(self._deflate.compress(content))

    def sync(self) -> Mark:
        """Flush all rows to disk; write the file again if it was removed or replaced."""
        assert self._descriptor is not None, "call begin() first"
        try:
            with self._folder() as folder:
                if not folder.holds(NAME, self._descriptor, self.mark.size):
                    self._rewrite(folder)
            os.fsync(self._descriptor)
        except OSError as error:
            raise T3DError(f"cannot write {self.path}: {error.strerror}.") from error
        return self.mark

    def _rewrite(self, folder: Folder) -> None:
        folder.write(NAME, zlib.decompress(b"".join([*self._copy, self._deflate.copy().flush()])))
        self._open(folder, self.mark)
        self.say(f"{self.path} was removed or changed during the run: all its rows were written again.")

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    # ------------------------------------------------------------------------------------------ reading

    def rows(self, least: Mark | None = None) -> list[dict[str, Any]]:
        """Read all complete rows, at least up to `least`. Warn about a truncated last row and leave it out."""
        found, last, least = [], Mark(), least or Mark()
        for last, row in self._lines():
            if last.rows == least.rows and last != least:
                raise T3DError(f"{self.path}, line {last.rows}: {_DAMAGED}")
            found.append(row)
        if len(found) < least.rows:
            raise T3DError(f"{self.path} ends after row {len(found)}, but a checkpoint recorded {least.rows}: {_LOST}")
        if warning := self._truncated_row(last):
            warn(warning)
        return found

    def after(self, mark: Mark) -> tuple[list[dict[str, Any]], str]:
        """Return the complete rows after `mark`, and a message if a row after them is truncated or damaged."""
        found, last = [], Mark()
        try:
            for last, row in self._lines():
                found += [row] if last.rows > mark.rows else []
        except T3DError as damage:
            return found, str(damage)
        return found, self._truncated_row(last)

    def positions(self) -> "Positions":
        """Read the checksums once, to check the marks of several checkpoints."""
        found = Positions(self.path)
        try:
            for mark, _ in _chained(self._file_lines(), self.path):
                found.add(mark)
        except T3DError as damage:
            found.damage = damage
        return found

    def _truncated_row(self, last: Mark) -> str:
        """Return a message if there are bytes after the last complete row."""
        with self._folder() as folder:
            rest = folder.size(NAME) - last.size
        return f"{self.path}, line {last.rows + 1}, is cut off after {rest} bytes: it is ignored." if rest > 0 else ""

    def _lines(self) -> Iterator[tuple[Mark, dict[str, Any]]]:
        return _checked(self._file_lines(), self.path)

    def _file_lines(self) -> Iterator[bytes]:
        with self._folder() as folder:
            descriptor = folder.open_file(NAME, os.O_RDONLY)
        with os.fdopen(descriptor, "rb") as file:
            yield from iter(lambda: file.readline(LONGEST), b"")


class Positions:
    """The position after each row, and the damage that ends the rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage: T3DError | None = None
        self._sizes, self._chains = array("Q"), array("Q")  # compact: a run may have a million rows

    def add(self, mark: Mark) -> None:
        self._sizes.append(mark.size)
        self._chains.append(int(mark.chain, 16))

    def check(self, mark: Mark) -> None:
        """Raise T3DError unless the rows up to `mark` are those of the checkpoint."""
        if mark.rows > len(self._sizes):
            raise self.damage or T3DError(f"{self.path} ends before row {mark.rows}: {_LOST}")
        if mark.rows and (mark.size, int(mark.chain, 16)) != (self._sizes[mark.rows - 1], self._chains[mark.rows - 1]):
            raise T3DError(f"{self.path}, line {mark.rows}: {_DAMAGED}")


_DAMAGED = "the checksum does not match: this row is damaged, or a row before it is missing."
_LOST = "rows are missing."


def _chained(lines: Iterator[bytes], path: Path) -> Iterator[tuple[Mark, bytes]]:
    """Check the checksums and yield rows, each with the position after it; ignore an incomplete last row."""
    mark = Mark()
    for line in lines:
        if not line.endswith(b"\n"):
            if len(line) == LONGEST:
                raise T3DError(f"{path}, line {mark.rows + 1}, is longer than {LONGEST:,} bytes.")
            return
        text, chain = line[: -_TAIL - 1] + b"}", _chain(mark.chain, line[: -_TAIL - 1] + b"}")
        if line[-_TAIL - 1 :] != f', "chain": "{chain}"}}\n'.encode():
            raise T3DError(f"{path}, line {mark.rows + 1}: {_DAMAGED}")
        mark = Mark(mark.size + len(line), mark.rows + 1, chain)
        yield mark, text


def _checked(lines: Iterator[bytes], path: Path) -> Iterator[tuple[Mark, dict[str, Any]]]:
    """Check and parse rows, as `_chained`."""
    for mark, text in _chained(lines, path):
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise T3DError(f"{path}, line {mark.rows}, is not valid JSON ({str(error)[:120]}).") from error
        if problem := _problem(row, mark.rows - 1):
            raise T3DError(f"{path}, line {mark.rows}, is not a row of metrics: {problem}.")
        del row["n"]
        yield mark, row


def _chain(before: str, text: bytes) -> str:
    return blake2b(before.encode() + text, digest_size=_DIGITS // 2).hexdigest()


def _problem(row: Any, number: int) -> str:
    """Return what is wrong with a row, or ""."""
    if not isinstance(row, dict):
        return "it is not an object"
    if type(row.get("n")) is not int or row["n"] != number:
        return f"its number is {row.get('n')!r}, not {number}"
    if not isinstance(row.get("kind"), str):
        return "it has no kind"
    for name in ("step", "seed"):
        if type(row.get(name)) is not int or row[name] < 0:
            return f"its {name} is {row.get(name)!r}"
        if row[name] > MOST_STEPS:
            return f"its {name} is {row[name]!r}"
    for name, value in row.items():
        parts = value if isinstance(value, list) else [value]
        if not (isinstance(value, str | bool) or all(map(_is_number, parts))):
            return f"its {name} is not a number"
    if row["kind"] == "episode" and (row.get("return") is None or not _is_number(row["return"])):
        return f"its return is {row.get('return')!r}"
    if row["kind"] == "evaluation":
        returns, lengths = row.get("returns"), row.get("lengths")
        if not (isinstance(returns, list) and all(_is_number(value) for value in returns) and returns):
            return "its returns are not numbers"
        if not (isinstance(lengths, list) and all(type(length) is int and length >= 0 for length in lengths)):
            return "its lengths are not whole numbers"
        if len(lengths) != len(returns):
            return "it has different numbers of lengths and returns"
        if "mean" not in row or not _is_number(row["mean"]):
            return f"its mean is {row.get('mean')!r}"
    return ""


def _is_number(value: Any) -> bool:
    """Whether a value is null, a whole number or a finite float."""
    kind = type(value)
    return value is None or (kind is int and abs(value) < MOST_STEPS) or (kind is float and isfinite(value))
