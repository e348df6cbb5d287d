"""Every file that T3D writes or reads goes through here.

A file is written aside, flushed to the disk and renamed, and then its folder is flushed: after a crash
there is the old file or the new one, never half of one. Only metrics.jsonl grows line by line, and who reads it
leaves out a last line that was cut off. What is read is JSON or safetensors: numbers and
names, nothing that can run.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def write_bytes(path: Path, content: bytes) -> None:
    """Put `content` at `path`, whole or not at all, and on the disk when this returns."""
    aside = path.with_name(f".{path.name}.part")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise T3DError(f"cannot write {path}: {error.strerror}.") from error


def append_lines(path: Path, lines: list[str]) -> None:
    """Add whole lines at the end."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(line + "\n" for line in lines))
    except OSError as error:
        raise T3DError(f"cannot write {path}: {error.strerror}.") from error


def write_json(path: Path, value: Any) -> None:
    """A JSON file that people can read."""
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


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


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file."""
    write_bytes(path, safetensors.torch.save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    try:
        return dict(safetensors.torch.load(path.read_bytes()))
    except OSError as error:
        raise T3DError(f"cannot read {path}: {error.strerror}.") from error
    except safetensors.SafetensorError as error:
        raise T3DError(f"{path} is not a safetensors file, or is damaged ({error}).") from error


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise T3DError(f"cannot read {path}: {error.strerror}.") from error


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
