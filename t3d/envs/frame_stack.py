"""Frame stacking for environments with images; a stack never mixes frames of two episodes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from t3d.envs.batch import EnvBatch, EnvError, Flags, Floats, StepResult
from t3d.pixels.frame_stack import FrameStack


class FrameStackBatch:
    """A batch whose observations are stacked frames. The first frame of an episode fills the whole stack."""

    frame_stack: FrameStack | None

    def __init__(self, batch: EnvBatch, frame_stack: FrameStack) -> None:
        self._batch, self.frame_stack, self._frame_stack = batch, frame_stack, frame_stack
        self.name, self.count, self.actions, self.layout = batch.name, batch.count, batch.actions, batch.layout
        self.obs_dim, self.together, self.longest_episode = frame_stack.dim, batch.together, batch.longest_episode
        self._frames = np.zeros((batch.count, frame_stack.stack, frame_stack.frame_size), np.float32)

    @property
    def lost(self) -> int:
        return self._batch.lost

    @property
    def cut(self) -> int:
        return self._batch.cut

    @property
    def cut_failures(self) -> bool:
        return self._batch.cut_failures

    @cut_failures.setter
    def cut_failures(self, cut: bool) -> None:
        self._batch.cut_failures = cut

    @property
    def skip_losses(self) -> bool:
        return self._batch.skip_losses

    @skip_losses.setter
    def skip_losses(self, skip: bool) -> None:
        self._batch.skip_losses = skip

    @property
    def skipped(self) -> Flags | None:
        return self._batch.skipped

    @property
    def failures(self) -> list[EnvError]:
        return self._batch.failures

    @property
    def worker_lost(self) -> Flags | None:
        return self._batch.worker_lost

    @property
    def blamed(self) -> Flags | None:
        return self._batch.blamed

    @property
    def episodes(self) -> list[int]:
        return self._batch.episodes

    def reset(self, episodes: Sequence[int] | None = None) -> Floats:
        obs = self._batch.reset(episodes)
        self._frames[:] = obs[:, None, self._frame_stack.pixels]
        return self._frame_stack.join(self._frames, obs)

    def step(self, actions: NDArray[Any], active: Flags | None = None) -> StepResult:
        try:
            return self._stacked(self._batch.step(actions, active), active)
        except EnvError as failure:
            failure.moved = failure.moved and self._stacked(failure.moved, active)
            raise

    def _stacked(self, result: StepResult, active: Flags | None) -> StepResult:
        valid, new_episode = result.valid, result.begun(active)
        self._frames[valid, :-1] = self._frames[valid, 1:]
        self._frames[valid, -1] = result.final_obs[valid][:, self._frame_stack.pixels]
        final_obs = self._frame_stack.join(self._frames, result.final_obs)
        if not new_episode.any():
            return result._replace(obs=final_obs.copy(), final_obs=final_obs)
        self._frames[new_episode] = result.obs[new_episode][:, None, self._frame_stack.pixels]
        return result._replace(obs=self._frame_stack.join(self._frames, result.obs), final_obs=final_obs)

    def close(self) -> None:
        self._batch.close()
