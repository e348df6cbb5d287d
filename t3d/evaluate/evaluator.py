"""Evaluation: noise-free episodes in environments of their own, from the same seeds every time.

All policies of a run are evaluated in one batch of one shape, (S, episodes, O), during training and afterwards:
products of another shape may round differently, and a recorded score could not be reproduced.

Shapes: S seeds, E evaluations, N environments (all episodes of all seeds), T steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from t3d import rng
from t3d.agent import act, refuse_divergence
from t3d.config import Config
from t3d.envs import EnvFactory
from t3d.envs.batch import MOST_LOSSES, EnvError, Flags
from t3d.networks import Networks, Parameters, any_of
from t3d.normalizer import Scaling, normalize
from t3d.rng import Purpose
from t3d.state_dict import NOT_SAVED, tensors, with_tensors

StopCheck = Callable[[], bool]


@dataclass(frozen=True)
class PolicySnapshot:
    """Every seed's policy at one step, to be evaluated."""

    networks: Networks = field(metadata=NOT_SAVED)
    actor: Parameters
    critic: Parameters = field(default_factory=dict)  # the first one, if its values are compared with returns
    scaling: Scaling | None = None  # of observations, where they are normalized

    def copied(self, device: str) -> "PolicySnapshot":
        """A copy on a device."""
        there = {name: tensor.to(device, copy=True) for name, tensor in tensors(self).items()}
        copy: PolicySnapshot = with_tensors(self, there)
        return copy


@dataclass(frozen=True)
class Evaluation:
    """Episode by episode: (S, episodes)."""

    returns: NDArray[np.float64]  # nan where an episode was given up
    lengths: NDArray[np.int64]
    values: "Values | None" = None
    replayed: int = 0  # episodes begun again because their worker process ended

    @property
    def means(self) -> NDArray[np.float64]:
        """(S,) over the complete episodes; nan where there is none."""
        complete = ~np.isnan(self.returns)
        with np.errstate(invalid="ignore"):
            means: NDArray[np.float64] = np.where(complete, self.returns, 0.0).sum(1) / complete.sum(1)
        return means


@dataclass(frozen=True)
class Values:
    """Means over the states of an evaluation, (S,): the first critic's values, and the returns that followed."""

    predicted: NDArray[np.float64]
    discounted_returns: NDArray[np.float64]


class AnyEvaluator(Protocol):
    """What the trainer asks: `submit` a snapshot, then `poll` for its result or wait for it with `result`."""

    concurrent: bool  # whether evaluations run while training goes on

    def submit(self, snapshot: PolicySnapshot) -> None: ...

    def poll(self) -> Evaluation | None:
        """The result, if it is there already."""
        ...

    def result(self, snapshot: PolicySnapshot, stop: StopCheck) -> Evaluation | None:
        """The result; None if told to stop before it is there."""
        ...

    def close(self) -> None: ...


class Evaluator:
    """Evaluates in this process, when `result` is called. Each seed and episode has an environment of its own.

    On a real environment episodes run one after another.
    """

    concurrent = False

    def __init__(self, factory: EnvFactory, seeds: Sequence[int], config: Config) -> None:
        self.seeds, self.episodes, self.gamma = list(seeds), config.eval_episodes, config.gamma
        self.at_once = 1 if factory.real else self.episodes
        self._first_episode = 0
        count = len(self.seeds) * self.at_once
        self.envs = factory.batch(count, self._episode_seed, config.workers, config.worker_timeout)
        self.envs.skip_losses = True

    def _episode_seed(self, env: int, _: int) -> int:
        seed, episode = self.seeds[env // self.at_once], env % self.at_once + self._first_episode
        return rng.integer(seed, Purpose.EVALUATION, episode)

    def submit(self, snapshot: PolicySnapshot) -> None:
        """Nothing to prepare."""

    def poll(self) -> Evaluation | None:
        return None

    def result(self, snapshot: PolicySnapshot, stop: StopCheck) -> Evaluation | None:
        parts = []
        for first in range(0, self.episodes, self.at_once):
            try:
                parts.append(self.run(snapshot, first, stop))
            except EnvError as failure:
                k, episode = divmod(failure.index or 0, self.at_once)
                failure.place = f"episode {first + episode} of the evaluation of seed {self.seeds[k]}"
                failure.in_evaluation = True
                raise
            if stop():
                return None
        if len(parts) == 1:
            return parts[0]
        returns = np.concatenate([part.returns for part in parts], 1)
        lengths = np.concatenate([part.lengths for part in parts], 1)
        return Evaluation(returns, lengths, replayed=sum(part.replayed for part in parts))

    @torch.no_grad()
    def run(self, snapshot: PolicySnapshot, first_episode: int = 0, stop: StopCheck = lambda: False) -> Evaluation:
        """Episodes `first_episode`, … of every seed with its own actor, unless told to stop.

        With a critic its values are compared with the discounted returns that followed. An episode whose worker
        process ended is begun again from the same seed.
        """
        self._first_episode = first_episode  # `_episode_seed` reads it when the environments are reset
        shape, device = (len(self.seeds), self.at_once), any_of(snapshot.actor).device
        obs, episodes = self.envs.reset(), _Episodes(self.envs.count)
        while not stop():
            if self.envs.skipped is not None:
                episodes.give_up(self.envs.skipped)
            if not episodes.active.any():
                break
            here = torch.from_numpy(obs).reshape(*shape, -1).to(device)
            chosen = act(snapshot.networks, snapshot.actor, here, snapshot.scaling)
            action = chosen.cpu().numpy()
            refuse_divergence(action, self.seeds)
            active = None if episodes.active.all() else episodes.active
            result = self.envs.step(action.reshape(self.envs.count, -1), active)
            if snapshot.critic:
                scaling = snapshot.scaling
                q = snapshot.networks.critic(
                    snapshot.critic, here if scaling is None else normalize(here, scaling), chosen
                )
                seen = q.cpu().numpy().reshape(-1), result.reward, result.terminated, result.valid.copy()
                episodes.seen.append(seen)
            episodes.returns += result.reward
            episodes.lengths += result.valid
            ended = result.terminated | result.truncated
            if self.envs.worker_lost is not None and self.envs.blamed is not None:
                ended = episodes.restart(self.envs.worker_lost, self.envs.blamed, ended)
            episodes.active &= ~ended
            obs = result.obs
        parts = [np.array(part) for part in zip(*episodes.seen, strict=True)]
        values = compare_values(parts, self.gamma, len(self.seeds)) if parts else None
        returns, lengths = episodes.returns.reshape(shape), episodes.lengths.reshape(shape)
        return Evaluation(returns, lengths, values, episodes.replayed)

    def close(self) -> None:
        self.envs.close()


class _Episodes:
    """The episodes of an evaluation while they run, one for each environment: (N,)."""

    def __init__(self, count: int) -> None:
        self.active = np.ones(count, bool)
        self.returns, self.lengths, self._losses = np.zeros(count), np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.replayed = 0
        self.seen: list[tuple[NDArray[Any], ...]] = []  # q, reward, terminated and valid of every step

    def give_up(self, skipped: Flags) -> None:
        """End episodes whose worker process ended again and again before the first step."""
        self._losses[skipped] = MOST_LOSSES
        self.active &= ~skipped
        self.returns[skipped] = np.nan

    def restart(self, lost: Flags, blamed: Flags, ended: Flags) -> Flags:
        """Restart episodes whose worker process ended; returns which episodes `ended`, those given up included."""
        again = self.active & lost
        self._losses += self.active & blamed
        self.replayed += int(again.sum())
        self.returns[again], self.lengths[again] = 0, 0
        for *_, valid in self.seen:
            valid[again] = False
        given_up = self._losses >= MOST_LOSSES
        self.returns[given_up] = np.nan
        ended_now: Flags = (ended & ~again) | given_up
        return ended_now


NEGLIGIBLE = 0.01


def compare_values(steps: list[NDArray[Any]], gamma: float, seeds: int) -> Values:
    """Values and discounted returns over the states whose future was seen: (S,), nan where there is none.

    `steps` are q, reward, terminated and valid, each (T, N). A time limit hides the future, so states whose unseen
    future weighs more than 1 % are ignored.
    """
    q, reward, terminated, valid = steps
    returns, weight = np.zeros(reward.shape), np.zeros(reward.shape)
    later, hidden = np.zeros(reward.shape[1]), np.ones(reward.shape[1])  # the share of the future that is not seen
    for t in reversed(range(len(reward))):
        later = np.where(valid[t], reward[t] + gamma * np.where(terminated[t], 0, later), later)
        hidden = np.where(valid[t], gamma * np.where(terminated[t], 0, hidden), hidden)
        returns[t], weight[t] = later, valid[t] & (hidden < NEGLIGIBLE)
    count = weight.reshape(len(weight), seeds, -1).sum((0, 2))
    with np.errstate(invalid="ignore"):
        predicted, discounted = ((x * weight).reshape(len(weight), seeds, -1).sum((0, 2)) / count for x in (q, returns))
    return Values(predicted, discounted)
