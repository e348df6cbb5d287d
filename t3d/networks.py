"""[steps 2 and 3] Actor and critics as pure functions of (parameters, inputs).

A network is a dictionary of tensors and a function that reads it. A target is another dictionary given to
the same function, so the documents' six networks are two functions and four dictionaries.

Shapes: S seeds, B batch, O observation, A action. Seeds and twins are leading axes, the twin first:
an actor's weights are (S, in, out), the critics' (2, S, in, out); biases keep a 1 where the batch goes,
so a layer is `x @ w + b` whatever stands in front. obs (S, B, O), action (S, B, A), q (2, S, B).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from t3d.rng import Purpose, uniform

Parameters = dict[str, Tensor]


def actor(parameters: Parameters, obs: Tensor, limit: float = 1.0) -> Tensor:
    """[step 2] a = limit · tanh(MLP(s)), so that every action is within its bounds."""
    return limit * torch.tanh(current().apply(parameters, obs))


def critic(parameters: Parameters, obs: Tensor, action: Tensor) -> Tensor:
    """[step 3] q = MLP(s, a); with twin parameters both critics at once, q[0] and q[1]."""
    return current().apply(parameters, torch.cat([obs, action], -1)).squeeze(-1)


def first(parameters: Parameters) -> Parameters:
    """[step 3] The first of the two critics alone, the documents' `Q1`."""
    return {name: tensor[0] for name, tensor in parameters.items()}


SHARED = "critic."  # an actor's tensors whose names begin so are the first critic's


def sync_encoder(actor: Parameters, critic: Parameters) -> None:
    """[step 13] What an actor has of the critics, as pixel agents share their eyes, is brought up to date."""
    for name, tensor in actor.items():
        if name.startswith(SHARED):
            tensor.copy_(critic[name.removeprefix(SHARED)][0])


def any_of(parameters: Parameters) -> Tensor:
    """One of the tensors: they are all on one device and of one precision."""
    return next(iter(parameters.values()))


def mlp(parameters: Parameters, x: Tensor) -> Tensor:
    """Linear layers with ReLU between them; where a layer has gains it is normalised before that."""
    last = sum(name.startswith("w") for name in parameters)
    for layer in range(1, last):
        x = x @ parameters[f"w{layer}"] + parameters[f"b{layer}"]
        if f"gain{layer}" in parameters:
            x = layer_norm(x.to(parameters[f"w{layer}"].dtype), x.shape[-1:])
            x = x * parameters[f"gain{layer}"] + parameters[f"shift{layer}"]
        x = torch.relu(x)
    # Where products are in bfloat16 the last one is not: it would round a value to one part in 256.
    with torch.autocast(x.device.type, enabled=False):
        return x @ parameters[f"w{last}"] + parameters[f"b{last}"]


def init_actor(seeds: Tensor, obs_dim: int, action_dim: int, hidden: Sequence[int], dtype: torch.dtype) -> Parameters:
    """[step 2] The actor's first weights, for each seed its own."""
    weights = current().init(seeds, Purpose.ACTOR_WEIGHTS, 1, (obs_dim, *hidden, action_dim), dtype)
    return {name: tensor[0].clone() for name, tensor in weights.items()}


def init_critic(
    seeds: Tensor,
    obs_dim: int,
    action_dim: int,
    hidden: Sequence[int],
    dtype: torch.dtype,
    twins: int = 2,
    normalized: bool = False,
) -> Parameters:
    """[step 3] The first weights of two critics. Twins that start equal stay equal, so each has its own.

    With `normalized`, hidden layers have gains of one and shifts of zero too.
    """
    weights = current().init(seeds, Purpose.CRITIC_WEIGHTS, twins, (obs_dim + action_dim, *hidden, 1), dtype)
    for layer in range(1, len(hidden) + 1) if normalized else ():
        weights[f"gain{layer}"] = torch.ones_like(weights[f"b{layer}"])
        weights[f"shift{layer}"] = torch.zeros_like(weights[f"b{layer}"])
    return weights


def init_mlp(seeds: Tensor, purpose: Purpose, copies: int, sizes: Sequence[int], dtype: torch.dtype) -> Parameters:
    """Uniform within ±1/√in for weights and biases, as `nn.Linear` starts: (copies, S, in or 1, out)."""
    parameters = {}
    for layer, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
        made = init_layer(seeds, purpose, layer, copies, fan_in, fan_out, dtype)
        parameters[f"w{layer}"], parameters[f"b{layer}"] = made
    return parameters


def init_layer(
    seeds: Tensor, purpose: Purpose, layer: int, copies: int, fan_in: int, fan_out: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Weights and biases of one layer."""

    def drawn(counter: int, rows: int) -> Tensor:
        # One counter for each tensor; the index runs over copies, rows and columns.
        draw = uniform(seeds, purpose, counter, (copies, rows, fan_out), dtype)
        return draw.mul(fan_in**-0.5).transpose(0, 1).contiguous()

    return drawn(2 * layer, fan_in), drawn(2 * layer + 1, 1)


class Network(Protocol):
    """A pair of functions: first weights for every copy and seed, and what they make of x (S, B, in)."""

    @property
    def init(self) -> Callable[[Tensor, Purpose, int, Sequence[int], torch.dtype], Parameters]: ...
    @property
    def apply(self) -> Callable[[Parameters, Tensor], Tensor]: ...


class Pair(NamedTuple):
    """Such a pair."""

    init: Callable[[Tensor, Purpose, int, Sequence[int], torch.dtype], Parameters]
    apply: Callable[[Parameters, Tensor], Tensor]


MLP = Pair(init_mlp, mlp)
_current: ContextVar[Network] = ContextVar("network", default=MLP)


def current() -> Network:
    """What actor and critics are made of: mlps, unless something else is in use."""
    return _current.get()


@contextmanager
def using(network: Network | None) -> Iterator[None]:
    """Inside, actor and critics are made of this network, or of mlps if it is none; in this thread alone."""
    before = _current.set(network or MLP)
    try:
        yield
    finally:
        _current.reset(before)
