"""A trained policy: called with an observation, it gives an action in the environment's own units.

A policy file is a safetensors file with the actor's layers in the layout and under the names of the documents' `Actor`
(`layer_1.weight`, …). Its header holds a card, which says what they are for, and a checksum. The JSON file beside it is
a copy of the card for people; nothing reads it. Where observations were normalized, `obs.shift` and `obs.scale` are in
the file too: the actor sees (observation − shift) · scale, within ±10. For images the layers of the encoder come first,
`encoder_1.weight`, …, as `nn.Conv2d` has them, the last one as `nn.Linear`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from t3d import files
from t3d.agent import act
from t3d.custom_network import Network, own_network
from t3d.envs import ActionRange
from t3d.envs.actions import DTYPES
from t3d.errors import T3DError, plain
from t3d.layout import Layout, check, flatten, size
from t3d.networks import MLP, SHARED, Networks, Parameters
from t3d.normalizer import Scaling
from t3d.pixels.encoder import (
    ENCODER,
    FEATURES,
    KERNEL,
    encoder_sizes,
    image_networks,
    prefixed,
    without_prefix,
)
from t3d.pixels.frame_stack import FrameStack
from t3d.rng import Purpose

FORMAT = 4
MOST_LAYERS = 64
CARD = "card"  # its key in the header


@dataclass(frozen=True)
class Card:
    """What the header of a policy file says of its weights."""

    env: str
    seed: int
    step: int  # environment steps it was trained for
    returns: list[float | None]  # of the evaluation at that step, episode by episode; empty where there was none
    lengths: list[int]
    layout: Layout  # of an observation; `t3d.layout` reads it
    action_low: list[Any]
    action_high: list[Any]
    action_dtype: str
    hidden: list[int]
    network: str | None = None  # the name of one of the user's own
    stack: int = 1  # frames in its frame stack, where there are images
    run: str = ""  # the identity of the run that it comes from
    format: int = FORMAT


class Policy:
    """`policy(obs)` -> the noise-free action for one observation, or for a batch of them."""

    def __init__(
        self,
        parameters: Parameters,
        card: Card,
        scaling: Scaling | None = None,
        networks: Networks | None = None,
    ) -> None:
        self.parameters = parameters  # one seed: (1, in, out)
        self.card = card
        self.frame_stack = FrameStack.of(card.layout, card.stack)
        self._frames: list[NDArray[np.float32]] = []  # the current frame stack
        # An actor reads its encoder in the same way whether or not the critics share it.
        images = self.frame_stack and image_networks(self.frame_stack, "separate")
        self.networks = networks or images or MLP
        self.scaling = scaling  # where observations were normalized: (1, 1, O)
        self.actions = ActionRange(
            np.asarray(card.action_low, card.action_dtype), np.asarray(card.action_high, card.action_dtype)
        )

    def __repr__(self) -> str:
        known = [number for number in self.card.returns if number is not None]
        told = f"mean return {sum(known) / len(known):.1f}" if known else "not evaluated"
        return plain(f"<Policy for {self.card.env}: seed {self.card.seed}, step {self.card.step:,}, {told}>")

    def reset(self) -> None:
        """Begin a new episode: clear the frame stack."""
        self._frames = []

    def __call__(self, obs: ArrayLike | Mapping[str, Any]) -> NDArray[Any]:
        """One observation or a batch of them.

        Images come one by one, and the policy keeps the last few until `reset`; or as whole frame stacks,
        (stack, height, width, channels), or a batch of those.
        """
        return self._numbers(obs) if self.frame_stack is None else self._images(obs, self.frame_stack)

    def _images(self, obs: Any, frame_stack: FrameStack) -> NDArray[Any]:
        layout = self.card.layout
        shape = tuple(layout["shape"]) if layout["kind"] == "image" else ()
        given = np.shape(obs) if shape else ()
        before = given[: len(given) - len(shape)]  # what stands before one image: nothing, a batch, a stack
        batch = before if frame_stack.stack == 1 else before[:-1]
        try:
            if before and (len(batch) > 1 or (frame_stack.stack > 1 and before[-1] != frame_stack.stack)):
                raise ValueError(f"these are {' x '.join(map(str, before))}")
            if not before:
                row = flatten(layout, obs).astype(np.float32)
                self._frames = [
                    *(self._frames or [row[frame_stack.pixels]] * frame_stack.stack)[1:],
                    row[frame_stack.pixels],
                ]
                stacked = frame_stack.join(np.stack(self._frames)[None], row[None])
                return np.asarray(self._act(stacked)[0])
            rows = [flatten(layout, frame) for frame in np.asarray(obs).reshape(-1, *given[len(before) :])]
            stacked = np.stack(rows).astype(np.float32).reshape(-1, frame_stack.stack * frame_stack.frame_size)
        except (TypeError, ValueError) as error:
            raise T3DError(
                f"this policy takes an observation of its environment, or stacks of"
                f" {frame_stack.stack} images ({error})."
            ) from error
        actions = self._act(stacked)
        return actions if batch else np.asarray(actions[0])

    def _numbers(self, obs: ArrayLike | Mapping[str, Any]) -> NDArray[Any]:
        layout = self.card.layout
        shape = tuple(layout["shape"]) if layout["kind"] == "array" else (size(layout),)  # of parts: or flat already
        try:
            flat = isinstance(obs, np.ndarray) and (layout["kind"] != "choice" or obs.shape != tuple(layout["shape"]))
            if layout["kind"] != "array" and not flat:
                obs = flatten(layout, obs)
            array = np.asarray(obs, dtype=np.float32)
        except (TypeError, ValueError) as error:
            what = f"an array of shape {shape}" if layout["kind"] == "array" else "an observation of its environment"
            raise T3DError(f"this policy takes {what}; this is {type(obs).__name__} ({error}).") from error
        if array.shape not in (shape, (*array.shape[:1], *shape)):
            raise T3DError(
                f"this policy takes one observation of shape {shape}, or a batch of them; this has {array.shape}."
            )
        actions = self._act(array.reshape(-1, prod(shape)))
        return actions[0] if array.shape == shape else actions

    def _act(self, rows: NDArray[np.float32]) -> NDArray[Any]:
        """Actions (B, A) for observations (B, O)."""
        if not np.isfinite(rows).all():
            row, column = np.argwhere(~np.isfinite(rows))[0]
            raise T3DError(f"observation[{column}] is {rows[row, column]}: a policy acts on finite numbers only.")
        obs = torch.from_numpy(np.ascontiguousarray(rows))[None]
        return self.actions.to_env(act(self.networks, self.parameters, obs, self.scaling)[0].numpy())

    def to_bytes(self) -> bytes:
        """The content of a policy file: weights, card and checksum."""
        scaling = {} if self.scaling is None else {f"obs.{k}": part.flatten() for k, part in vars(self.scaling).items()}
        layers = to_layers(self.parameters) if self.card.network is None else own_layers(self.parameters)
        return files.seal({**layers, **scaling}, {CARD: json.dumps(asdict(self.card))})

    def card_to_bytes(self) -> bytes:
        """The card alone, for people to read."""
        return (json.dumps(asdict(self.card), indent=2) + "\n").encode()

    def save(self, path: Path) -> None:
        """Write `path` (.safetensors), and a copy of its card beside it, in JSON."""
        files.write_bytes(path, self.to_bytes())
        files.write_bytes(path.with_suffix(".json"), self.card_to_bytes())


def read_policy(path: Path, network: Network | None = None) -> Policy:
    """The policy in a .safetensors file, with the user's own `network` if it had one."""
    return policy_of_bytes(files.read_bytes(path, tensors=True), path, network)


def policy_of_bytes(content: bytes, path: Path, network: Network | None = None) -> Policy:
    """The policy in the content of `path`."""
    layers, about = files.unseal(content, path)
    values = files.parse_object(str(about.get(CARD, "")).encode(errors="replace"), f"the card of {path}")
    files.refuse_format(path, values.get("format"), FORMAT)
    files.refuse_numbers(path, layers, lambda name, tensor: False)
    try:
        card = Card(**values)
        _check_card(card, None if card.network else sum(tensor.numel() for tensor in layers.values()))
        sizes = [size(card.layout), *card.hidden, int(np.size(card.action_low))]
        own = own_network(card.network, network, str(path))
        weights = {name: tensor for name, tensor in layers.items() if not name.startswith("obs.")}
        frame_stack = FrameStack.of(card.layout, card.stack)
        if own is not None:
            parameters = _from_own(weights, own, [frame_stack.dim if frame_stack else sizes[0], *sizes[1:]])
        elif frame_stack is not None:
            encoder = {name: tensor for name, tensor in weights.items() if name.startswith("encoder_")}
            head = {name: tensor for name, tensor in weights.items() if name not in encoder}
            sizes[0] = FEATURES + len(frame_stack.numbers)
            parameters = _from_layers(head, list(pairwise(sizes)), "layer")
            parameters |= prefixed(ENCODER, _from_layers(encoder, encoder_sizes(frame_stack), "encoder"))
        else:
            parameters = _from_layers(weights, list(pairwise(sizes)), "layer")
        scaling = _read_scaling(layers, len(frame_stack.numbers) if frame_stack else sizes[0])
        return Policy(parameters, card, scaling, None if own is None else own.networks())
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError, AttributeError) as error:
        if isinstance(error, T3DError):
            raise
        raise T3DError(f"the card of {path} does not describe its weights ({error}).") from error


def _read_scaling(layers: dict[str, Tensor], obs_dim: int) -> Scaling | None:
    """The shift and the scale of observations, or None."""
    parts = {name: tensor for name, tensor in layers.items() if name.startswith("obs.")}
    if not parts:
        return None
    if set(parts) != {"obs.shift", "obs.scale"}:
        raise ValueError(f"{', '.join(parts)} instead of obs.shift and obs.scale")
    if any(part.shape != (obs_dim,) or part.dtype != torch.float32 for part in parts.values()):
        raise ValueError(f"obs.shift and obs.scale are not {obs_dim} numbers in float32")
    return Scaling(parts["obs.shift"][None, None], parts["obs.scale"][None, None])


def _check_card(card: Card, weights: int | None) -> None:
    """Refuse what a policy could not be used with; `weights` is how many there are, where that bounds the sizes."""
    check(card.layout)
    if weights is not None and size(card.layout) > weights:
        raise ValueError(f"{weights:,} weights for {size(card.layout):,} numbers in an observation")
    if not (isinstance(card.env, str) and isinstance(card.network, str | None) and isinstance(card.run, str)):
        raise ValueError("env, network and run must be names")
    if not all(isinstance(part, list) for part in (card.returns, card.lengths, card.hidden)):
        raise ValueError("returns, lengths and hidden must be lists")
    if len(card.hidden) > MOST_LAYERS:
        raise ValueError(f"there are {len(card.hidden)} layers")
    whole = {"seed": [card.seed], "step": [card.step], "lengths": card.lengths, "stack": [card.stack]}
    for name, numbers in {**whole, "hidden": card.hidden}.items():
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"{name} must be whole numbers")
    if not 1 <= card.stack <= 64:
        raise ValueError(f"stack is {card.stack}")
    if not all(x is None or (isinstance(x, int | float) and np.isfinite(x)) for x in card.returns):
        raise ValueError("returns must be finite numbers, or null")
    if len(card.lengths) != len(card.returns):
        raise ValueError("there must be as many lengths as returns")
    if card.action_dtype not in DTYPES:
        raise ValueError("action_dtype must be a floating point type")
    low, high = np.asarray(card.action_low, card.action_dtype), np.asarray(card.action_high, card.action_dtype)
    if low.shape != high.shape or not (low < high).all() or not np.isfinite([low, high]).all():
        raise ValueError("action_low and action_high must be finite bounds of one shape")


def to_layers(parameters: Parameters) -> dict[str, Tensor]:
    """One seed's (1, in, out) weights as `nn.Linear` lays them out, and those of convolutions as `nn.Conv2d`."""
    encoder = without_prefix(ENCODER, parameters) or without_prefix(SHARED + ENCODER, parameters)
    head = {name: tensor for name, tensor in parameters.items() if "." not in name}
    layers = {}
    for prefix, part in (("encoder", encoder), ("layer", head)):
        for i in range(1, len(part) // 2 + 1):
            weight = part[f"w{i}"][0].T
            convolution = prefix == "encoder" and f"w{i + 1}" in part
            layers[f"{prefix}_{i}.weight"] = weight.reshape(len(weight), -1, KERNEL, KERNEL) if convolution else weight
            layers[f"{prefix}_{i}.bias"] = part[f"b{i}"][0, 0]
    return layers


def own_layers(parameters: Parameters) -> dict[str, Tensor]:
    """One seed's weights of a network of the user's own, flat."""
    return {f"own.{name}": tensor.flatten() for name, tensor in parameters.items()}


def _from_own(layers: dict[str, Tensor], network: Network, sizes: list[int]) -> Parameters:
    """The inverse of `own_layers`, if the network has tensors of these names and sizes."""
    fresh = network.init(torch.tensor([0]), Purpose.ACTOR_WEIGHTS, 1, sizes, torch.float32)
    if {f"own.{name}": tensor.numel() for name, tensor in fresh.items()} != {k: t.numel() for k, t in layers.items()}:
        raise ValueError(f"its tensors are not those of {network.name}")
    if any(tensor.dtype != torch.float32 for tensor in layers.values()):
        raise ValueError("its tensors are not in float32")
    return {name: layers[f"own.{name}"].reshape(1, 1, -1) for name in fresh}


def _from_layers(layers: dict[str, Tensor], sizes: list[tuple[int, int]], prefix: str) -> Parameters:
    """Weights as `to_layers` gave them as one seed's parameters, if they are of these sizes."""
    if len(layers) != 2 * len(sizes):
        raise ValueError(f"{len(layers)} tensors for {len(sizes)} layers")
    parameters = {}
    for i, (fan_in, fan_out) in enumerate(sizes, start=1):
        weight, bias = layers[f"{prefix}_{i}.weight"].flatten(1), layers[f"{prefix}_{i}.bias"]
        if weight.shape != (fan_out, fan_in) or bias.shape != (fan_out,):
            raise ValueError(f"{prefix}_{i} is not {fan_in} by {fan_out}")
        if weight.dtype != torch.float32 or bias.dtype != torch.float32:
            raise ValueError(f"{prefix}_{i} is not in float32")
        parameters[f"w{i}"], parameters[f"b{i}"] = weight.T[None].contiguous(), bias[None, None]
    return parameters
