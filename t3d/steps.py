"""T3D: Twin Delayed Deep Deterministic policy gradient, the fifteen steps, in the documents' order.

`learn` names all fifteen; the functions below it are the steps, one by one. Every random number is an
argument of the function that uses it, so each step can be called by hand and checked.

Shapes: S seeds, B batch, O observation, A action. Seeds are independent agents that learn side by side:
obs (S, B, O), action (S, B, A), reward and y (S, B), and the twins in front: q (2, S, B).
A loss is a mean over its batch; the sum over twins and seeds gives each exactly its own gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.func import grad

from t3d import networks
from t3d.networks import Parameters
from t3d.optim import AdamState, adam, init_adam, polyak
from t3d.replay import Batch


def learn(
    memory: Memory,
    agent: Agent,
    bits: Tensor,
    noise: Tensor,
    hp: Hyperparameters,
    policy_step: bool,
    limit: float = 1.0,
) -> Metrics:
    """One update, the fifteen steps: `bits` (S, B) draw the batch, `noise` (S, B, A) is standard normal,
    `delayed` is true on every second update, and actions lie within ±`limit`."""
    # [step 1] the replay memory: `memory`, filled transition by transition by `replay.Replay.add`
    # [step 2] the actor and its target: `agent.actor`, `agent.target_actor`, made by `init_agent`
    # [step 3] two critics and their two targets: `agent.critic`, `agent.target_critic`, likewise
    batch = memory.sample(bits, hp.gamma)  # [step 4]

    next_action = target_action(agent.target_actor, batch.next_obs, limit)  # [step 5]
    next_action = smooth(next_action, noise, hp.target_noise, hp.target_noise_clip, limit)  # [step 6]
    target_q = q_values(agent.target_critic, batch.next_obs, next_action)  # [step 7]
    target_q = min_q(target_q)  # [step 8]
    y = bellman(batch.reward, batch.discount, batch.terminated, target_q)  # [step 9]

    def critic_loss(critic: Parameters) -> tuple[Tensor, Tensor]:
        q = q_values(critic, batch.obs, batch.action)  # [step 10]
        return squared_errors(q, y), q  # [step 11]

    metrics = update_critic(agent, critic_loss, hp.critic_lr)  # [step 12]

    if policy_step:
        metrics |= update_actor(agent, batch.obs, hp.actor_lr, limit)  # [step 13]
        update_target_actor(agent, hp.tau)  # [step 14]
        update_target_critic(agent, hp.tau)  # [step 15]
    return metrics


class Memory(Protocol):
    """[step 1] Anything a batch can be sampled from; `replay.Replay` is the one used in training."""

    def sample(self, bits: Tensor, gamma: float) -> Batch: ...


@dataclass
class Agent:
    """[steps 2 and 3] All of an agent that changes: four sets of weights (six networks) and two Adams."""

    seeds: Tensor  # (S,) whose random numbers are whose; never changes
    actor: Parameters
    target_actor: Parameters
    critic: Parameters
    target_critic: Parameters
    actor_adam: AdamState
    critic_adam: AdamState

    @property
    def updates(self) -> Tensor:
        """(S,) updates over the agent's life: every one is an Adam step of the critics."""
        return self.critic_adam.count


def init_agent(
    seeds: Tensor,
    obs_dim: int,
    action_dim: int,
    hidden: Sequence[int],
    dtype: torch.dtype = torch.float32,
    twins: int = 2,
    normalized: bool = False,
) -> Agent:
    """[steps 2 and 3] θ' = θ and φ' = φ: a target starts as a copy of what it follows."""
    actor = networks.init_actor(seeds, obs_dim, action_dim, hidden, dtype)
    critic = networks.init_critic(seeds, obs_dim, action_dim, hidden, dtype, twins, normalized)
    return Agent(
        seeds=seeds,
        actor=actor,
        target_actor={name: tensor.clone() for name, tensor in actor.items()},
        critic=critic,
        target_critic={name: tensor.clone() for name, tensor in critic.items()},
        actor_adam=init_adam(actor, seeds),
        critic_adam=init_adam(critic, seeds),
    )


def target_action(target_actor: Parameters, next_obs: Tensor, limit: float) -> Tensor:
    """[step 5] a' = π'(s')."""
    return networks.actor(target_actor, next_obs, limit)


def smooth(action: Tensor, noise: Tensor, scale: float, clip: float, limit: float) -> Tensor:
    """[step 6] a' ← clamp(a' + clamp(scale · ε, ±clip), ±limit): the noise is clipped, then the action."""
    return (action + (scale * noise).clamp(-clip, clip)).clamp(-limit, limit)


def q_values(critic: Parameters, obs: Tensor, action: Tensor) -> Tensor:
    """[steps 7 and 10] Q₁(s, a) and Q₂(s, a): (2, S, B)."""
    return networks.critic(critic, obs, action)


def min_q(q: Tensor) -> Tensor:
    """[step 8] min(Q₁', Q₂'), for each transition of the batch by itself: (S, B)."""
    return q.amin(0)


def bellman(reward: Tensor, discount: Tensor, terminated: Tensor, target_q: Tensor) -> Tensor:
    """[step 9] y = r + discount · (1 − terminated) · min(Q₁', Q₂'), detached: a constant to step 11."""
    return reward + (discount * (1 - terminated) * target_q).detach()


def squared_errors(q: Tensor, y: Tensor) -> Tensor:
    """[step 11] mean (Q₁ − y)² + mean (Q₂ − y)²: (S,)."""
    return ((q - y) ** 2).mean(-1).sum(0)


def update_critic(agent: Agent, loss: Callable[[Parameters], tuple[Tensor, Tensor]], lr: float) -> Metrics:
    """[step 12] φ ← Adam(φ, ∇ loss(φ)), both critics in one step."""

    def total(critic: Parameters) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        losses, q = loss(critic)
        return losses.sum(), (losses, q)

    gradients, (losses, q) = grad(total, has_aux=True)(agent.critic)
    adam(agent.critic, gradients, agent.critic_adam, lr)
    return {"critic_loss": losses, "q_mean": q.mean((0, 2))}


def is_policy_step(update: int, policy_delay: int) -> bool:
    """[step 13] Updates are counted from 1 over the agent's life: with a delay of 2 the actor moves in 2, 4, …"""
    return update % policy_delay == 0


def actor_loss(actor: Parameters, critic: Parameters, obs: Tensor, limit: float) -> Tensor:
    """[step 13] −mean Q₁(s, π(s)): (S,). Down this loss is up the first critic."""
    action = networks.actor(actor, obs, limit)
    return -networks.critic(networks.first(critic), obs, action).mean(-1)


def update_actor(agent: Agent, obs: Tensor, lr: float, limit: float) -> Metrics:
    """[step 13] θ ← Adam(θ, ∇ actor_loss(θ)). The critic is differentiated through, never changed."""

    def total(actor: Parameters) -> tuple[Tensor, Tensor]:
        losses = actor_loss(actor, agent.critic, obs, limit)
        return losses.sum(), losses

    networks.sync_encoder(agent.actor, agent.critic)  # nothing, unless images are seen through the critics' eye
    gradients, losses = grad(total, has_aux=True)(agent.actor)
    adam(agent.actor, gradients, agent.actor_adam, lr)
    return {"actor_loss": losses}


def update_target_actor(agent: Agent, tau: float) -> None:
    """[step 14] θ' ← (1 − τ) · θ' + τ · θ."""
    polyak(agent.target_actor, agent.actor, tau)


def update_target_critic(agent: Agent, tau: float) -> None:
    """[step 15] φ' ← (1 − τ) · φ' + τ · φ, for both critics."""
    polyak(agent.target_critic, agent.critic, tau)


Metrics = dict[str, Tensor]
"""What an update reports, each (S,): `critic_loss`, `q_mean` and, on every second, `actor_loss`."""


@dataclass(frozen=True)
class Hyperparameters:
    """The numbers in the equations above."""

    gamma: float = 0.99
    """Discount of the next state's value. [step 9]"""
    tau: float = 0.005
    """Share of the trained weights that moves into the targets. [steps 14, 15]"""
    target_noise: float = 0.2
    """Standard deviation of the noise on the target action, 1 being half the action range. [step 6]"""
    target_noise_clip: float = 0.5
    """Largest noise on the target action. [step 6]"""
    policy_delay: int = 2
    """Updates of the critics for each update of the actor and the targets. [steps 13-15]"""
    actor_lr: float = 3e-4
    """Adam's learning rate for the actor. [step 13]"""
    critic_lr: float = 3e-4
    """Adam's learning rate for the critics. [step 12]"""
