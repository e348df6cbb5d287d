"""Every file that T3D writes or reads goes through here.

A file is written aside, flushed to the disk and renamed, and then its folder is flushed: after a crash there is the old
file or the new one, never half of one. Room on the disk is reserved first, so that a full one is found out before
anything is half written; where flushing fails, nothing is tried twice, because the system may have dropped what it
could not write: the file aside is given up. Only metrics.jsonl grows line by line, and who reads it leaves out a last
line that was cut off. What is read is JSON or safetensors: numbers and names, nothing that can run.
"""

import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import safetensors
import safetensors.torch
from torch import Tensor

from t3d.errors import T3DError


def make_folder(path: Path) -> Path:
    """The folder, made if need be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise T3DError(f"cannot make the folder {path}: {error.strerror}.") from error
    return path


@dataclass(frozen=True)
class Written:
    """What is known of a file that was written, to find out later whether it still is the same."""

    size: int
    sha256: str


def write_bytes(path: Path, content: bytes) -> Written:
    """Put `content` at `path`, whole or not at all, and on the disk when this returns."""
    aside = path.with_name(f".{path.name}.part")
    try:
        with aside.open("wb") as file:
            if content and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, len(content))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise T3DError(f"cannot write {path}: {error.strerror}.") from error
    return Written(len(content), hashlib.sha256(content).hexdigest())


def sync_folder(path: Path) -> None:
    """Names that were made, changed or removed in a folder, on the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def sync(path: Path) -> int:
    """A file that grows, flushed to the disk as it is; returns its size."""
    try:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise T3DError(f"cannot write {path}: {error.strerror}.") from error


def cut(path: Path, size: int) -> None:
    """Take off what a file has behind its first `size` bytes."""
    try:
        with path.open("r+b") as file:
            if os.fstat(file.fileno()).st_size < size:
                raise T3DError(f"{path} is shorter than it was: {size:,} bytes are expected at least.")
            file.truncate(size)
            os.fsync(file.fileno())
    except OSError as error:
        raise T3DError(f"cannot write {path}: {error.strerror}.") from error


def remove(path: Path) -> None:
    """A file, or a folder with all it holds; one that is gone already is fine."""
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise T3DError(f"cannot remove {path}: {error.strerror}.") from error


def lock(path: Path, sentence: str) -> IO[str]:
    """Hold `path` until the file that is returned is closed or this process ends, however it ends.

    Where another process holds it, `sentence` says so, with what that one wrote there in place of {}.
    """
    try:
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise T3DError(f"cannot write {path}: {error.strerror}.") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise T3DError(sentence.format(holder)) from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def append_lines(path: Path, lines: list[str]) -> None:
    """Add whole lines at the end."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(line + "\n" for line in lines))
    except OSError as error:
        raise T3DError(f"cannot write {path}: {error.strerror}.") from error


def write_json(path: Path, value: Any) -> Written:
    """A JSON file that people can read."""
    return write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise T3DError(f"{path} is not valid JSON ({error}).") from error
    if not isinstance(value, dict):
        raise T3DError(f"{path} holds a JSON {type(value).__name__}, not an object.")
    return value


def read_text(path: Path) -> str:
    """The text of a file."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise T3DError(f"cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise T3DError(f"{path} is not text.") from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """A safetensors file."""
    return write_bytes(
        path, safetensors.torch.save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
    )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    try:
        return dict(safetensors.torch.load(read_bytes(path)))
    except safetensors.SafetensorError as error:
        raise T3DError(f"{path} is not a safetensors file, or is damaged ({error}).") from error


def read_bytes(path: Path) -> bytes:
    """A whole file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise T3DError(f"cannot read {path}: {error.strerror}.") from error


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(read_bytes(path)).hexdigest()


def copy_tensors(path: Path, given: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> None:
    """Overwrite the live tensors with those read from `path`, or change none of them."""
    if given.keys() != live.keys():
        odd = ", ".join(sorted(given.keys() ^ live.keys())[:5])
        raise T3DError(f"{path} does not hold what is expected of it: {odd} is missing or too many.")
    for name, tensor in live.items():
        if given[name].shape != tensor.shape:
            shapes = f"{tuple(given[name].shape)}, not {tuple(tensor.shape)}"
            raise T3DError(f"{path}: {name} has the shape {shapes}; it belongs to another network.")
    for name, tensor in live.items():
        tensor.copy_(given[name])
