"""State dicts: the numbers of nested dataclasses by their dotted names."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from t3d.state_dict import NOT_SAVED, load_numbers, state_dict, tensors, with_tensors


@dataclass
class Layer:
    w: Tensor
    b: Tensor
    used: int = 0


@dataclass(frozen=True)
class Frozen:
    scale: Tensor
    name: str = "frozen"


class Log:
    """No dataclass: it says itself what is saved."""

    def __init__(self, steps):
        self.steps = steps

    def saved_parts(self):
        return {"steps": self.steps[:2]}


@dataclass
class Whole:
    layer: Layer
    weights: dict[str, Any]
    scratch: Tensor = field(metadata=NOT_SAVED)
    parts: Layer = field(metadata=NOT_SAVED)
    log: Log
    frozen: Frozen | None
    counts: np.ndarray
    seeds: list[int]
    step: int = 7
    function: Any = print
    absent: None = None


def whole():
    return Whole(
        layer=Layer(torch.tensor([1.0, 2.0]), torch.tensor([3.0]), used=4),
        weights={"w1": torch.tensor([5.0]), "inner": {"m": torch.tensor([6, 7])}},
        scratch=torch.tensor([8.0]),
        parts=Layer(torch.tensor([9.0]), torch.tensor([10.0]), used=11),
        log=Log(np.array([12, 13, 14])),
        frozen=Frozen(torch.tensor([15.0])),
        counts=np.array([16, 17]),
        seeds=[18, 19],
    )


def values(named):
    return {name: tensor.tolist() for name, tensor in named.items()}


def test_state_dict_names_every_number_to_save():
    assert values(state_dict(whole())) == {
        "layer.w": [1, 2],
        "layer.b": [3],
        "layer.used": 4,
        "weights.w1": [5],
        "weights.inner.m": [6, 7],
        "log.steps": [12, 13],
        "frozen.scale": [15],
        "counts": [16, 17],
        "seeds": [18, 19],
        "step": 7,
    }


def test_their_order_is_that_of_the_fields():
    names = ["layer.w", "layer.b", "layer.used", "weights.w1", "weights.inner.m", "log.steps", "frozen.scale"]
    assert list(state_dict(whole())) == [*names, "counts", "seeds", "step"]


def test_what_is_not_there_has_no_name():
    one = whole()
    one.frozen, one.weights = None, {}
    names = ["layer.w", "layer.b", "layer.used", "log.steps", "counts", "seeds", "step"]
    assert list(state_dict(one)) == names
    assert state_dict(None) == state_dict(print) == tensors("text") == {}


def test_a_tensor_by_itself_has_the_empty_name():
    x = torch.tensor([1.0])
    assert state_dict(x)[""] is x and list(tensors(x)) == [""]


def test_tensors_and_arrays_share_their_memory():
    one = whole()
    saved = state_dict(one)
    assert saved["layer.w"] is one.layer.w
    saved["layer.w"].fill_(-1)
    saved["counts"].fill_(-2)
    saved["log.steps"].fill_(-3)
    assert one.layer.w.tolist() == [-1, -1] and one.counts.tolist() == [-2, -2]
    assert one.log.steps.tolist() == [-3, -3, 14]
    saved["step"].fill_(-4)
    assert one.step == 7  # a plain number is a copy: `load_numbers` sets it


def test_numbers_keep_their_types():
    found = {name: tensor.dtype for name, tensor in state_dict(whole()).items()}
    assert found["layer.w"] == torch.float32 and found["weights.inner.m"] == found["counts"] == torch.int64
    assert found["step"] == found["seeds"] == torch.int64


def test_tensors_are_all_tensors_also_those_that_are_not_saved():
    assert values(tensors(whole())) == {
        "layer.w": [1, 2],
        "layer.b": [3],
        "weights.w1": [5],
        "weights.inner.m": [6, 7],
        "scratch": [8],
        "parts.w": [9],
        "parts.b": [10],
        "frozen.scale": [15],
    }


def test_with_tensors_is_a_copy_that_holds_others():
    one = whole()
    given = {name: -tensor for name, tensor in tensors(one).items()}
    other = with_tensors(one, given)
    assert type(other) is Whole and type(other.frozen) is Frozen and other.frozen.name == "frozen"
    assert all(tensor is given[name] for name, tensor in tensors(other).items())
    assert values(tensors(other)) == values(given) and given["parts.w"].tolist() == [-9]
    # What is no tensor stays, and so does the original.
    assert other.layer.used == 4 and other.counts is one.counts and other.log is one.log and other.function is print
    assert one.layer.w.tolist() == [1, 2] and one.weights["inner"]["m"].tolist() == [6, 7]


def test_load_numbers_sets_the_plain_numbers_alone():
    one = whole()
    given = {name: -tensor for name, tensor in state_dict(one).items()}
    load_numbers(one, given)
    assert one.step == -7 and one.layer.used == -4 and type(one.step) is int
    assert one.parts.used == 11  # it is not saved
    assert one.layer.w.tolist() == [1, 2] and one.counts.tolist() == [16, 17] and one.seeds == [18, 19]


def test_saved_and_loaded_again():
    one, other = whole(), whole()
    one.step, one.layer.used = 100, 200
    for tensor in (one.layer.w, one.weights["w1"], torch.from_numpy(one.counts), torch.from_numpy(one.log.steps)):
        tensor.fill_(300)
    saved = {name: tensor.clone() for name, tensor in state_dict(one).items()}
    for name, tensor in state_dict(other).items():
        tensor.copy_(saved[name])
    load_numbers(other, saved)
    assert values(state_dict(other)) == values(saved) and other.step == 100 and other.layer.used == 200


def test_not_saved_is_a_mark_on_a_field():
    assert NOT_SAVED == {"saved": False}
    marked = [name for name, part in Whole.__dataclass_fields__.items() if part.metadata == NOT_SAVED]
    assert marked == ["scratch", "parts"]
