"""Noise-free episodes, on environments of their own, from seeds that stay the same; and statistics over seeds.

Every policy of a run is evaluated in one batch of one shape, (S, episodes, O), during training and ever
after: products of another shape may round differently, and then a recorded score could not be had again.

Shapes: S seeds, E evaluations, N environments (all episodes of all seeds), T steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from t3d import networks, rng
from t3d.agent import refuse_divergence
from t3d.envs import EnvFactory
from t3d.envs.batch import MOST_LOSSES, EnvError
from t3d.networks import Parameters
from t3d.replay import Normalizer, normalize
from t3d.rng import Purpose


@dataclass(frozen=True)
class PolicySnapshot:
    """Who plays in an evaluation: every seed's actor, and what belongs to it."""

    actor: Parameters
    critic: Parameters = field(default_factory=dict)  # one, if its values are to be compared with what comes after them
    normalizer: Parameters = field(default_factory=dict)  # a `Normalizer`, if actors see observations through one


@dataclass(frozen=True)
class Evaluation:
    """Episode by episode: (S, episodes)."""

    returns: NDArray[np.float64]  # nan where the episode could not be played to its end
    lengths: NDArray[np.int64]
    values: "Values | None" = None
    replayed: int = 0  # times that episodes were begun again because their worker process ended

    @property
    def means(self) -> NDArray[np.float64]:
        """(S,) over the episodes that were played to their end; nan where none was."""
        there = ~np.isnan(self.returns)
        with np.errstate(invalid="ignore"):
            means: NDArray[np.float64] = np.where(there, self.returns, 0.0).sum(1) / there.sum(1)
        return means


@dataclass(frozen=True)
class Values:
    """What the first critic expected, and what came: means over the states of an evaluation, (S,)."""

    expected: NDArray[np.float64]
    came: NDArray[np.float64]


class Evaluator:
    """The environments that evaluations play in: one for each seed and episode, used again each time.

    On a real environment episodes are played one after another.
    """

    beside = False  # they are played when the answer is called for

    def __init__(
        self,
        factory: EnvFactory,
        seeds: Sequence[int],
        episodes: int,
        gamma: float,
        workers: int = 0,
        worker_timeout: float = 60.0,
    ) -> None:
        self.seeds, self.episodes, self.gamma = list(seeds), episodes, gamma
        self.at_once = 1 if factory.real else episodes
        self._first_episode = 0
        self.envs = factory.batch(len(self.seeds) * self.at_once, self._episode_seed, workers, worker_timeout)
        self.envs.skip_losses = True

    def _episode_seed(self, env: int, _: int) -> int:
        seed, episode = self.seeds[env // self.at_once], env % self.at_once + self._first_episode
        return rng.integer(seed, Purpose.EVALUATION, episode)

    @torch.no_grad()
    def play(
        self,
        policy_snapshot: PolicySnapshot,
        first_episode: int = 0,
        stop: Callable[[], bool] = lambda: False,
    ) -> Evaluation:
        """Episodes `first_episode`, … of every seed with its own actor (S, in, out), unless told to stop.

        With a critic its values are compared with the returns that followed, discounted by `gamma`. An episode whose
        worker process ended is begun again, from the same seed.
        """
        actor, critic, normalizer = (
            policy_snapshot.actor,
            policy_snapshot.critic,
            Normalizer(**policy_snapshot.normalizer) if policy_snapshot.normalizer else None,
        )
        self._first_episode = first_episode
        shape = (len(self.seeds), self.at_once)
        device = networks.any_of(actor).device
        count = self.envs.count
        returns, lengths, losses, replayed = np.zeros(count), np.zeros(count, np.int64), np.zeros(count, np.int64), 0
        active = np.ones(count, bool)
        obs = self.envs.reset()
        seen: list[tuple[NDArray[Any], ...]] = []
        while not stop():
            if self.envs.skipped is not None:  # their process ended again and again before the first step
                losses[self.envs.skipped] = MOST_LOSSES
                active &= ~self.envs.skipped
                returns[self.envs.skipped] = np.nan
            if not active.any():
                break
            batch = normalize(normalizer, torch.from_numpy(obs).reshape(*shape, -1).to(device))
            chosen = networks.actor(actor, batch)
            action = chosen.cpu().numpy()
            refuse_divergence(action, self.seeds)
            moved = self.envs.step(action.reshape(count, -1), None if active.all() else active)
            if critic:
                q = networks.critic(critic, batch, chosen).cpu().numpy().reshape(-1)
                seen.append((q, moved.reward, moved.terminated, moved.valid.copy()))
            returns += moved.reward
            lengths += moved.valid
            ended = moved.terminated | moved.truncated
            if self.envs.worker_lost is not None and self.envs.blamed is not None:
                again = active & self.envs.worker_lost
                losses += active & self.envs.blamed
                replayed += int(again.sum())
                returns[again], lengths[again] = 0, 0
                for *_, valid in seen:
                    valid[again] = False
                ended = (ended & ~again) | (losses >= MOST_LOSSES)
                returns[losses >= MOST_LOSSES] = np.nan
            active &= ~ended
            obs = moved.obs
        parts = [np.array(part) for part in zip(*seen, strict=True)]
        values = compared(parts, self.gamma, len(self.seeds)) if seen else None
        return Evaluation(returns.reshape(shape), lengths.reshape(shape), values, replayed)

    def submit(self, policy_snapshot: PolicySnapshot) -> None:
        """Nothing happens before the answer is called for."""

    def poll(self) -> Evaluation | None:
        """What came of it, if it is there already."""
        return None

    def result(self, policy_snapshot: PolicySnapshot, stop: Callable[[], bool]) -> Evaluation | None:
        """What came of those who were asked to play; None if told to stop before it was over."""
        parts = []
        for first in range(0, self.episodes, self.at_once):
            try:
                parts.append(self.play(policy_snapshot, first, stop))
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

    def close(self) -> None:
        self.envs.close()


class NoEvaluator:
    """Where a run has no evaluations."""

    beside = False

    def submit(self, policy_snapshot: PolicySnapshot) -> None: ...

    def poll(self) -> Evaluation | None:
        return None

    def result(self, policy_snapshot: PolicySnapshot, stop: Callable[[], bool]) -> Evaluation | None:
        return None

    def close(self) -> None: ...


NEGLIGIBLE = 0.01  # of what comes so much later nothing is missed


def compared(steps: list[NDArray[Any]], gamma: float, seeds: int) -> Values:
    """Values and discounted returns over the states whose future was seen: (S,), nan where there is none.

    `steps` are q, reward, terminated and valid, each (T, N). A time limit hides what would have come after it, so what
    lies shortly before one does not count.
    """
    q, reward, terminated, valid = steps
    came, weight = np.zeros(reward.shape), np.zeros(reward.shape)
    later, hidden = np.zeros(reward.shape[1]), np.ones(reward.shape[1])  # the share of the future that is not seen
    for t in reversed(range(len(reward))):
        later = np.where(valid[t], reward[t] + gamma * np.where(terminated[t], 0, later), later)
        hidden = np.where(valid[t], gamma * np.where(terminated[t], 0, hidden), hidden)
        came[t], weight[t] = later, valid[t] & (hidden < NEGLIGIBLE)
    count = weight.reshape(len(weight), seeds, -1).sum((0, 2))
    with np.errstate(invalid="ignore"):
        expected, came = ((x * weight).reshape(len(weight), seeds, -1).sum((0, 2)) / count for x in (q, came))
    return Values(expected, came)
