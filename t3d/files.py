"""Reads and writes all files of T3D, durably and without following links.

Writes are atomic: T3D writes a temporary file, flushes it to disk, renames it and flushes the folder. After a crash the
old file or the new one is there. Disk space is reserved first, so a full disk is detected before any data is written. A
failed flush is not retried, because the system may have dropped the data: the temporary file is removed. Only
metrics.jsonl is appended to. T3D reads JSON and safetensors, which contain no code.

A `Folder` holds an open directory descriptor. Names are resolved relative to it, so replacing its path has no effect.
It accepts regular files only, creates files exclusively, and refuses links, pipes and devices. A path that the user
typed may be a link.
"""

import errno
import hashlib
import json
import math
import os
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from t3d.errors import T3DError, plain, shown

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

# Linux and macOS look names up in an open folder. Elsewhere a path is checked and then used: a race is possible.
RELATIVE = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW") and hasattr(os, "O_DIRECTORY")
# Flags that not every system has. O_BINARY is for Windows, where a descriptor otherwise translates line ends.
PLAIN: int = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
MOST_JSON = 2**24  # bytes
MOST_PARTS = 200_000  # objects and lists in JSON
DEEPEST_JSON = 64
MOST_TENSORS = 2**28  # bytes of a file whose expected size is unknown
MOST_HEADER = 2**20  # bytes of the header of a safetensors file, if only the header is read
MOST_NAMES, MOST_DIMS = 10_000, 8  # tensors in a file; dimensions of a tensor
LARGEST_COUNT = 2**53  # in a file
DENSE = 2**20  # bytes; a larger file must not be sparse
SUM = "sha256"  # the key of a checksum in JSON
SEALED = "t3d"  # the key of the JSON in the header of sealed tensors
DTYPES = (torch.float64, torch.float32, torch.int64, torch.uint8, torch.bool)


def promises_off() -> list[str]:
    """Return a sentence for each guarantee that this operating system does not support."""
    off = []
    if not RELATIVE:
        off.append("This system cannot open files relative to a folder: use run folders of people you trust only.")
    if fcntl is None:
        off.append(
            "This system has no flock: run folders are not locked. Use each run folder from one process at a time."
        )
    return off


Identity = tuple[int, int]


@dataclass(frozen=True)
class Written:
    """Size and hash of a written file, to detect later changes."""

    size: int
    sha256: str


class Folder:
    """An open folder. Access to names in it does not follow links."""

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self.path, self._descriptor = path, descriptor

    @staticmethod
    def open(path: Path, make: bool = False, same: "Identity | None" = None, called: Path | None = None) -> "Folder":
        """Open the folder at a path from the user; this follows links.

        `same` is the identity that the folder must have. `called` is the path to show in messages.
        """
        with _os_errors("make the folder" if make else "open the folder", path):
            if make:
                path.mkdir(parents=True, exist_ok=True)
            if not path.is_dir():
                raise T3DError(f"{path} is not a folder.")
            if not RELATIVE:
                folder = Folder(path, None)
            else:
                folder = Folder(called or path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            if same is not None and folder.identity() != same:
                folder.__exit__()
                raise T3DError(
                    f"{path} is a different folder than before: it was moved or replaced while it was in use."
                )
            return folder

    def identity(self) -> "Identity":
        """Device and inode, which identify the folder."""
        status = os.stat(self.path if self._descriptor is None else self._descriptor)  # noqa: PTH116
        return status.st_dev, status.st_ino

    def inside(self, name: str, make: bool = False) -> "Folder":
        """Open a subfolder; refuse a link to one."""
        path = self.path / name
        if make and self.kind(name) is None:
            with _os_errors("make the folder", path), suppress(FileExistsError):
                os.mkdir(self._name(name), dir_fd=self._descriptor)
        if (kind := self.kind(name)) != "folder":
            raise T3DError(f"{path} is {_with_article(kind)}, not a folder; T3D follows no links inside a run folder.")
        with _os_errors("open the folder", path):
            return Folder(
                path, os.open(name, os.O_RDONLY | os.O_DIRECTORY | PLAIN, dir_fd=self._descriptor) if RELATIVE else None
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _name(self, name: str) -> str:
        return name if RELATIVE else str(self.path / name)

    def kind(self, name: str) -> str | None:
        """The kind of entry: file, folder, link, pipe, device or socket; None if it does not exist."""
        try:
            with _os_errors("look at", self.path / name, but=FileNotFoundError):
                mode = os.stat(self._name(name), dir_fd=self._descriptor, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return None
        kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link", stat.S_IFIFO: "pipe"}
        return kinds.get(stat.S_IFMT(mode), "device or socket")

    def names(self) -> list[str]:
        """The sorted names of all entries."""
        with _os_errors("read the folder", self.path):
            return sorted(os.listdir(self.path if self._descriptor is None else self._descriptor))  # noqa: PTH208

    def open_file(self, name: str, flags: int) -> int:
        """Open an existing regular file; for writing, refuse one with hard links."""
        path = self.path / name
        if (kind := self.kind(name)) not in ("file", None):  # before opening: a device may react to that
            raise T3DError(f"{path} is {_with_article(kind)}, not a file; T3D follows no links inside a run folder.")
        with _os_errors("read" if flags & 3 == os.O_RDONLY else "write", path):
            descriptor = os.open(self._name(name), flags | PLAIN, dir_fd=self._descriptor)
        try:
            now = os.fstat(descriptor)
            if not stat.S_ISREG(now.st_mode):
                raise T3DError(f"{path} is not a regular file.")
            if flags & 3 != os.O_RDONLY and now.st_nlink > 1:
                raise T3DError(f"{path} has hard links, and writing would change the other names too: remove it.")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def create(self, name: str) -> int:
        """Create a file to append to; refuse an existing one."""
        with _os_errors("write", self.path / name):
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | PLAIN
            return os.open(self._name(name), flags, 0o666, dir_fd=self._descriptor)

    def size(self, name: str) -> int:
        """The size of a file in bytes."""
        with _os_errors("read", self.path / name):
            return os.stat(self._name(name), dir_fd=self._descriptor, follow_symlinks=False).st_size

    def holds(self, name: str, descriptor: int, size: int) -> bool:
        """Whether this name still belongs to the open file, and the file has `size` bytes."""
        try:
            there, ours = (
                os.stat(self._name(name), dir_fd=self._descriptor, follow_symlinks=False),
                os.fstat(descriptor),
            )
        except FileNotFoundError:
            return False
        return (there.st_ino, there.st_dev, there.st_size) == (ours.st_ino, ours.st_dev, size)

    def read(self, name: str, most: int, tensors: bool = False) -> bytes:
        """Read a file of at most `most` bytes. With `tensors`, its header must match its size."""
        return _read(self.open_file(name, os.O_RDONLY), self.path / name, most, tensors)

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON file that holds an object."""
        return parse_object(self.read(name, MOST_JSON), self.path / name)

    def sha256(self, name: str, known: dict[tuple[int, ...], str] | None = None) -> str:
        """The SHA-256 of a file in hexadecimal, computed without loading the whole file.

        `known` caches the hashes of files by inode, so that a file with many names is read once.
        """
        known = {} if known is None else known
        with _os_errors("read", self.path / name), os.fdopen(self.open_file(name, os.O_RDONLY), "rb") as file:
            _refuse_sparse(file.fileno(), self.path / name)
            now = os.fstat(file.fileno())
            key = now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns
            if key not in known:
                known[key] = hashlib.file_digest(file, "sha256").hexdigest()
            return known[key]

    def write(self, name: str, content: bytes) -> Written:
        """Write a file atomically; its content is on disk when this returns."""
        path, temporary = self.path / name, f".{name}.part"
        if (kind := self.kind(name)) not in ("file", None):
            raise T3DError(f"{path} is {_with_article(kind)}, not a file: T3D does not overwrite it.")
        if self.kind(temporary) is not None:
            self.remove(temporary)  # left by an interrupted write
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | PLAIN
            with os.fdopen(os.open(self._name(temporary), flags, 0o666, dir_fd=self._descriptor), "wb") as file:
                if content and hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, len(content))
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(
                self._name(temporary), self._name(name), src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor
            )
            self.sync()
        except OSError as error:
            with suppress(T3DError):
                self.remove(temporary)
            raise _cannot("write", path, error) from error
        return Written(len(content), hashlib.sha256(content).hexdigest())

    def write_json(self, name: str, value: Any) -> Written:
        """Write a JSON file with indentation."""
        return self.write(name, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())

    def remove(self, name: str) -> None:
        """Remove a regular file if it exists; refuse any other kind of entry."""
        path = self.path / name
        if (kind := self.kind(name)) is None:
            return
        if kind != "file":
            raise T3DError(
                f"{path} is {_with_article(kind)}, not a file that T3D wrote: check it and remove it yourself."
            )
        with _os_errors("remove", path), suppress(FileNotFoundError):
            os.unlink(self._name(name), dir_fd=self._descriptor)

    def remove_empty(self, name: str) -> None:
        """Remove a subfolder if it is empty."""
        if self.kind(name) == "folder":
            with suppress(OSError):
                os.rmdir(self._name(name), dir_fd=self._descriptor)

    def sync(self) -> None:
        """Flush created, renamed and removed names to disk."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def lock(self, name: str, sentence: str) -> IO[bytes]:
        """Lock `name` until the returned file is closed or this process ends.

        If another process holds the lock, raise `sentence`, with {} replaced by that process's description.
        """
        with suppress(FileExistsError), _os_errors("write", self.path / name, but=FileExistsError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | PLAIN
            os.close(os.open(self._name(name), flags, 0o666, dir_fd=self._descriptor))
        # Unbuffered, so that closing it does not write again after a failed write.
        file = os.fdopen(self.open_file(name, os.O_RDWR), "r+b", buffering=0)
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = file.read(200).decode(errors="replace").strip() or "another process"
            file.close()
            raise T3DError(sentence.replace("{}", holder)) from error
        with suppress(OSError):  # the description is optional: ignore a full disk
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        return file


def _with_article(kind: str | None) -> str:
    return "missing" if kind is None else f"a {kind}"


def _cannot(what: str, path: Path, error: OSError) -> T3DError:
    if error.errno == errno.ELOOP:
        return T3DError(f"{path} is a link: T3D follows no links inside a run folder.")
    return T3DError(f"cannot {what} {path}: {error.strerror}.")


@contextmanager
def _os_errors(what: str, path: Path, but: type[OSError] | tuple[()] = ()) -> Iterator[None]:
    """Turn an OSError into a T3DError, except errors of type `but`."""
    try:
        yield
    except but:
        raise
    except ValueError as error:
        if isinstance(error, T3DError):
            raise
        raise T3DError(f"cannot {what} {path}: {error}.") from error  # a null byte in the name
    except OSError as error:
        raise _cannot(what, path, error) from error


def _read(descriptor: int, path: Path, most: int, tensors: bool = False) -> bytes:
    with _os_errors("read", path), os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        # Files in /proc report a size of 0.
        to_read = min(size or 2**20, most) + 1 if size <= most else 0
        if to_read:
            _refuse_sparse(descriptor, path)
        content = file.read(min(to_read, MOST_HEADER + 8))
        if tensors and to_read:  # before allocating memory for the rest
            _refuse_other_size(content, size, path)
        content += file.read(to_read - len(content))
    if size > most or len(content) > most:
        raise T3DError(f"{path} has {size:,} bytes; the limit is {most:,}.")
    return content


def _refuse_sparse(descriptor: int, path: Path) -> None:
    """Refuse a large sparse file: it takes little disk space, but its full size in memory. T3D writes none."""
    now = os.fstat(descriptor)
    # The block count may lag behind on some file systems: also look for a hole.
    sparse = now.st_size > DENSE and getattr(now, "st_blocks", now.st_size) * 512 < now.st_size // 2
    if sparse and os.lseek(descriptor, 0, os.SEEK_HOLE) < now.st_size:
        raise T3DError(f"{path} is a sparse file, which T3D does not write.")
    os.lseek(descriptor, 0, os.SEEK_SET)


# ------------------------------------------------------------------------------------- paths from the user


def make_folder(path: Path) -> Path:
    """Make the folder if it does not exist."""
    with Folder.open(path, make=True):
        return path


def read_bytes(path: Path, most: int = MOST_TENSORS, tensors: bool = False) -> bytes:
    """Read a whole file; the path may be a link to a regular file."""
    with _os_errors("read", path):
        if not stat.S_ISREG(path.stat().st_mode):  # before opening: a device may react to that
            raise T3DError(f"{path} is not a regular file.")
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise T3DError(f"{path} is not a regular file.")
    return _read(descriptor, path, most, tensors)


def read_text(path: Path) -> str:
    """Read a text file."""
    try:
        return read_bytes(path, MOST_JSON).decode()
    except UnicodeDecodeError as error:
        raise T3DError(f"{path} is not text.") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    return parse_object(read_bytes(path, MOST_JSON), path)


def write_bytes(path: Path, content: bytes) -> Written:
    """Write a file atomically; its content is on disk when this returns."""
    with Folder.open(path.parent) as folder:
        return folder.write(path.name, content)


def write_json(path: Path, value: Any) -> Written:
    """Write a JSON file with indentation."""
    with Folder.open(path.parent) as folder:
        return folder.write_json(path.name, value)


# ------------------------------------------------------------------------------------------------------ JSON


def parse_object(content: bytes, where: Path | str, most_parts: int = MOST_PARTS) -> dict[str, Any]:
    """Parse an untrusted JSON object; refuse NaN, infinity, deep nesting and too many objects and lists."""
    if content.count(b"{") + content.count(b"[") > most_parts:
        raise T3DError(f"{where} holds more than {most_parts:,} objects and lists.")
    try:
        value = json.loads(content, parse_constant=_refuse, parse_float=_finite)
        _refuse_depth(value)
    except (ValueError, RecursionError) as error:
        raise T3DError(f"{where} is not valid JSON ({_short(error)}).") from error
    if not isinstance(value, dict):
        raise T3DError(f"{where} holds a JSON {type(value).__name__}, not an object.")
    return value


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not a number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def _refuse_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST_JSON):
        parts = (part for item in level for part in (item.values() if isinstance(item, dict) else item))
        level = [part for part in parts if isinstance(part, dict | list)]
    if level:
        raise ValueError(f"it is nested deeper than {DEEPEST_JSON} levels")


def _short(problem: object) -> str:
    text = str(problem)
    return text if len(text) <= 120 else text[:117] + "..."


def with_sum(values: Mapping[str, Any]) -> dict[str, Any]:
    """Add a checksum to JSON values."""
    return {SUM: _sum(values), **values}


def without_sum(values: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Remove the checksum from JSON values; raise T3DError if it does not match."""
    rest = {name: value for name, value in values.items() if name != SUM}
    if values.get(SUM) != _sum(rest):
        raise T3DError(f"{where} does not match its own checksum: it was damaged or changed after it was written.")
    return rest


def _sum(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


# -------------------------------------------------------------------------------------------------- safetensors


def pack(tensors: Mapping[str, Tensor], about: dict[str, str] | None = None) -> bytes:
    """Serialize tensors in the safetensors format."""
    return safetensors.torch.save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, about)


def unpack(content: bytes, where: Path) -> dict[str, Tensor]:
    """Parse a safetensors file."""
    _parts(content, where)
    try:
        tensors = dict(safetensors.torch.load(content))
    # Unknown types and impossible sizes do not raise SafetensorError.
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError, RuntimeError, MemoryError) as error:
        raise T3DError(f"{where} is not a safetensors file, or is damaged ({_short(error)}).") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:  # most operations do not support other types
            raise T3DError(f"{where}: {shown(name)} is of the type {tensor.dtype}, which T3D does not write.")
    return tensors


def seal(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> bytes:
    """Serialize tensors with a checksum of the whole file in the header."""
    # A single metadata entry: the order of several is random.
    content = pack(tensors, {SEALED: json.dumps({SUM: "0" * 64, **{k: v for k, v in about.items() if k != SUM}})})
    return content.replace(b"0" * 64, hashlib.sha256(content).hexdigest().encode(), 1)


def unseal(content: bytes, where: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parse the result of `seal`; return the tensors and the metadata. Raise T3DError if the checksum differs."""
    metadata = header(content, where).get("__metadata__")
    text = metadata.get(SEALED) if isinstance(metadata, dict) else None
    about = parse_object(text.encode(errors="replace"), where) if isinstance(text, str) else {}
    found = about.get(SUM)
    if not (isinstance(found, str) and len(found) == 64 and found.isascii()):
        raise T3DError(f"{where} has no checksum: it is damaged, or another version of T3D wrote it.")
    if hashlib.sha256(content.replace(found.encode(), b"0" * 64, 1)).hexdigest() != found:
        raise T3DError(f"{where} does not match its own checksum: it was damaged or changed after it was written.")
    return unpack(content, where), {name: value for name, value in about.items() if name != SUM}


def header(content: bytes, where: Path) -> dict[str, Any]:
    """Parse the header of a safetensors file; `content` may end after the header."""
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or size > min(MOST_JSON, len(content) - 8):
        raise T3DError(f"{where} is not a safetensors file, or is damaged (its header does not fit).")
    return parse_object(content[8 : 8 + size], where)


def _refuse_other_size(content: bytes, size: int, where: Path) -> None:
    """Refuse a safetensors file whose size does not match its header; `content` is its beginning."""
    end = max((end for _, end in _parts(content, where).values()), default=0)
    if (expected := 8 + int.from_bytes(content[:8], "little") + end) != size:
        raise T3DError(f"{where} has {size:,} bytes, but its header describes {expected:,}: it is damaged.")


def _parts(content: bytes, where: Path) -> dict[str, tuple[tuple[int, ...], int]]:
    """The shape and the end offset of each tensor in the header."""
    try:
        found = {
            name: (tuple(map(int, part["shape"][: MOST_DIMS + 1])), int(part["data_offsets"][1]))
            for name, part in header(content, where).items()
            if name != "__metadata__"
        }
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise T3DError(f"{where} is not a safetensors file, or is damaged ({_short(error)}).") from error
    if len(found) > MOST_NAMES or any(len(shape) > MOST_DIMS for shape, _ in found.values()):
        raise T3DError(f"{where} has more than {MOST_NAMES:,} tensors, or one with more than {MOST_DIMS} dimensions.")
    return found


def shapes(folder: Folder, name: str, size: int) -> dict[str, tuple[int, ...]]:
    """Read the shapes of the tensors in a safetensors file of `size` bytes; read only its header."""
    path = folder.path / name
    with _os_errors("read", path), os.fdopen(folder.open_file(name, os.O_RDONLY), "rb") as file:
        now = os.fstat(file.fileno()).st_size
        _refuse_sparse(file.fileno(), path)
        content = file.read(MOST_HEADER + 8)
    if now != size:
        raise T3DError(f"{path} has {now:,} bytes, but {size:,} were written: it is damaged.")
    _refuse_other_size(content, now, path)
    return {name: shape for name, (shape, _) in _parts(content, path).items()}


def refuse_numbers(where: Path, given: Mapping[str, Tensor], allowed: Callable[[str, Tensor], bool]) -> None:
    """Refuse tensors with values that no run writes: numbers that are not finite, negative or huge counts.

    `allowed(name, tensor)` returns True for a tensor that may hold such values.
    """
    for name, tensor in given.items():
        if tensor.is_floating_point():
            bad = not tensor.isfinite().all()
        else:
            large = (
                tensor.dtype == torch.int64 and name.split(".")[-1] != "seeds" and bool((tensor > LARGEST_COUNT).any())
            )
            bad = large or bool((tensor < 0).any())
        if bad and not allowed(name, tensor):
            what = "numbers that are not finite" if tensor.is_floating_point() else "a negative count or one above 2^53"
            raise T3DError(f"{where}: {name} holds {what}.")


def refuse_mismatch(path: Path, given: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> None:
    """Refuse tensors whose names, shapes or types differ from those in `live`."""
    if given.keys() != live.keys():
        odd = ", ".join(sorted(given.keys() ^ live.keys())[:5])
        raise T3DError(f"{path} does not hold the expected tensors: {plain(odd)} is missing or unexpected.")
    for name, tensor in live.items():
        new = given[name]
        if new.shape != tensor.shape:
            shapes = f"{tuple(new.shape)}, not {tuple(tensor.shape)}"
            raise T3DError(f"{path}: {name} has the shape {shapes}: the file belongs to another network.")
        if new.dtype != tensor.dtype and not {new.dtype, tensor.dtype} <= {torch.float32, torch.float64}:
            raise T3DError(f"{path}: {name} is of the type {new.dtype}, not {tensor.dtype}.")
        if new.dtype != tensor.dtype and not torch.equal(new.isfinite(), new.to(tensor.dtype).isfinite()):
            raise T3DError(f"{path}: {name} holds numbers too large for {tensor.dtype}.")


def copy_tensors(path: Path, given: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> None:
    """Copy the tensors read from `path` into `live`; change nothing if one does not fit."""
    refuse_mismatch(path, given, live)
    for name, tensor in live.items():
        tensor.copy_(given[name])


def refuse_format(where: Path, found: object, current: object) -> None:
    """Refuse a file whose format is not the current one."""
    if found != current:
        raise T3DError(
            f"{where} has the format {shown(found)}; this version reads {shown(current)}. Open it with the version that"
            " wrote it, or train again."
        )
