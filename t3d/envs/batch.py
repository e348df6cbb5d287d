"""The contract itself; the package's first lines say what each field means."""

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

# Where an environment declares no time limit, an episode is cut here: evaluations and whole episodes must end.
LONGEST_EPISODE = 10_000
MOST_LOSSES = 3  # of a worker process in one episode of an evaluation; then it is given up
LARGEST_REWARD = 1e15  # its square, and that of a value that adds up many, are still numbers in float32


class EnvError(T3DError):
    """An environment that failed, with all that is known of it.

    `index` is its place in the batch, None where the whole batch failed; `call` is `reset` or `step`.
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
        # For whoever knows that to fill in: which seed's environment it is, and whether it played in an evaluation.
        self.place, self.in_evaluation = "", False
        # Of a step that went well, where only the reset after it failed: what came of it, and its rows of metrics.
        self.moved: StepResult | None = None
        self.rows: list[dict[str, Any]] = []


class StepResult(NamedTuple):
    """What one step of N environments gives."""

    obs: Floats
    reward: NDArray[np.float64]
    terminated: Flags
    truncated: Flags
    final_obs: Floats
    valid: Flags

    def begun(self, active: Flags | None) -> Flags:
        """(N,) whose `obs` is not what came before it, of those that were `active`: an episode began there."""
        return self.terminated | self.truncated | (~self.valid if active is None else active & ~self.valid)


class EnvBatch(Protocol):
    """N environments of one kind."""

    name: str
    count: int
    layout: Layout
    obs_dim: int
    actions: ActionRange
    together: bool  # whether they can only move all at once, those that are not active too
    longest_episode: int | None  # steps after which an episode is cut; None where that is not known
    frame_stack: FrameStack | None  # how its observations are put together, where they have images
    cut_failures: bool  # end the episode of an environment that fails in a step, instead of raising EnvError
    skip_losses: bool  # leave one alone whose process ends again and again in its reset, instead of raising EnvError

    @property
    def failures(self) -> list[EnvError]:
        """Of the last step, where they are cut."""
        ...

    @property
    def worker_lost(self) -> Flags | None:
        """(N,) whose process ended in the last step; None where none did."""
        ...

    @property
    def blamed(self) -> Flags | None:
        """(N,) those of them in whose own call it ended."""
        ...

    @property
    def skipped(self) -> Flags | None:
        """(N,) those that were left alone since the last reset of all; None where none was."""
        ...

    @property
    def lost(self) -> int:
        """Worker processes that died or hung and were replaced."""
        ...

    @property
    def cut(self) -> int:
        """Episodes that were cut because a simulation broke down."""
        ...

    @property
    def episodes(self) -> list[int]:
        """(N,) the episode that each environment is in, counted from 0."""
        ...

    def reset(self, episodes: Sequence[int] | None = None) -> Floats:
        """The first observations of episode 0 of each, or of the `episodes` named."""
        ...

    def step(self, actions: NDArray[Any], active: Flags | None = None) -> StepResult:
        """Transitions that are not `active` stand still and come back as not valid."""
        ...

    def close(self) -> None: ...


def find_nonfinite(
    where: Callable[[int], str], obs: Floats, reward: NDArray[np.float64] | None = None
) -> EnvError | None:
    """The first observation or reward that is not a finite number, by name: nothing could be learned from it."""
    flat = obs.ravel()
    with np.errstate(all="ignore"):
        if flat.dot(flat) < 1e30 and (reward is None or reward.dot(reward) < 1e30):
            return None  # the usual case, told by two products: no number is large, let alone not finite
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
    """Raise it, if there is one."""
    if failure := find_nonfinite(where, obs, reward):
        raise failure
