"""Acting with an agent, and its parts: one seed of it, and the check that it has not diverged.

The agent itself is plain data (`steps.Agent`). A random number depends on the seed, on its purpose, and on the
environment step, so nothing here has a state of its own.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from t3d import rng
from t3d.errors import T3DError
from t3d.networks import Networks, Parameters
from t3d.normalizer import Scaling, normalize
from t3d.optim import AdamState
from t3d.rng import Purpose
from t3d.steps import Agent


@torch.no_grad()
def act(networks: Networks, actor: Parameters, obs: Tensor, scaling: Scaling | None = None) -> Tensor:
    """π(s) in [−1, 1], the observation normalized first where a run normalizes: (S, B, O) -> (S, B, A)."""
    return networks.actor(actor, obs if scaling is None else normalize(obs, scaling))


@torch.no_grad()
def explore(agent: Agent, obs: Tensor, step: Tensor | int, noise: float, scaling: Scaling | None = None) -> Tensor:
    """clamp(π(s) + noise · ε, ±1); ε differs by environment and dimension: (S, N, O) -> (S, N, A)."""
    action = act(agent.networks, agent.actor, obs, scaling)
    epsilon = rng.normal(agent.seeds, Purpose.EXPLORATION, step, action.shape[1:], action.dtype)
    return (action + noise * epsilon).clamp(-1, 1)


def random_action(seeds: Tensor, step: int, envs: int, action_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform in [−1, 1), to fill the replay memory before learning starts: (S, N, A)."""
    return rng.uniform(seeds, Purpose.RANDOM_ACTION, step, (envs, action_dim), dtype)


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
        if not isinstance(value, Tensor):
            return value
        # Weights are (S, in, out) or (2, S, in, out); counters and seeds are (S,).
        return value.narrow(max(value.dim() - 3, 0), k, 1)

    return replace(agent, **{field.name: view(getattr(agent, field.name)) for field in fields(agent)})
