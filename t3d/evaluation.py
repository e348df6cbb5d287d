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
from t3d.envs import Source
from t3d.envs.batch import MOST_LOSSES, EnvError
from t3d.networks import Parameters
from t3d.replay import Lens, seen_through
from t3d.rng import Purpose


@dataclass(frozen=True)
class Players:
    """Who plays in an evaluation: every seed's actor, and what belongs to it."""

    actor: Parameters
    critic: Parameters = field(default_factory=dict)  # one, if its values are to be compared with what comes after them
    lens: Parameters = field(default_factory=dict)  # a `Lens`, if actors see observations through one


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
        source: Source,
        seeds: Sequence[int],
        episodes: int,
        gamma: float,
        workers: int = 0,
        stall_seconds: float = 60.0,
    ) -> None:
        self.seeds, self.episodes, self.gamma = list(seeds), episodes, gamma
        self.at_once = 1 if source.real else episodes
        self._first_episode = 0
        self.envs = source.batch(len(self.seeds) * self.at_once, self._episode_seed, workers, stall_seconds)
        self.envs.skip_losses = True

    def _episode_seed(self, env: int, _: int) -> int:
        seed, episode = self.seeds[env // self.at_once], env % self.at_once + self._first_episode
        return rng.integer(seed, Purpose.EVALUATION, episode)

    @torch.no_grad()
    def play(
        self,
        players: Players,
        first_episode: int = 0,
        stop: Callable[[], bool] = lambda: False,
    ) -> Evaluation:
        """Episodes `first_episode`, … of every seed with its own actor (S, in, out), unless told to stop.

        With a critic its values are compared with the returns that followed, discounted by `gamma`. An episode whose
        worker process ended is begun again, from the same seed.
        """
        actor, critic, lens = players.actor, players.critic, Lens(**players.lens) if players.lens else None
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
            batch = seen_through(lens, torch.from_numpy(obs).reshape(*shape, -1).to(device))
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

    def ask(self, players: Players) -> None:
        """Nothing happens before the answer is called for."""

    def glance(self) -> Evaluation | None:
        """What came of it, if it is there already."""
        return None

    def answer(self, players: Players, stop: Callable[[], bool]) -> Evaluation | None:
        """What came of those who were asked to play; None if told to stop before it was over."""
        parts = []
        for first in range(0, self.episodes, self.at_once):
            try:
                parts.append(self.play(players, first, stop))
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

    def ask(self, players: Players) -> None: ...

    def glance(self) -> Evaluation | None:
        return None

    def answer(self, players: Players, stop: Callable[[], bool]) -> Evaluation | None:
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


# ------------------------------------------------------------------------------------------- statistics over seeds


def best_mean(curves: NDArray[np.float64]) -> tuple[int, float, float]:
    """Of curves (S, E): the evaluation at which the mean over seeds is highest, that mean, and the deviation there.

    This is what the TD3 paper's Table 1 gives; the deviation is that of the population.
    """
    best = int(curves.mean(0).argmax())
    return best, float(curves[:, best].mean()), float(curves[:, best].std())


def last_mean(curves: NDArray[np.float64], count: int = 10) -> NDArray[np.float64]:
    """(S, E) -> (S,): each seed's mean over its last evaluations."""
    mean: NDArray[np.float64] = curves[:, -count:].mean(1)
    return mean


def interquartile_mean(scores: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
    """The mean of the middle half: a quarter of the scores is left out at either end, rounded down."""
    ordered = np.sort(scores, axis)
    cut = ordered.shape[axis] // 4
    mean: NDArray[np.float64] = ordered.take(range(cut, ordered.shape[axis] - cut), axis).mean(axis)
    return mean


def interval(
    groups: Sequence[NDArray[np.float64]],
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    samples: int = 10_000,
    level: float = 0.95,
) -> tuple[float, float]:
    """Where `statistic` lies in `level` of the samples: seeds are drawn again from each group by itself, stratified.

    The statistic takes (samples, all that were drawn) and gives (samples,). The same scores give the same interval.
    """
    source = np.random.default_rng(0)
    drawn = [group[source.integers(0, len(group), (samples, len(group)))] for group in groups]
    low, high = np.quantile(statistic(np.concatenate(drawn, 1)), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
