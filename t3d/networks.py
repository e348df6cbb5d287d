"""[steps 2 and 3] Actor and critics as pure functions of (parameters, inputs).

A network is a dictionary of tensors and a function that reads it. A target is another dictionary given to the same
function, so the documents' six networks are two functions and four dictionaries. `Networks` holds the functions; it is
a field of the agent. Image observations have an encoder in front (`pixels/encoder.py`); users bring their own networks
as `custom_network.Network`.

Shapes: S seeds, B batch, O observation, A action. Seeds and twins are leading axes, the twin first: an actor's weights
are (S, in, out), the critics' (2, S, in, out); biases keep a 1 in place of the batch, so a layer is `x @ w + b`
whatever stands in front. obs (S, B, O), action (S, B, A), q (2, S, B).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from t3d.rng import Purpose, uniform

Parameters = dict[str, Tensor]
Init = Callable[[Tensor, Purpose, int, Sequence[int], torch.dtype], Parameters]  # seeds, purpose, copies, sizes, dtype
Apply = Callable[[Parameters, Tensor], Tensor]  # (S, B, in) -> (S, B, out), or (2, S, B, out)


def mlp(parameters: Parameters, x: Tensor) -> Tensor:
    """Linear layers with ReLU between them; hidden layers that have gains are normalized first (LayerNorm)."""
    last = sum(name.startswith("w") for name in parameters)
    for layer in range(1, last):
        x = x @ parameters[f"w{layer}"] + parameters[f"b{layer}"]
        if f"gain{layer}" in parameters:
            x = layer_norm(x.to(parameters[f"w{layer}"].dtype), x.shape[-1:])
            x = x * parameters[f"gain{layer}"] + parameters[f"shift{layer}"]
        x = torch.relu(x)
    # The output layer never runs in bfloat16: it would round a value to one part in 256.
    with torch.autocast(x.device.type, enabled=False):
        return x @ parameters[f"w{last}"] + parameters[f"b{last}"]


def init_mlp(seeds: Tensor, purpose: Purpose, copies: int, sizes: Sequence[int], dtype: torch.dtype) -> Parameters:
    """Weights and biases uniform within ±1/√in, as in `nn.Linear`: (copies, S, in or 1, out)."""
    parameters = {}
    for layer, shape in enumerate(pairwise(sizes), start=1):
        weight, bias = init_layer(seeds, purpose, layer, (copies, *shape), dtype)
        parameters[f"w{layer}"], parameters[f"b{layer}"] = weight, bias
    return parameters


def init_layer(
    seeds: Tensor, purpose: Purpose, layer: int, shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Weights and biases of one layer; `shape` is (copies, in, out)."""
    copies, fan_in, fan_out = shape

    def draw(counter: int, rows: int) -> Tensor:
        # One counter for each tensor; the index runs over copies, rows and columns.
        number = uniform(seeds, purpose, counter, (copies, rows, fan_out), dtype)
        return number.mul(fan_in**-0.5).transpose(0, 1).contiguous()

    return draw(2 * layer, fan_in), draw(2 * layer + 1, 1)


@dataclass(frozen=True)
class Networks:
    """[steps 2 and 3] The functions behind an agent's actor and critics; the default is an MLP for each."""

    actor_weights: Init = init_mlp
    critic_weights: Init = init_mlp
    apply: Apply = mlp
    critics: int = 2
    critic_norm: bool = False  # LayerNorm in the critics' hidden layers
    name: str | None = None  # of a user's own network

    def actor(self, parameters: Parameters, obs: Tensor, limit: float = 1.0) -> Tensor:
        """[step 2] a = limit · tanh(MLP(s)): every action is within its bounds."""
        return limit * torch.tanh(self.apply(parameters, obs))

    def critic(self, parameters: Parameters, obs: Tensor, action: Tensor) -> Tensor:
        """[step 3] q = MLP(s, a); with twin parameters both critics at once, q[0] and q[1]."""
        return self.apply(parameters, torch.cat([obs, action], -1)).squeeze(-1)

    def init_actor(
        self, seeds: Tensor, obs_dim: int, action_dim: int, hidden: Sequence[int], dtype: torch.dtype
    ) -> Parameters:
        """[step 2] The actor's initial weights; each seed has its own."""
        weights = self.actor_weights(seeds, Purpose.ACTOR_WEIGHTS, 1, (obs_dim, *hidden, action_dim), dtype)
        return {name: tensor[0].clone() for name, tensor in weights.items()}

    def init_critic(
        self, seeds: Tensor, obs_dim: int, action_dim: int, hidden: Sequence[int], dtype: torch.dtype
    ) -> Parameters:
        """[step 3] The critics' initial weights. Twins that start equal stay equal, so each has its own."""
        sizes = (obs_dim + action_dim, *hidden, 1)
        parameters = self.critic_weights(seeds, Purpose.CRITIC_WEIGHTS, self.critics, sizes, dtype)
        for layer in range(1, len(hidden) + 1) if self.critic_norm else ():
            parameters[f"gain{layer}"] = torch.ones_like(parameters[f"b{layer}"])
            parameters[f"shift{layer}"] = torch.zeros_like(parameters[f"b{layer}"])
        return parameters


MLP = Networks()


def first(parameters: Parameters) -> Parameters:
    """[step 3] The first of the two critics alone, the documents' `Q1`."""
    return {name: tensor[0] for name, tensor in parameters.items()}


SHARED = "critic."  # the prefix of an actor's tensors that are copies of the first critic's


def sync_encoder(actor: Parameters, critic: Parameters) -> None:
    """[step 13] Copy the encoder that the critics train into the actor, where they share one."""
    for name, tensor in actor.items():
        if name.startswith(SHARED):
            tensor.copy_(critic[name.removeprefix(SHARED)][0])


def any_of(parameters: Parameters) -> Tensor:
    """One of the tensors: all have one device and one dtype."""
    return next(iter(parameters.values()))
