"""Observation normalization: each seed's running mean and deviation, applied wherever networks see an observation.

`RunningStatistics` counts every stored observation; `scaling()` turns it into a shift and a scale, and `normalize`
applies them: in acting (`agent.act`), in sampling (`Replay.sample`), and where an evaluation compares values. A policy
file keeps shift and scale.

Shapes: S seeds, B batch, O observation.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class RunningStatistics:
    """Each seed's observations so far: how many (S, 1), their mean and their summed squared deviations (S, O)."""

    count: Tensor
    mean: Tensor
    squares: Tensor

    @staticmethod
    def create(seeds: int, obs_dim: int, device: torch.device | str) -> "RunningStatistics":
        # In float64: a million squares added up in float32 are off by one per cent.
        shapes = ((seeds, 1), (seeds, obs_dim), (seeds, obs_dim))
        return RunningStatistics(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    def add(self, obs: Tensor, valid: Tensor) -> None:
        """Count those observations (S, N, O) that are `valid` (S, N)."""
        weight = valid.double()[..., None]
        new = weight.sum(1)  # (S, 1)
        mean = (obs * weight).sum(1) / new.clamp(min=1)
        squares = ((obs - mean[:, None]) ** 2 * weight).sum(1)
        share = new / (self.count + new).clamp(min=1)
        difference = mean - self.mean
        self.squares.add_(squares + difference**2 * self.count * share)
        self.mean.add_(difference * share)
        self.count.add_(new)

    def scaling(self) -> "Scaling":
        """To mean 0 and deviation 1; the identity until there are two observations."""
        deviation = (self.squares / self.count.clamp(min=1) + 1e-8).sqrt()
        enough = self.count > 1
        shift = torch.where(enough, self.mean, 0.0)
        scale = torch.where(enough, 1 / deviation, 1.0)
        return Scaling(shift.float()[:, None], scale.float()[:, None])


@dataclass(frozen=True)
class Scaling:
    """What is subtracted from an observation, and what the difference is multiplied by: (S, 1, O) each."""

    shift: Tensor
    scale: Tensor


def normalize(obs: Tensor, scaling: Scaling) -> Tensor:
    """Observations (S, B, O) as the networks see them, within ±10. Image frames in front of the numbers stay."""
    frames = obs.shape[-1] - scaling.shift.shape[-1]
    normal = ((obs[..., frames:] - scaling.shift) * scaling.scale).clamp(-10, 10).to(obs.dtype)
    return torch.cat([obs[..., :frames], normal], -1) if frames else normal
