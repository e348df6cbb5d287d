"""A trained policy: called with an observation, it gives an action in the environment's own units.

On the disk it is a safetensors file with the actor's layers in the layout and under the names of the
documents' `Actor` (`layer_1.weight`, …), and a JSON file beside it that says what they are for.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from t3d import files, networks
from t3d.envs import ActionRange
from t3d.errors import T3DError
from t3d.networks import Parameters

FORMAT = 1


@dataclass(frozen=True)
class Card:
    """What stands in the JSON beside the weights."""

    env: str
    seed: int
    step: int  # environment steps it was trained for
    returns: list[float]  # of the evaluation at that step, episode by episode
    lengths: list[int]
    obs_shape: list[int]
    action_low: list[Any]
    action_high: list[Any]
    action_dtype: str
    hidden: list[int]
    format: int = FORMAT


class Policy:
    """`policy(obs)` -> the noise-free action for one observation, or for a batch of them."""

    def __init__(self, parameters: Parameters, card: Card) -> None:
        self.parameters = parameters  # one seed: (1, in, out)
        self.card = card
        self.actions = ActionRange(
            np.asarray(card.action_low, card.action_dtype), np.asarray(card.action_high, card.action_dtype)
        )

    def __repr__(self) -> str:
        mean = sum(self.card.returns) / max(len(self.card.returns), 1)
        return f"<Policy for {self.card.env}: seed {self.card.seed}, step {self.card.step:,}, mean return {mean:.1f}>"

    @torch.no_grad()
    def __call__(self, obs: ArrayLike) -> NDArray[Any]:
        array, shape = np.asarray(obs, dtype=np.float32), tuple(self.card.obs_shape)
        if array.shape not in (shape, (*array.shape[:1], *shape)):
            raise T3DError(
                f"this policy takes one observation of shape {shape}, or a batch of them; this has {array.shape}."
            )
        rows = torch.from_numpy(np.ascontiguousarray(array.reshape(1, -1, int(np.prod(shape)))))
        actions = self.actions.to_env(networks.actor(self.parameters, rows)[0].numpy())
        return actions[0] if array.shape == shape else actions

    def save(self, path: Path) -> None:
        """Write `path` (.safetensors) and the JSON beside it."""
        files.write_tensors(path, to_layers(self.parameters))
        files.write_json(path.with_suffix(".json"), asdict(self.card))


def read_policy(path: Path) -> Policy:
    """The policy in a .safetensors file and the JSON beside it."""
    layers = files.read_tensors(path)
    beside = path.with_suffix(".json")
    values = files.read_json(beside)
    if values.get("format") != FORMAT:
        raise T3DError(f"{beside} has the format {values.get('format')!r}; this version reads {FORMAT}.")
    try:
        card = Card(**values)
        sizes = [int(np.prod(card.obs_shape)), *card.hidden, int(np.size(card.action_low))]
        policy = Policy(_from_layers(layers, len(sizes) - 1), card)
        fits = all(
            policy.parameters[f"w{i + 1}"].shape == (1, *sizes[i : i + 2])
            and policy.parameters[f"b{i + 1}"].shape == (1, 1, sizes[i + 1])
            for i in range(len(sizes) - 1)
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise T3DError(f"{beside} does not describe the policy in {path.name} ({error}).") from error
    if not fits or policy.actions.low.shape != policy.actions.high.shape:
        raise T3DError(f"{beside} does not describe the policy in {path.name}: the sizes differ.")
    if not all(torch.isfinite(tensor).all() for tensor in layers.values()):
        raise T3DError(f"{path} holds weights that are not finite numbers.")
    return policy


def to_layers(parameters: Parameters) -> dict[str, Tensor]:
    """One seed's (1, in, out) weights as `nn.Linear` lays them out."""
    layers = {}
    for i in range(1, len(parameters) // 2 + 1):
        layers[f"layer_{i}.weight"] = parameters[f"w{i}"][0].T
        layers[f"layer_{i}.bias"] = parameters[f"b{i}"][0, 0]
    return layers


def _from_layers(layers: dict[str, Tensor], depth: int) -> Parameters:
    if len(layers) != 2 * depth:
        raise ValueError(f"{len(layers)} tensors for {depth} layers")
    parameters = {}
    for i in range(1, depth + 1):
        parameters[f"w{i}"] = layers[f"layer_{i}.weight"].T[None].contiguous()
        parameters[f"b{i}"] = layers[f"layer_{i}.bias"][None, None]
    return parameters
