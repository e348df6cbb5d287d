"""Noise-free episodes, on environments of their own, from seeds that stay the same.

Every policy of a run is evaluated in one batch of one shape, (S, episodes, O), during training and ever
after: products of another shape may round differently, and then a recorded score could not be had again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from t3d import networks, rng
from t3d.agent import refuse_divergence
from t3d.envs import Source
from t3d.networks import Parameters
from t3d.rng import Purpose


@dataclass(frozen=True)
class Evaluation:
    """Episode by episode: (S, episodes)."""

    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]


class Evaluator:
    """The environments that evaluations play in: one for each seed and episode, used again each time."""

    def __init__(self, source: Source, seeds: Sequence[int], episodes: int) -> None:
        self.seeds, self.episodes = list(seeds), episodes
        self._first_episode = 0
        self.envs = source.batch(len(self.seeds) * episodes, self._episode_seed)

    def _episode_seed(self, env: int, _: int) -> int:
        seed, episode = self.seeds[env // self.episodes], env % self.episodes + self._first_episode
        return rng.integer(seed, Purpose.EVALUATION, episode)

    @torch.no_grad()
    def play(self, actor: Parameters, first_episode: int = 0, stop: Callable[[], bool] = lambda: False) -> Evaluation:
        """Episodes `first_episode`, … of every seed with its own actor (S, in, out), unless told to stop."""
        self._first_episode = first_episode
        shape = (len(self.seeds), self.episodes)
        device = actor["w1"].device
        returns, lengths = np.zeros(self.envs.count), np.zeros(self.envs.count, np.int64)
        active = np.ones(self.envs.count, bool)
        obs = self.envs.reset()
        while active.any() and not stop():
            batch = torch.from_numpy(obs).reshape(*shape, -1).to(device)
            action = networks.actor(actor, batch).cpu().numpy()
            refuse_divergence(action, self.seeds)
            moved = self.envs.step(action.reshape(len(active), -1), active)
            returns += moved.reward
            lengths += moved.valid
            active &= ~(moved.terminated | moved.truncated)
            obs = moved.obs
        return Evaluation(returns.reshape(shape), lengths.reshape(shape))

    def close(self) -> None:
        self.envs.close()
