"""What happens to a whole agent: it acts, it is updated with its own random numbers, it is taken apart.

The agent itself is plain data (`steps.Agent`). A random number depends on the seed, on what it is for, and
on the environment step or the update it is drawn in; so nothing here has a state of its own.
"""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from t3d import networks, rng
from t3d.errors import T3DError
from t3d.optim import AdamState
from t3d.replay import Normalizer, Replay, normalize
from t3d.rng import Purpose
from t3d.steps import Agent, Hyperparameters, Metrics, learn


def random_action(seeds: Tensor, step: int, envs: int, action_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Evenly over the whole range [−1, 1), to fill the memory before learning starts: (S, N, A)."""
    return rng.uniform(seeds, Purpose.RANDOM_ACTION, step, (envs, action_dim), dtype)


@torch.no_grad()
def explore(
    agent: Agent, obs: Tensor, step: Tensor | int, noise: float, normalizer: Normalizer | None = None
) -> Tensor:
    """clamp(π(s) + noise · ε, ±1), for each environment and dimension its own ε: (S, N, A)."""
    action = networks.actor(agent.actor, normalize(normalizer, obs))
    epsilon = rng.normal(agent.seeds, Purpose.EXPLORATION, step, action.shape[1:], action.dtype)
    return (action + noise * epsilon).clamp(-1, 1)


def draw(agent: Agent, batch_size: int, action_dim: int) -> tuple[Tensor, Tensor]:
    """The random numbers that belong to the next update of each seed: `bits` (S, B) and `noise` (S, B, A)."""
    bits = rng.halves(agent.seeds, Purpose.SAMPLING, agent.updates, (batch_size,))
    shape, dtype = (batch_size, action_dim), networks.any_of(agent.actor).dtype
    return bits, rng.normal(agent.seeds, Purpose.SMOOTHING, agent.updates, shape, dtype)


def update(agent: Agent, memory: Replay, batch_size: int, hp: Hyperparameters, policy_step: bool) -> Metrics:
    """Steps 4 to 15 once, on a batch and with noise that belong to this update of this seed."""
    bits, noise = draw(agent, batch_size, memory.action_dim)
    return learn(memory, agent, bits, noise, hp, policy_step)


def refuse_divergence(action: NDArray[np.float32], seeds: Sequence[int]) -> None:
    """Say whose networks are no longer finite, before an environment is handed an action (S, N, A) of theirs."""
    flat = action.ravel()
    if flat.dot(flat) <= flat.size:  # they are within ±1: told by one product
        return
    lost = [seed for seed, of_seed in zip(seeds, action, strict=True) if not np.isfinite(of_seed).all()]
    raise _diverged(lost, "actions")


def refuse_diverged(given: dict[str, Tensor], seeds: Sequence[int]) -> None:
    """Name the seeds whose weights, (…, S, in, out) or (S,), are not finite: they are neither saved nor played."""
    bad = [tensor for tensor in given.values() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if not bad:
        return
    finite = torch.stack([part.isfinite().movedim(max(part.dim() - 3, 0), 0).flatten(1).all(1).cpu() for part in bad])
    raise _diverged([seed for seed, good in zip(seeds, finite.all(0).tolist(), strict=True) if not good], "weights")


class Diverged(T3DError):
    """Networks that hold numbers that are not finite."""


def _diverged(seeds: Sequence[int], what: str) -> Diverged:
    return Diverged(
        f"the networks of seed {', '.join(map(str, seeds))} have diverged: their {what} are not finite numbers."
        " A lower --critic-lr and --actor-lr, smaller rewards (--reward-scale) or observations"
        " (--normalize-obs on) would help."
    )


def one_seed(agent: Agent, k: int) -> Agent:
    """The k-th seed as an agent of its own; it shares its tensors with the whole."""

    def view(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: view(tensor) for name, tensor in value.items()}
        if isinstance(value, AdamState):
            return AdamState(view(value.m), view(value.v), view(value.count))
        # Weights are (S, in, out) or (2, S, in, out); counters and seeds are (S,).
        return value.narrow(max(value.dim() - 3, 0), k, 1)

    return Agent(**{field.name: view(getattr(agent, field.name)) for field in fields(agent)})


def tensors(value: Any, prefix: str = "") -> dict[str, Tensor]:
    """Every tensor of a state by its name, `critic_adam.m.w1`: what is saved, restored and compared."""
    if isinstance(value, Tensor):
        return {prefix: value}
    if isinstance(value, np.ndarray):
        return {prefix: torch.from_numpy(value)}
    if isinstance(value, int | list):
        return {prefix: torch.tensor(value)}
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, Replay):
        value = value.tensors()
    dot = f"{prefix}." if prefix else ""
    return {k: t for name, part in value.items() for k, t in tensors(part, dot + name).items()}


def with_tensors(value: Any, given: dict[str, Tensor], prefix: str = "") -> Any:
    """The same thing with the tensors of these names in the place of its own."""
    if isinstance(value, Tensor):
        return given[prefix]
    dot = f"{prefix}." if prefix else ""
    if isinstance(value, Replay):
        return value.with_tensors({name: given[dot + name] for name in value.tensors()})
    if isinstance(value, dict):
        return {name: with_tensors(part, given, dot + name) for name, part in value.items()}
    parts = {field.name: with_tensors(getattr(value, field.name), given, dot + field.name) for field in fields(value)}
    return replace(value, **parts)
