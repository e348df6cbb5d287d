"""A trained policy: called with an observation, it gives an action in the environment's own units.

On the disk it is a safetensors file with the actor's layers in the layout and under the names of the
documents' `Actor` (`layer_1.weight`, …), and a JSON file beside it that says what they are for. Where observations were
normalised, `obs.shift` and `obs.scale` are in it too: the actor sees (observation − shift) · scale, within ±10.
"""

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

from t3d import files, networks
from t3d.envs import ActionRange
from t3d.errors import T3DError
from t3d.layout import Layout, check, flatten, size
from t3d.modules import Network, own_network
from t3d.networks import Parameters
from t3d.replay import Lens, seen_through
from t3d.rng import Purpose

FORMAT = 2


@dataclass(frozen=True)
class Card:
    """What stands in the JSON beside the weights."""

    env: str
    seed: int
    step: int  # environment steps it was trained for
    returns: list[float]  # of the evaluation at that step, episode by episode
    lengths: list[int]
    layout: Layout  # of an observation; `t3d.layout` reads it
    action_low: list[Any]
    action_high: list[Any]
    action_dtype: str
    hidden: list[int]
    network: str | None = None  # the name of one of the user's own
    format: int = FORMAT


class Policy:
    """`policy(obs)` -> the noise-free action for one observation, or for a batch of them."""

    def __init__(
        self, parameters: Parameters, card: Card, lens: Lens | None = None, network: networks.Network | None = None
    ) -> None:
        self.parameters = parameters  # one seed: (1, in, out)
        self.network = network  # if it is one of the user's own
        self.card = card
        self.lens = lens  # if observations were normalised: (1, 1, O)
        self.actions = ActionRange(
            np.asarray(card.action_low, card.action_dtype), np.asarray(card.action_high, card.action_dtype)
        )

    def __repr__(self) -> str:
        mean = sum(self.card.returns) / max(len(self.card.returns), 1)
        return f"<Policy for {self.card.env}: seed {self.card.seed}, step {self.card.step:,}, mean return {mean:.1f}>"

    @torch.no_grad()
    def __call__(self, obs: ArrayLike | Mapping[str, Any]) -> NDArray[Any]:
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
        rows = torch.from_numpy(np.ascontiguousarray(array.reshape(1, -1, prod(shape))))
        with networks.using(self.network):
            actions = self.actions.to_env(networks.actor(self.parameters, seen_through(self.lens, rows))[0].numpy())
        return actions[0] if array.shape == shape else actions

    def save(self, path: Path) -> None:
        """Write `path` (.safetensors) and the JSON beside it, which knows the weights by their SHA-256."""
        lens = (
            {} if self.lens is None else {f"obs.{name}": part.flatten() for name, part in self.lens._asdict().items()}
        )
        layers = to_layers(self.parameters) if self.card.network is None else own_layers(self.parameters)
        files.write_tensors(path, {**layers, **lens})
        files.write_json(path.with_suffix(".json"), {**asdict(self.card), "sha256": files.sha256(path)})


def read_policy(path: Path, network: Network | None = None) -> Policy:
    """The policy in a .safetensors file and the JSON beside it, with the user's own `network` if it had one."""
    layers = files.read_tensors(path)
    beside = path.with_suffix(".json")
    values = files.read_json(beside)
    if values.get("format") != FORMAT:
        raise T3DError(f"{beside} has the format {values.get('format')!r}; this version reads {FORMAT}.")
    if values.pop("sha256", None) != files.sha256(path):
        raise T3DError(f"{beside} describes other weights than those in {path.name}: one of the two was changed.")
    try:
        card = Card(**values)
        _check_card(card)
        sizes = [size(card.layout), *card.hidden, int(np.size(card.action_low))]
        own = own_network(card.network, network, str(path))
        weights = {name: tensor for name, tensor in layers.items() if not name.startswith("obs.")}
        parameters = _from_layers(weights, sizes) if own is None else _from_own(weights, own, sizes)
        policy = Policy(parameters, card, _lens_of(layers, sizes[0]), own)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise T3DError(f"{beside} does not describe the policy in {path.name} ({error}).") from error
    if not all(torch.isfinite(tensor).all() for tensor in layers.values()):
        raise T3DError(f"{path} holds weights that are not finite numbers.")
    return policy


def _lens_of(layers: dict[str, Tensor], obs_dim: int) -> Lens | None:
    """The shift and the scale of observations, where there are both."""
    parts = {name: tensor for name, tensor in layers.items() if name.startswith("obs.")}
    if not parts:
        return None
    if set(parts) != {"obs.shift", "obs.scale"}:
        raise ValueError(f"{', '.join(parts)} instead of obs.shift and obs.scale")
    if any(part.shape != (obs_dim,) or part.dtype != torch.float32 for part in parts.values()):
        raise ValueError(f"obs.shift and obs.scale are not {obs_dim} numbers in float32")
    return Lens(parts["obs.shift"][None, None], parts["obs.scale"][None, None])


def _check_card(card: Card) -> None:
    """Refuse what a policy could not be used with."""
    check(card.layout)
    whole = {"seed": [card.seed], "step": [card.step], "lengths": card.lengths}
    for name, numbers in {**whole, "hidden": card.hidden}.items():
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"{name} must be whole numbers")
    if not card.returns or not all(isinstance(x, int | float) and np.isfinite(x) for x in card.returns):
        raise ValueError("returns must be finite numbers, at least one")
    if len(card.lengths) != len(card.returns):
        raise ValueError("there must be as many lengths as returns")
    if card.action_dtype not in ("float16", "float32", "float64"):
        raise ValueError("action_dtype must be a floating point type")
    low, high = np.asarray(card.action_low, card.action_dtype), np.asarray(card.action_high, card.action_dtype)
    if low.shape != high.shape or not (low < high).all() or not np.isfinite([low, high]).all():
        raise ValueError("action_low and action_high must be finite bounds of one shape")


def to_layers(parameters: Parameters) -> dict[str, Tensor]:
    """One seed's (1, in, out) weights as `nn.Linear` lays them out."""
    layers = {}
    for i in range(1, len(parameters) // 2 + 1):
        layers[f"layer_{i}.weight"] = parameters[f"w{i}"][0].T
        layers[f"layer_{i}.bias"] = parameters[f"b{i}"][0, 0]
    return layers


def own_layers(parameters: Parameters) -> dict[str, Tensor]:
    """One seed's weights of a network of the user's own, flat."""
    return {f"own.{name}": tensor.flatten() for name, tensor in parameters.items()}


def _from_own(layers: dict[str, Tensor], network: Network, sizes: list[int]) -> Parameters:
    """The same back again, if the network has tensors of these names and sizes."""
    fresh = network.init(torch.tensor([0]), Purpose.ACTOR_WEIGHTS, 1, sizes, torch.float32)
    if {f"own.{name}": tensor.numel() for name, tensor in fresh.items()} != {k: t.numel() for k, t in layers.items()}:
        raise ValueError(f"its tensors are not those of {network.name}")
    if any(tensor.dtype != torch.float32 for tensor in layers.values()):
        raise ValueError("its tensors are not in float32")
    return {name: layers[f"own.{name}"].reshape(1, 1, -1) for name in fresh}


def _from_layers(layers: dict[str, Tensor], sizes: list[int]) -> Parameters:
    """Weights as `nn.Linear` lays them out as one seed's parameters, if they are of these sizes."""
    if len(layers) != 2 * (len(sizes) - 1):
        raise ValueError(f"{len(layers)} tensors for {len(sizes) - 1} layers")
    parameters = {}
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
        weight, bias = layers[f"layer_{i}.weight"], layers[f"layer_{i}.bias"]
        if weight.shape != (fan_out, fan_in) or bias.shape != (fan_out,):
            raise ValueError(f"layer_{i} is not {fan_in} by {fan_out}")
        if weight.dtype != torch.float32 or bias.dtype != torch.float32:
            raise ValueError(f"layer_{i} is not in float32")
        parameters[f"w{i}"], parameters[f"b{i}"] = weight.T[None].contiguous(), bias[None, None]
    return parameters
