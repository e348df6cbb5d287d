"""The interface of a batch of environments; the docstring of the package explains each field."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from t3d.envs.actions import ActionRange
from t3d.errors import T3DError
from t3d.layout import Layout
from t3d.pixels.frame_stack import FrameStack

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
EpisodeSeed = Callable[[int, int], int]

# The time limit of environments that declare none: evaluations, and training by episodes, need every episode to end.
LONGEST_EPISODE = 10_000
MOST_LOSSES = 3  # worker processes lost in one episode of an evaluation before the episode is given up
LARGEST_REWARD = 1e15  # the square of the reward, and of a sum of many, is finite in float32


class EnvError(T3DError):
    """A failure of an environment, with the circumstances.

    `index` is the environment's index in the batch, or None if the whole batch failed. `call` is `reset` or `step`.
    `whole` is the full traceback.
    """

    def __init__(
        self,
        sentence: str,
        *,
        index: int | None = None,
        call: str = "step",
        episode: int = 0,
        length: int = 0,
        action: NDArray[Any] | None = None,
        obs: Floats | None = None,
        whole: str = "",
    ) -> None:
        super().__init__(sentence)
        self.index, self.call, self.episode, self.length = index, call, episode, length
        self.action, self.obs, self.whole = action, obs, whole
        # The caller sets these: a description of the environment, and whether it failed in an evaluation.
        self.place, self.in_evaluation = "", False
        # If the step succeeded and the reset after it failed: the step's result and its rows of metrics.
        self.moved: StepResult | None = None
        self.rows: list[dict[str, Any]] = []


class StepResult(NamedTuple):
    """The result of one step of N environments."""

    obs: Floats
    reward: NDArray[np.float64]
    terminated: Flags
    truncated: Flags
    final_obs: Floats
    valid: Flags

    def begun(self, active: Flags | None) -> Flags:
        """(N,) True where a new episode began, so `obs` does not follow from the last observation."""
        return self.terminated | self.truncated | (~self.valid if active is None else active & ~self.valid)


class EnvBatch(Protocol):
    """N environments of the same task."""

    name: str
    count: int
    layout: Layout
    obs_dim: int
    actions: ActionRange
    together: bool  # whether `step` always moves all environments, also those that are not active
    longest_episode: int | None  # steps after which an episode is truncated; None if unknown
    frame_stack: FrameStack | None  # the layout of stacked frames; None if observations have no images
    cut_failures: bool  # end the episode of an environment whose step fails, instead of raising EnvError
    skip_losses: bool  # skip an environment whose process keeps ending in reset, instead of raising EnvError

    @property
    def failures(self) -> list[EnvError]:
        """The failures of the last step, if `cut_failures` is set."""
        ...

    @property
    def worker_lost(self) -> Flags | None:
        """(N,) True where the worker process ended in the last step; None if none did."""
        ...

    @property
    def blamed(self) -> Flags | None:
        """(N,) True where it ended in a call of this environment; None if no process ended."""
        ...

    @property
    def skipped(self) -> Flags | None:
        """(N,) True where the environment was skipped since the last reset of all; None if none was."""
        ...

    @property
    def lost(self) -> int:
        """The number of worker processes that died or hung and were replaced."""
        ...

    @property
    def cut(self) -> int:
        """The number of episodes cut because a simulation diverged."""
        ...

    @property
    def episodes(self) -> list[int]:
        """The current episode of each environment, counted from 0."""
        ...

    def reset(self, episodes: Sequence[int] | None = None) -> Floats:
        """Reset all environments to the next episode, or to the given `episodes`; return the first observations."""
        ...

    def step(self, actions: NDArray[Any], active: Flags | None = None) -> StepResult:
        """Step the environments that are `active`; the others do not move, and their rows are not valid."""
        ...

    def close(self) -> None: ...


def find_nonfinite(
    where: Callable[[int], str], obs: Floats, reward: NDArray[np.float64] | None = None
) -> EnvError | None:
    """Return an EnvError for the first observation that is not finite or reward that is too large, or None."""
    flat = obs.ravel()
    with np.errstate(all="ignore"):
        if flat.dot(flat) < 1e30 and (reward is None or reward.dot(reward) < 1e30):
            return None  # the usual case: small sums of squares mean that every number is finite and small
    if not np.isfinite(obs).all():
        row, column = map(int, np.argwhere(~np.isfinite(obs))[0])
        what = f"observation[{column}] is {obs[row, column]}"
    elif reward is not None and not (np.abs(reward) <= LARGEST_REWARD).all():
        row = int(np.flatnonzero(~(np.abs(reward) <= LARGEST_REWARD))[0])
        what = f"the reward is {reward[row]}"
    else:
        return None
    return EnvError(f"{where(row)}: {what}; nothing can be learned from that.", index=row)


def refuse_nonfinite(where: Callable[[int], str], obs: Floats, reward: NDArray[np.float64] | None = None) -> None:
    """Raise the error that `find_nonfinite` returns, if any."""
    if failure := find_nonfinite(where, obs, reward):
        raise failure
