"""T3D: Twin Delayed Deep Deterministic policy gradient, the fifteen steps, in the documents' order.

`update` and `learn` name all fifteen; the functions below them are the steps, one by one. `learn` returns every value
it computes by name, and every random number is an argument of the function that uses it, so each step can be called by
hand and checked. `t3d.train(algorithm=module)` runs another module with these functions.

Shapes: S seeds, B batch, O observation, A action. Seeds are independent agents that learn side by side:
obs (S, B, O), action (S, B, A), reward and y (S, B), and the twins in front: q (2, S, B).
A loss is a mean over its batch; the sum over twins and seeds gives each exactly its own gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.func import grad

from t3d import rng
from t3d.networks import MLP, Networks, Parameters, first, sync_encoder
from t3d.optim import AdamState, adam, init_adam, polyak
from t3d.replay import Batch
from t3d.rng import Purpose
from t3d.state_dict import NOT_SAVED


def update(memory: Memory, agent: Agent, hp: Hyperparameters, batch_size: int, policy_step: bool) -> Update:
    """One update: sample a batch, then learn from it. `policy_step` is true in every `policy_delay`-th update."""
    # [step 1] the replay memory: `memory`, filled transition by transition by `replay.Replay.add`
    # [step 2] the actor and its target: `agent.actor`, `agent.target_actor`, made by `init_agent`
    # [step 3] two critics and their two targets: `agent.critic`, `agent.target_critic`, likewise
    bits, noise = draw(agent, batch_size, memory.action_dim)
    batch = memory.sample(bits, hp.gamma, hp.reward_scale)  # [step 4]
    return learn(batch, agent, noise, hp, policy_step)


def learn(
    batch: Batch, agent: Agent, noise: Tensor, hp: Hyperparameters, policy_step: bool, limit: float = 1.0
) -> Update:
    """Steps 5 to 15. `noise` (S, B, A) is standard normal; actions lie within ±`limit`."""
    target_action = act_target(agent, batch.next_obs, limit)  # [step 5]
    next_action = smooth(target_action, noise, hp.target_noise, hp.target_noise_clip, limit)  # [step 6]
    target_q = q_values(agent, agent.target_critic, batch.next_obs, next_action)  # [step 7]
    smaller_q = min_q(target_q)  # [step 8]
    y = bellman(batch.reward, batch.discount, batch.terminated, smaller_q)  # [step 9]

    def critic_loss(critic: Parameters) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q = q_values(agent, critic, batch.obs, batch.action)  # [step 10]
        losses = squared_errors(q, y)  # [step 11]
        return losses.sum(), (losses, q)

    critic_update = update_critic(agent, critic_loss, hp.critic_lr)  # [step 12]

    actor_update = None
    if policy_step:
        actor_update = update_actor(agent, batch.obs, hp.actor_lr, limit)  # [step 13]
        update_target_actor(agent, hp.tau)  # [step 14]
        update_target_critic(agent, hp.tau)  # [step 15]
    return Update(batch, target_action, next_action, target_q, smaller_q, y, critic_update, actor_update)


class Memory(Protocol):
    """[step 1] Anything that batches can be sampled from; `replay.Replay` is the one used in training."""

    action_dim: int

    def sample(self, bits: Tensor, gamma: float, reward_scale: float) -> Batch: ...


@dataclass
class Agent:
    """[steps 2 and 3] All of an agent that changes: four sets of weights (six networks) and two Adams."""

    networks: Networks = field(metadata=NOT_SAVED)  # the functions that read the weights
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
    networks: Networks = MLP,
) -> Agent:
    """[steps 2 and 3] θ' = θ and φ' = φ: a target starts as a copy of what it follows."""
    actor = networks.init_actor(seeds, obs_dim, action_dim, hidden, dtype)
    critic = networks.init_critic(seeds, obs_dim, action_dim, hidden, dtype)
    return Agent(
        networks=networks,
        seeds=seeds,
        actor=actor,
        target_actor={name: tensor.clone() for name, tensor in actor.items()},
        critic=critic,
        target_critic={name: tensor.clone() for name, tensor in critic.items()},
        actor_adam=init_adam(actor, seeds),
        critic_adam=init_adam(critic, seeds),
    )


def draw(agent: Agent, batch_size: int, action_dim: int) -> tuple[Tensor, Tensor]:
    """The random numbers of each seed's next update: `bits` (S, B) draw the batch, `noise` (S, B, A) is for step 6."""
    updates = agent.critic_adam.count
    bits = rng.halves(agent.seeds, Purpose.SAMPLING, updates, (batch_size,))
    shape, dtype = (batch_size, action_dim), next(iter(agent.actor.values())).dtype
    return bits, rng.normal(agent.seeds, Purpose.SMOOTHING, updates, shape, dtype)


def act_target(agent: Agent, next_obs: Tensor, limit: float) -> Tensor:
    """[step 5] a' = π'(s')."""
    return agent.networks.actor(agent.target_actor, next_obs, limit)


def smooth(action: Tensor, noise: Tensor, scale: float, clip: float, limit: float) -> Tensor:
    """[step 6] a' ← clamp(a' + clamp(scale · ε, ±clip), ±limit): the noise is clipped, then the action."""
    return (action + (scale * noise).clamp(-clip, clip)).clamp(-limit, limit)


def q_values(agent: Agent, critic: Parameters, obs: Tensor, action: Tensor) -> Tensor:
    """[steps 7 and 10] Q₁(s, a) and Q₂(s, a): (2, S, B)."""
    return agent.networks.critic(critic, obs, action)


def min_q(q: Tensor) -> Tensor:
    """[step 8] min(Q₁', Q₂'), for each transition of the batch by itself: (S, B)."""
    return q.amin(0)


def bellman(reward: Tensor, discount: Tensor, terminated: Tensor, target_q: Tensor) -> Tensor:
    """[step 9] y = r + discount · (1 − terminated) · min(Q₁', Q₂'), detached: a constant to step 11."""
    return reward + (discount * (1 - terminated) * target_q).detach()


def squared_errors(q: Tensor, y: Tensor) -> Tensor:
    """[step 11] mean (Q₁ − y)² + mean (Q₂ − y)²: (S,)."""
    return ((q - y) ** 2).mean(-1).sum(0)


CriticLoss = Callable[[Parameters], tuple[Tensor, tuple[Tensor, Tensor]]]  # φ -> the sum, and each seed's loss and q


def update_critic(agent: Agent, critic_loss: CriticLoss, lr: float) -> CriticUpdate:
    """[step 12] φ ← Adam(φ, ∇ critic_loss(φ)), both critics in one step."""
    gradients, (losses, q) = grad(critic_loss, has_aux=True)(agent.critic)
    adam(agent.critic, gradients, agent.critic_adam, lr)
    return CriticUpdate(q, losses, gradients)


def is_policy_step(update: int, policy_delay: int) -> bool:
    """[step 13] Updates are counted from 1 over the agent's life: with a delay of 2 the actor moves in 2, 4, …"""
    return update % policy_delay == 0


def actor_loss(agent: Agent, actor: Parameters, obs: Tensor, limit: float) -> Tensor:
    """[step 13] −mean Q₁(s, π(s)): (S,). Down this loss is up the first critic."""
    action = agent.networks.actor(actor, obs, limit)
    return -agent.networks.critic(first(agent.critic), obs, action).mean(-1)


def update_actor(agent: Agent, obs: Tensor, lr: float, limit: float) -> ActorUpdate:
    """[step 13] θ ← Adam(θ, ∇ actor_loss(θ)). The critic is differentiated through, never changed."""

    def total(actor: Parameters) -> tuple[Tensor, Tensor]:
        losses = actor_loss(agent, actor, obs, limit)
        return losses.sum(), losses

    sync_encoder(agent.actor, agent.critic)  # copies nothing unless actor and critics share an image encoder
    gradients, losses = grad(total, has_aux=True)(agent.actor)
    adam(agent.actor, gradients, agent.actor_adam, lr)
    return ActorUpdate(losses, gradients)


def update_target_actor(agent: Agent, tau: float) -> None:
    """[step 14] θ' ← (1 − τ) · θ' + τ · θ."""
    polyak(agent.target_actor, agent.actor, tau)


def update_target_critic(agent: Agent, tau: float) -> None:
    """[step 15] φ' ← (1 − τ) · φ' + τ · φ, for both critics."""
    polyak(agent.target_critic, agent.critic, tau)


@dataclass(frozen=True)
class CriticUpdate:
    """Steps 10 to 12: the current values (2, S, B), each seed's loss (S,), and its gradients."""

    q: Tensor
    loss: Tensor
    gradients: Parameters


@dataclass(frozen=True)
class ActorUpdate:
    """Step 13: each seed's loss (S,), and its gradients."""

    loss: Tensor
    gradients: Parameters


@dataclass(frozen=True)
class Update:
    """Every value of one update by name, in the order of the steps."""

    batch: Batch  # [step 4]
    target_action: Tensor  # [step 5] a' before the noise
    next_action: Tensor  # [step 6] a' after noise and clamps
    target_q: Tensor  # [step 7] (2, S, B)
    min_q: Tensor  # [step 8]
    y: Tensor  # [step 9]
    critic: CriticUpdate  # [steps 10 to 12]
    actor: ActorUpdate | None  # [step 13] in a policy step

    def metrics(self) -> Metrics:
        """What metrics.jsonl reports of an update."""
        values = {"critic_loss": self.critic.loss, "q_mean": self.critic.q.mean((0, 2))}
        return values if self.actor is None else {**values, "actor_loss": self.actor.loss}


METRICS = ("critic_loss", "q_mean")  # of every update
POLICY_METRICS = ("actor_loss",)  # of policy steps only
Metrics = dict[str, Tensor]  # each (S,)


@dataclass(frozen=True)
class Hyperparameters:
    """The numbers in the equations above."""

    gamma: float = 0.99
    """Discount factor. [steps 4, 9]"""
    tau: float = 0.005
    """Polyak averaging coefficient of the target networks. [steps 14, 15]"""
    target_noise: float = 0.2
    """Standard deviation of the target policy smoothing noise; 1 is half the action range. [step 6]"""
    target_noise_clip: float = 0.5
    """Clipping range of the target policy smoothing noise. [step 6]"""
    policy_delay: int = 2
    """Critic updates per update of the actor and the target networks. [steps 13-15]"""
    actor_lr: float = 3e-4
    """Learning rate of the actor (Adam). [step 13]"""
    critic_lr: float = 3e-4
    """Learning rate of the critics (Adam). [step 12]"""
    reward_scale: float = 1.0
    """Factor on the rewards in sampled batches. Recorded returns are not scaled. [step 4]"""
