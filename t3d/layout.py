"""Flattens structured observations into one row of numbers.

`describe` converts a Gymnasium space to JSON, which is saved with a policy. `flatten` flattens an observation of that
space without Gymnasium, in the order of `gymnasium.spaces.flatten`: the parts of a Dict in the order of the space
(Gymnasium sorts the names of an ordinary dict), the parts of a Tuple in order, arrays in C order, Discrete values
one-hot. Images (uint8, height × width × channels) are arrays with a kind of their own; channels are moved last.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from t3d.errors import T3DError, shown
from t3d.files import DEEPEST_JSON

Layout = dict[str, Any]
SMALLEST = 8  # pixels of each side of an image
LARGEST = 2**24  # numbers in an observation
DEEPEST = DEEPEST_JSON // 2 - 2  # levels of Dict and Tuple: each takes two of the JSON in a policy file


def describe(space: spaces.Space[Any], name: str, depth: int = 0) -> Layout:
    """Convert an observation space to JSON. `name` is the environment in the error message."""
    if depth > DEEPEST:
        raise T3DError(f"{name} has an observation space nested deeper than {DEEPEST} levels.")
    if isinstance(space, spaces.Dict):
        if other := [key for key in space.spaces if type(key) is not str]:
            raise T3DError(f"{name} has an observation with the key {shown(other[0])}; keys must be strings.")
        return {"kind": "dict", "parts": {key: describe(part, name, depth + 1) for key, part in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"kind": "tuple", "parts": [describe(part, name, depth + 1) for part in space.spaces]}
    if isinstance(space, spaces.Box) and _is_image(space, name):
        return {"kind": "image", "shape": list(space.shape)}
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return {"kind": "array", "shape": list(space.shape)}
    if isinstance(space, spaces.Discrete):
        return {"kind": "choice", "sizes": [int(space.n)], "first": [int(space.start)], "shape": []}
    if isinstance(space, spaces.MultiDiscrete):
        sizes, first = space.nvec.reshape(-1).tolist(), space.start.reshape(-1).tolist()
        return {"kind": "choice", "sizes": sizes, "first": first, "shape": list(space.shape)}
    raise T3DError(f"{name} has the observation space {space}, which cannot be made into a row of numbers.")


def _is_image(space: spaces.Box, name: str) -> bool:
    """Whether the space is uint8 with two sides of at least `SMALLEST` pixels; smaller ones are plain arrays."""
    if space.dtype != np.uint8 or sum(side >= SMALLEST for side in space.shape) < 2:
        return False
    if not _is_single_image(space.shape):
        raise T3DError(
            f"{name} observes images of shape {space.shape}; they must be (height, width, channels), one at a time."
            " Use --frame-stack to stack several."
        )
    return True


def _is_single_image(shape: Sequence[int]) -> bool:
    """Whether this is the shape of a single image."""
    height, width, channels = _image_size(shape) if len(shape) in (2, 3) else (0, 0, 0)
    return min(height, width) >= SMALLEST and channels > 0


def _image_size(shape: Sequence[int]) -> tuple[int, int, int]:
    height, width, channels = [*shape, 1][:3]
    return (width, channels, height) if _channels_first(shape) else (height, width, channels)


def _channels_first(shape: Sequence[int]) -> bool:
    """Whether the channels of an image come first: there are fewer channels than columns."""
    return len(shape) == 3 and shape[0] < shape[2]


def image_size(layout: Layout) -> tuple[int, int, int]:
    """The height, width and channels of an image."""
    return _image_size(layout["shape"])


def channels_last(layout: Layout, arrays: NDArray[Any]) -> NDArray[Any]:
    """Move the channels of images (…, *shape) last; return other arrays unchanged."""
    first = layout["kind"] == "image" and _channels_first(layout["shape"])
    return np.moveaxis(arrays, -3, -1) if first else arrays


def check(layout: Any) -> None:
    """Refuse an untrusted layout that `describe` would not write."""
    _check(layout)
    if size(layout) > LARGEST:
        raise ValueError(f"layout: an observation of {size(layout):,} numbers")


def _check(layout: Any) -> None:
    kinds = {"dict": dict, "tuple": list, "array": list, "image": list, "choice": list}
    kind = layout.get("kind") if isinstance(layout, dict) else None
    if kind not in kinds:
        raise ValueError("layout is not a description of an observation")
    parts = layout.get("parts" if kind in ("dict", "tuple") else "shape")
    if not isinstance(parts, kinds[kind]):
        raise ValueError(f"layout: a {kind} cannot have the parts {parts!r}")
    if kind in ("dict", "tuple"):
        for part in _parts(layout).values():
            _check(part)
        return
    sizes = [*parts, *layout.get("sizes", [])]
    if not all(type(number) is int for number in [*sizes, *layout.get("first", [])]) or any(n < 0 for n in sizes):
        raise ValueError("layout: shapes and sizes must be whole numbers")
    if kind == "image" and not _is_single_image(parts):
        raise ValueError(f"layout: {parts} is not the shape of an image")
    if kind == "choice" and not len(layout["sizes"]) == len(layout["first"]) == prod(parts):
        raise ValueError("layout: the numbers of sizes, first values and choices must be equal")


def size(layout: Layout) -> int:
    """The number of elements in a row."""
    if layout["kind"] in ("dict", "tuple"):
        return sum(size(part) for part in _parts(layout).values())
    return sum(layout["sizes"]) if layout["kind"] == "choice" else prod(layout["shape"])


def leaves(layout: Layout) -> list[Layout]:
    """The parts without subparts, in the order of the row."""
    if layout["kind"] in ("dict", "tuple"):
        return [leaf for part in _parts(layout).values() for leaf in leaves(part)]
    return [layout]


def flatten(layout: Layout, obs: Any, where: str = "the observation") -> NDArray[np.float64]:
    """Flatten an observation. Errors name the part, as in `the observation['camera'][0]`."""
    if layout["kind"] in ("dict", "tuple"):
        parts = _parts(layout)
        given = (
            dict(obs) if isinstance(obs, Mapping) else dict(enumerate(obs)) if isinstance(obs, tuple | list) else None
        )
        if given is None or set(given) != set(parts):
            found = type(obs).__name__ if given is None else f"{list(given)}"
            raise ValueError(f"{where} has the parts {list(parts)}; this is {found}")
        rows = [flatten(part, given[key], f"{where}[{key!r}]") for key, part in parts.items()]
        return np.concatenate(rows) if rows else np.zeros(0)
    array, shape = np.asarray(obs), tuple(layout["shape"])
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{where} is {obs!r}, not numbers")
    if array.shape != shape:
        raise ValueError(f"{where} has the shape {array.shape}, not {shape}")
    if layout["kind"] == "image":
        if array.dtype != np.uint8:
            raise ValueError(f"{where} is an image of dtype {array.dtype}, not uint8")
        array = channels_last(layout, array)
    if layout["kind"] != "choice":
        return array.reshape(-1).astype(np.float64)
    chosen = array.reshape(-1) - np.array(layout["first"])
    sizes = np.array(layout["sizes"])
    if not ((chosen >= 0) & (chosen < sizes) & (chosen == np.floor(chosen))).all():
        raise ValueError(f"{where} is {array.tolist()}, which is not one of its {sizes.tolist()} choices")
    row = np.zeros(int(sizes.sum()))
    row[np.cumsum(sizes) - sizes + chosen.astype(int)] = 1
    return row


def _parts(layout: Layout) -> dict[Any, Layout]:
    parts = layout["parts"]
    return parts if isinstance(parts, dict) else dict(enumerate(parts))
