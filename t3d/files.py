"""Every file that T3D writes or reads goes through here.

A file is written aside, flushed to the disk and renamed, and then its folder is flushed: after a crash there is the old
file or the new one, never half of one. Room on the disk is reserved first, so that a full one is found out before
anything is half written; where flushing fails, nothing is tried twice, because the system may have dropped what it
could not write: the file aside is given up. Only metrics.jsonl grows line by line. What is read is JSON or safetensors:
numbers and names, nothing that can run.

A `Folder` is open: names in it are looked up there, whatever becomes of its path, and no link is followed. It reads and
writes regular files only, creates files exclusively, and refuses links, pipes and devices. A path that the user
typed may be a link itself.
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

# Linux and macOS look names up in an open folder; elsewhere a path is checked first, and then used.
RELATIVE = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW") and hasattr(os, "O_DIRECTORY")
PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
MOST_JSON = 2**24  # bytes
MOST_PARTS = 200_000  # objects and lists in JSON
DEEPEST_JSON = 64
MOST_TENSORS = 2**28  # bytes of a file that is not measured by anything else
MOST_HEADER = 2**20  # bytes of the header of a safetensors file, where that is read by itself
MOST_NAMES, MOST_DIMS = 10_000, 8  # tensors in a file, and their dimensions
LARGEST_COUNT = 2**53  # that a file may speak of
DENSE = 2**23  # bytes above which a file may not be sparse
SUM = "sha256"  # the key of a checksum in JSON
SEALED = "t3d"  # and of the JSON in the header of sealed tensors
DTYPES = (torch.float64, torch.float32, torch.int64, torch.uint8, torch.bool)


def promises_off() -> list[str]:
    """A sentence for each promise that this operating system does not let T3D keep."""
    off = []
    if not RELATIVE:
        off.append("This system cannot open files relative to a folder: use run folders of people you trust only.")
    if fcntl is None:
        off.append("This system has no flock: nothing keeps a second process from writing to the same run folder.")
    return off


Identity = tuple[int, int]


@dataclass(frozen=True)
class Written:
    """What is known of a file that was written, to find out later whether it still is the same."""

    size: int
    sha256: str


class Folder:
    """An open folder. Names in it are used without following links."""

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self.path, self._at = path, descriptor

    @staticmethod
    def open(path: Path, make: bool = False, same: "Identity | None" = None, called: Path | None = None) -> "Folder":
        """The folder at a path that the user gave; links on the way to it are followed.

        With `same` it must be the folder that this was the identity of; `called` is its path in sentences.
        """
        with _sentence("make the folder" if make else "open the folder", path):
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
                raise T3DError(f"{path} is another folder than before: it was moved or replaced while it was in use.")
            return folder

    def identity(self) -> "Identity":
        """What tells it from every other folder there is."""
        now = os.stat(self.path if self._at is None else self._at)  # noqa: PTH116
        return now.st_dev, now.st_ino

    def inside(self, name: str, make: bool = False) -> "Folder":
        """A real folder in this one; a link to one is refused."""
        path = self.path / name
        if make and self.kind(name) is None:
            with _sentence("make the folder", path), suppress(FileExistsError):
                os.mkdir(self._name(name), dir_fd=self._at)
        if (kind := self.kind(name)) != "folder":
            raise T3DError(f"{path} is {_article(kind)}, not a folder; T3D follows no links inside a run folder.")
        with _sentence("open the folder", path):
            return Folder(
                path, os.open(name, os.O_RDONLY | os.O_DIRECTORY | PLAIN, dir_fd=self._at) if RELATIVE else None
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._at is not None:
            os.close(self._at)
            self._at = None

    def _name(self, name: str) -> str:
        return name if RELATIVE else str(self.path / name)

    def kind(self, name: str) -> str | None:
        """What a name stands for: file, folder, link, something else, or None where there is nothing."""
        try:
            mode = os.stat(self._name(name), dir_fd=self._at, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _cannot("look at", self.path / name, error) from error
        kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link", stat.S_IFIFO: "pipe"}
        return kinds.get(stat.S_IFMT(mode), "device or socket")

    def names(self) -> list[str]:
        """Everything in it, in order."""
        with _sentence("read the folder", self.path):
            return sorted(os.listdir(self.path if self._at is None else self._at))  # noqa: PTH208

    def open_file(self, name: str, flags: int) -> int:
        """A descriptor of a regular file that is there; for writing, of one that has no other name (hard link)."""
        path = self.path / name
        if (kind := self.kind(name)) not in ("file", None):  # before it is opened: a device may act on that
            raise T3DError(f"{path} is {_article(kind)}, not a file; T3D follows no links inside a run folder.")
        with _sentence("read" if flags & 3 == os.O_RDONLY else "write", path):
            descriptor = os.open(self._name(name), flags | PLAIN, dir_fd=self._at)
        try:
            now = os.fstat(descriptor)
            if not stat.S_ISREG(now.st_mode):
                raise T3DError(f"{path} is not a regular file.")
            if flags & 3 != os.O_RDONLY and now.st_nlink > 1:
                raise T3DError(f"{path} has other names (hard links), and writing would change those too: remove it.")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def create(self, name: str) -> int:
        """A descriptor of a new file to append to; one that is there is refused."""
        with _sentence("write", self.path / name):
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | PLAIN
            return os.open(self._name(name), flags, 0o666, dir_fd=self._at)

    def size(self, name: str) -> int:
        """Bytes of a file."""
        with _sentence("read", self.path / name):
            return os.stat(self._name(name), dir_fd=self._at, follow_symlinks=False).st_size

    def holds(self, name: str, descriptor: int, size: int) -> bool:
        """Whether a file that is open still has this name, and so many bytes."""
        try:
            there, ours = os.stat(self._name(name), dir_fd=self._at, follow_symlinks=False), os.fstat(descriptor)
        except FileNotFoundError:
            return False
        return (there.st_ino, there.st_dev, there.st_size) == (ours.st_ino, ours.st_dev, size)

    def read(self, name: str, most: int, tensors: bool = False) -> bytes:
        """A whole file of at most so many bytes; with `tensors` its header must speak of as many as there are."""
        return _read(self.open_file(name, os.O_RDONLY), self.path / name, most, tensors)

    def read_json(self, name: str) -> dict[str, Any]:
        """The object in a JSON file."""
        return parse_object(self.read(name, MOST_JSON), self.path / name)

    def sha256(self, name: str) -> str:
        """The SHA-256 of a file, in hexadecimal; it is never in memory as a whole."""
        with _sentence("read", self.path / name), os.fdopen(self.open_file(name, os.O_RDONLY), "rb") as file:
            _refuse_sparse(file.fileno(), self.path / name)
            return hashlib.file_digest(file, "sha256").hexdigest()

    def write(self, name: str, content: bytes) -> Written:
        """Put `content` there, whole or not at all, and on the disk when this returns."""
        path, aside = self.path / name, f".{name}.part"
        if (kind := self.kind(name)) not in ("file", None):
            raise T3DError(f"{path} is {_article(kind)}, not a file: T3D does not write over it.")
        if self.kind(aside) is not None:
            self.remove(aside)  # an interrupted write left it
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | PLAIN
            with os.fdopen(os.open(self._name(aside), flags, 0o666, dir_fd=self._at), "wb") as file:
                if content and hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, len(content))
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(self._name(aside), self._name(name), src_dir_fd=self._at, dst_dir_fd=self._at)
            self.sync()
        except OSError as error:
            with suppress(T3DError):
                self.remove(aside)
            raise _cannot("write", path, error) from error
        return Written(len(content), hashlib.sha256(content).hexdigest())

    def write_json(self, name: str, value: Any) -> Written:
        """A JSON file that people can read."""
        return self.write(name, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())

    def remove(self, name: str) -> None:
        """A regular file; one that is gone already is fine, and anything else is left alone and refused."""
        path = self.path / name
        if (kind := self.kind(name)) is None:
            return
        if kind != "file":
            raise T3DError(f"{path} is {_article(kind)}, not a file that T3D wrote: look at it and remove it yourself.")
        with _sentence("remove", path), suppress(FileNotFoundError):
            os.unlink(self._name(name), dir_fd=self._at)

    def remove_empty(self, name: str) -> None:
        """A folder in it, if it is one and holds nothing."""
        if self.kind(name) == "folder":
            with suppress(OSError):
                os.rmdir(self._name(name), dir_fd=self._at)

    def sync(self) -> None:
        """Names that were made, changed or removed, on the disk."""
        if self._at is not None:
            os.fsync(self._at)

    def lock(self, name: str, sentence: str) -> IO[str]:
        """Hold `name` until the file that is returned is closed or this process ends, however it ends.

        Where another process holds it, `sentence` says so, with what that one wrote there in place of {}.
        """
        with suppress(FileExistsError), _sentence("write", self.path / name, but=FileExistsError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | PLAIN
            os.close(os.open(self._name(name), flags, 0o666, dir_fd=self._at))
        file = os.fdopen(self.open_file(name, os.O_RDWR), "r+", encoding="utf-8", errors="replace")
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = file.read(200).strip() or "another process"
            file.close()
            raise T3DError(sentence.replace("{}", holder)) from error
        with suppress(OSError):  # who holds it is a courtesy: a full disk is no reason to stop here
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        return file


def _article(kind: str | None) -> str:
    return "missing" if kind is None else f"a {kind}"


def _cannot(what: str, path: Path, error: OSError) -> T3DError:
    if error.errno == errno.ELOOP:
        return T3DError(f"{path} is a link: T3D follows no links inside a run folder.")
    return T3DError(f"cannot {what} {path}: {error.strerror}.")


@contextmanager
def _sentence(what: str, path: Path, but: type[OSError] | tuple[()] = ()) -> Iterator[None]:
    """An error of the operating system, except one kind, as one sentence."""
    try:
        yield
    except but:
        raise
    except ValueError as error:
        if isinstance(error, T3DError):
            raise
        raise T3DError(f"cannot {what} {path}: {error}.") from error  # a name with a zero byte
    except OSError as error:
        raise _cannot(what, path, error) from error


def _read(descriptor: int, path: Path, most: int, tensors: bool = False) -> bytes:
    with _sentence("read", path), os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        # The system's own files in /proc say that they have no bytes.
        asked = min(size or 2**20, most) + 1 if size <= most else 0
        if asked:
            _refuse_sparse(descriptor, path)
        content = file.read(min(asked, MOST_HEADER + 8))
        if tensors and asked:  # before memory is taken for the rest
            _refuse_other_size(content, size, path)
        content += file.read(asked - len(content))
    if size > most or len(content) > most:
        raise T3DError(f"{path} has {size:,} bytes; at most {most:,} are expected.")
    return content


def _refuse_sparse(descriptor: int, path: Path) -> None:
    """A large file of holes takes no room on the disk, and all of its size in memory. T3D writes none."""
    now = os.fstat(descriptor)
    # Some file systems count blocks late; these know their holes.
    few = now.st_size > DENSE and getattr(now, "st_blocks", now.st_size) * 512 < now.st_size // 2
    if few and os.lseek(descriptor, 0, os.SEEK_HOLE) < now.st_size:
        raise T3DError(f"{path} is a sparse file, which T3D does not write.")
    os.lseek(descriptor, 0, os.SEEK_SET)


# ------------------------------------------------------------------------------------- paths that the user gave


def make_folder(path: Path) -> Path:
    """The folder, made if need be."""
    with Folder.open(path, make=True):
        return path


def read_bytes(path: Path, most: int = MOST_TENSORS, tensors: bool = False) -> bytes:
    """A whole file; the path may be a link, and what it leads to must be a regular file."""
    with _sentence("read", path):
        if not stat.S_ISREG(path.stat().st_mode):  # before it is opened: a device may act on that
            raise T3DError(f"{path} is not a regular file.")
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise T3DError(f"{path} is not a regular file.")
    return _read(descriptor, path, most, tensors)


def read_text(path: Path) -> str:
    """The text of a file."""
    try:
        return read_bytes(path, MOST_JSON).decode()
    except UnicodeDecodeError as error:
        raise T3DError(f"{path} is not text.") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    return parse_object(read_bytes(path, MOST_JSON), path)


def write_bytes(path: Path, content: bytes) -> Written:
    """Put `content` at `path`, whole or not at all, and on the disk when this returns."""
    with Folder.open(path.parent) as folder:
        return folder.write(path.name, content)


def write_json(path: Path, value: Any) -> Written:
    """A JSON file that people can read."""
    with Folder.open(path.parent) as folder:
        return folder.write_json(path.name, value)


# ------------------------------------------------------------------------------------------------------ JSON


def parse_object(content: bytes, where: Path | str) -> dict[str, Any]:
    """The object in JSON of anybody's: no NaN, no infinity, not deep."""
    if content.count(b"{") + content.count(b"[") > MOST_PARTS:
        raise T3DError(f"{where} has more than {MOST_PARTS:,} objects and lists in it.")
    try:
        value = json.loads(content, parse_constant=_refuse, parse_float=_finite)
        _refuse_depth(value)
    except (ValueError, RecursionError) as error:
        raise T3DError(f"{where} is not valid JSON ({_short(error)}).") from error
    if not isinstance(value, dict):
        raise T3DError(f"{where} holds a JSON {type(value).__name__}, not an object.")
    return value


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is no finite number")
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
    """JSON values with a checksum of them."""
    return {SUM: _sum(values), **values}


def without_sum(values: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """The values alone, if they are as they were written."""
    rest = {name: value for name, value in values.items() if name != SUM}
    if values.get(SUM) != _sum(rest):
        raise T3DError(f"{where} does not match its own checksum: it was damaged or changed after it was written.")
    return rest


def _sum(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


# -------------------------------------------------------------------------------------------------- safetensors


def pack(tensors: Mapping[str, Tensor], about: dict[str, str] | None = None) -> bytes:
    """A safetensors file."""
    return safetensors.torch.save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, about)


def unpack(content: bytes, where: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    _parts(content, where)
    try:
        tensors = dict(safetensors.torch.load(content))
    # Types that PyTorch does not have, and sizes that no machine has, are no SafetensorError.
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError, RuntimeError, MemoryError) as error:
        raise T3DError(f"{where} is not a safetensors file, or is damaged ({_short(error)}).") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:  # most operations do not know them
            raise T3DError(f"{where}: {shown(name)} is of the type {tensor.dtype}, which T3D does not write.")
    return tensors


def seal(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> bytes:
    """A safetensors file with a checksum of all its bytes in its header."""
    # In one entry: several would stand in another order each time.
    content = pack(tensors, {SEALED: json.dumps({SUM: "0" * 64, **{k: v for k, v in about.items() if k != SUM}})})
    return content.replace(b"0" * 64, hashlib.sha256(content).hexdigest().encode(), 1)


def unseal(content: bytes, where: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and what is said about them, if the file is as `seal` made it."""
    metadata = header(content, where).get("__metadata__")
    text = metadata.get(SEALED) if isinstance(metadata, dict) else None
    about = parse_object(text.encode(errors="replace"), where) if isinstance(text, str) else {}
    found = about.get(SUM)
    if not (isinstance(found, str) and len(found) == 64 and found.isascii()):
        raise T3DError(f"{where} has no checksum: it is damaged, or was not written by this version of T3D.")
    if hashlib.sha256(content.replace(found.encode(), b"0" * 64, 1)).hexdigest() != found:
        raise T3DError(f"{where} does not match its own checksum: it was damaged or changed after it was written.")
    return unpack(content, where), {name: value for name, value in about.items() if name != SUM}


def header(content: bytes, where: Path) -> dict[str, Any]:
    """The header of a safetensors file of which at least that is there."""
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or size > min(MOST_JSON, len(content) - 8):
        raise T3DError(f"{where} is not a safetensors file, or is damaged (its header does not fit).")
    return parse_object(content[8 : 8 + size], where)


def _refuse_other_size(content: bytes, size: int, where: Path) -> None:
    """Refuse a safetensors file, of which the beginning is given, that is longer or shorter than its header says."""
    end = max((end for _, end in _parts(content, where).values()), default=0)
    if (said := 8 + int.from_bytes(content[:8], "little") + end) != size:
        raise T3DError(f"{where} has {size:,} bytes, and its header speaks of {said:,}: it is damaged.")


def _parts(content: bytes, where: Path) -> dict[str, tuple[tuple[int, ...], int]]:
    """Of each tensor in a header its shape, and where it ends."""
    try:
        found = {
            name: (tuple(map(int, part["shape"][: MOST_DIMS + 1])), int(part["data_offsets"][1]))
            for name, part in header(content, where).items()
            if name != "__metadata__"
        }
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise T3DError(f"{where} is not a safetensors file, or is damaged ({_short(error)}).") from error
    if len(found) > MOST_NAMES or any(len(shape) > MOST_DIMS for shape, _ in found.values()):
        raise T3DError(f"{where} has more than {MOST_NAMES:,} tensors, or one of more than {MOST_DIMS} dimensions.")
    return found


def shapes(folder: Folder, name: str, size: int) -> dict[str, tuple[int, ...]]:
    """The shapes in a safetensors file of so many bytes, without reading the rest of it."""
    path = folder.path / name
    with _sentence("read", path), os.fdopen(folder.open_file(name, os.O_RDONLY), "rb") as file:
        now = os.fstat(file.fileno()).st_size
        _refuse_sparse(file.fileno(), path)
        content = file.read(MOST_HEADER + 8)
    if now != size:
        raise T3DError(f"{path} has {now:,} bytes where {size:,} were written: it is damaged.")
    _refuse_other_size(content, now, path)
    return {name: shape for name, (shape, _) in _parts(content, path).items()}


def refuse_numbers(where: Path, given: Mapping[str, Tensor], allowed: Callable[[str, Tensor], bool]) -> None:
    """Name the first tensor that holds what no run writes: a number that is not finite, a negative or a huge count.

    `allowed` tells, for a tensor with one of those, whether that is as it should be.
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
            what = (
                "numbers that are not finite" if tensor.is_floating_point() else "a negative count, or one beyond 2^53"
            )
            raise T3DError(f"{where}: {name} holds {what}.")


def refuse_mismatch(path: Path, given: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> None:
    """Refuse tensors whose names, shapes or types are not those of the live ones."""
    if given.keys() != live.keys():
        odd = ", ".join(sorted(given.keys() ^ live.keys())[:5])
        raise T3DError(f"{path} does not hold what is expected of it: {plain(odd)} is missing or too many.")
    for name, tensor in live.items():
        new = given[name]
        if new.shape != tensor.shape:
            shapes = f"{tuple(new.shape)}, not {tuple(tensor.shape)}"
            raise T3DError(f"{path}: {name} has the shape {shapes}; it belongs to another network.")
        if new.dtype != tensor.dtype and not {new.dtype, tensor.dtype} <= {torch.float32, torch.float64}:
            raise T3DError(f"{path}: {name} is of the type {new.dtype}, not {tensor.dtype}.")
        if new.dtype != tensor.dtype and not torch.equal(new.isfinite(), new.to(tensor.dtype).isfinite()):
            raise T3DError(f"{path}: {name} holds numbers that are too large for {tensor.dtype}.")


def copy_tensors(path: Path, given: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> None:
    """Overwrite the live tensors with those read from `path`, or change none of them."""
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
