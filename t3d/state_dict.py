"""State dicts: the tensors of nested dataclasses and dictionaries by their dotted names, as `critic_adam.m.w1`.

`state_dict` gives what a checkpoint saves; `NOT_SAVED` marks a field that it leaves out. `tensors` gives every tensor,
for a compiler or a comparison, and `with_tensors` puts others in their places.
"""

from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

# For `dataclasses.field(metadata=…)`: state dicts leave the field out. It follows from others, or it is no data.
NOT_SAVED = {"saved": False}


def state_dict(value: Any) -> dict[str, Tensor]:
    """Every number to save, by name. Tensors and arrays share their memory with `value`."""
    return {name: _as_tensor(number) for name, number in _walk(value, "", everything=False)}


def tensors(value: Any) -> dict[str, Tensor]:
    """Every tensor, by name, also those that are not saved."""
    return {name: part for name, part in _walk(value, "", everything=True) if isinstance(part, Tensor)}


def _walk(value: Any, prefix: str, everything: bool) -> list[tuple[str, Any]]:
    if isinstance(value, Tensor | np.ndarray | int | float | list):
        return [(prefix, value)]
    dot = f"{prefix}." if prefix else ""
    return [found for name, part in _parts(value, everything) for found in _walk(part, dot + name, everything)]


def _parts(value: Any, everything: bool) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if hasattr(value, "saved_parts") and not everything:
        return list(value.saved_parts().items())
    if not is_dataclass(value):
        return []  # None, functions, environments
    return [(f.name, getattr(value, f.name)) for f in fields(value) if everything or f.metadata.get("saved", True)]


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else torch.tensor(value)


def load_numbers(value: Any, given: dict[str, Tensor], prefix: str = "") -> None:
    """Set the plain numbers of nested dataclasses; tensors and arrays are copied in place elsewhere."""
    if not is_dataclass(value):
        return
    dot = f"{prefix}." if prefix else ""
    for name, part in _parts(value, everything=False):
        if isinstance(part, int | float):
            setattr(value, name, type(part)(given[dot + name]))
        else:
            load_numbers(part, given, dot + name)


def with_tensors(value: Any, given: dict[str, Tensor], prefix: str = "") -> Any:
    """A copy of `value` that holds the tensors of these names in place of its own."""
    if isinstance(value, Tensor):
        return given[prefix]
    dot = f"{prefix}." if prefix else ""
    if isinstance(value, dict):
        return {name: with_tensors(part, given, dot + name) for name, part in value.items()}
    if not is_dataclass(value) or isinstance(value, type):
        return value
    other = copy(value)
    for part in fields(value):
        object.__setattr__(other, part.name, with_tensors(getattr(value, part.name), given, dot + part.name))
    return other
