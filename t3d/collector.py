"""[step 1] Steps the environments of all seeds and turns what happens into transitions to store.

    action -> environments -> frame store -> n-step returns -> transitions

It also keeps what the current episodes did: `resume` replays their actions, hindsight relabels their transitions.

Shapes: S seeds, N environments a seed, O observation, A action.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from t3d import rng
from t3d.agent import refuse_divergence
from t3d.config import Config
from t3d.envs import EnvBatch, EnvFactory
from t3d.envs.batch import EnvError
from t3d.episode_log import EpisodeLog
from t3d.errors import T3DError
from t3d.hindsight import Hindsight
from t3d.nstep import NStep
from t3d.pixels.frame_store import FrameStore
from t3d.replay import Flags, Transitions, pack, row_width, unpack
from t3d.rng import Purpose
from t3d.state_dict import NOT_SAVED

Floats = NDArray[np.float32]
UNLOGGED = 64  # steps that wait to be logged together


class Collected(NamedTuple):
    """One step of every environment."""

    transitions: Transitions  # to store
    terminated: Flags  # (S, N)
    ended: Flags  # (S, N) terminated or truncated
    valid: Flags  # (S, N) false without a transition: inactive, a reset step, a lost worker, a failed step
    failure: EnvError | None  # of a reset after the step


@dataclass(init=False, eq=False)
class Collector:
    """The environments, and the state of their current episodes."""

    seeds: list[int] = field(metadata=NOT_SAVED)
    envs: EnvBatch = field(metadata=NOT_SAVED)
    frames: FrameStore | None = field(metadata=NOT_SAVED)  # of the replay memory, where observations are images
    hindsight: Hindsight | None = field(metadata=NOT_SAVED)
    n_step: NStep
    obs: Floats  # (S, N, O) what to act on next
    episodes: NDArray[np.int64]  # (S, N) counted from 0
    episode_return: NDArray[np.float64]  # (S, N) so far
    episode_length: NDArray[np.int64]  # (S, N) so far
    actions: EpisodeLog  # of the current episodes
    transitions: EpisodeLog  # of the current episodes, if hindsight is to relabel them
    fingerprint: NDArray[np.uint8]  # (32,) a hash of every action, observation and reward so far
    env_errors: int = 0  # failed steps whose episodes were cut

    def __init__(self, factory: EnvFactory, seeds: Sequence[int], config: Config) -> None:
        count, per_seed = lanes = len(seeds), config.num_envs

        def episode_seed(env: int, episode: int) -> int:
            return rng.integer(seeds[env // per_seed], Purpose.EPISODE, episode, env % per_seed)

        self.seeds, self.envs_per_seed, self.frames, self.hindsight = list(seeds), per_seed, None, None
        self.envs = factory.training_batch(count * per_seed, episode_seed, config.workers, config.worker_timeout)
        self.envs.cut_failures = config.on_env_error == "cut"
        self.obs = np.zeros((*lanes, self.envs.obs_dim), np.float32)
        self.episodes = np.zeros(lanes, np.int64)
        self.episode_return, self.episode_length = np.zeros(lanes), np.zeros(lanes, np.int64)
        self.fingerprint = np.zeros(32, np.uint8)
        self._span, self._unlogged = np.ones(lanes), list[tuple[Floats, Floats, NDArray[np.float64], Flags]]()
        try:
            if config.her:
                self.hindsight = Hindsight(factory, config.her)
        except BaseException:
            self.close()
            raise

    def connect(self, obs_dim: int, frames: FrameStore | None, config: Config) -> None:
        """Fit a replay memory whose rows hold observations of `obs_dim` numbers."""
        self.obs_dim, self.frames = obs_dim, frames
        action_dim = self.envs.actions.dim
        self.n_step = NStep(config.n_step, config.gamma, (len(self.seeds), config.num_envs), obs_dim, action_dim)
        self.actions = EpisodeLog(self.episode_length, action_dim)
        self.transitions = EpisodeLog(self.episode_length, row_width(obs_dim, action_dim))

    def close(self) -> None:
        """Close the environments."""
        self.envs.close()
        if self.hindsight is not None:
            self.hindsight.close()

    def reset(self, episodes: Sequence[int] | None = None) -> None:
        """Begin the first episodes, or the `episodes` named."""
        self.obs = self.envs.reset(episodes).reshape(self.obs.shape)
        self.episodes[:] = np.reshape(self.envs.episodes, self.episodes.shape)
        if self.frames is not None:
            self.frames.start(self.obs, np.ones(self.obs.shape[:2], bool))

    def collect(self, action: Floats, active: Flags | None = None) -> Collected:
        """[step 1] Step the environments that are `active` (S · N,), by default all, with actions (S, N, A)."""
        refuse_divergence(action, self.seeds)
        failure, shape = None, action.shape[:2]
        try:
            result = self.envs.step(action.reshape(-1, action.shape[-1]), active)
        except EnvError as error:
            if error.moved is None:
                raise
            result, failure = error.moved, error  # only the reset after it failed: the step counts
        reward, valid = result.reward.reshape(shape), result.valid.reshape(shape)
        terminated, truncated = result.terminated.reshape(shape), result.truncated.reshape(shape)
        obs, final_obs = result.obs.reshape(self.obs.shape), result.final_obs.reshape(self.obs.shape)
        # Only `terminated` ends the value: a truncated episode goes on behind its true last observation.
        new = Transitions(self.obs, action, reward, final_obs, terminated, self._span, valid)
        if self.frames is not None:
            new = self.frames.step(new, obs, result.begun(active).reshape(shape))
        if self.n_step.n > 1:
            new = self.n_step.add(new, truncated)
        self._unlogged.append((action, obs, reward, valid))
        self.obs = obs
        self.episode_return += reward
        self.episode_length += valid
        if self.hindsight is not None:
            row = np.empty((*shape, row_width(self.obs_dim, action.shape[-1])), np.float32)
            pack(row, new, self.obs_dim)
            self.transitions.add([(row, valid)])
        if len(self._unlogged) >= UNLOGGED:
            self.flush()
        return Collected(new, terminated, terminated | truncated, valid, failure)

    def flush(self) -> None:
        """Log the last steps, before anyone reads the logs: their actions, and a hash of all that happened."""
        for action, obs, reward, _ in self._unlogged:
            step = self.fingerprint.tobytes() + action.tobytes() + obs.tobytes() + reward.tobytes()
            self.fingerprint = np.frombuffer(bytearray(blake2b(step, digest_size=32).digest()), np.uint8)
        self.actions.add([(action, valid) for action, _, _, valid in self._unlogged])
        self._unlogged.clear()

    # ---------------------------------------------------------------------------------------- ends of episodes

    def relabeled(self, k: int, i: int, counter: int, capacity: int) -> Transitions | None:
        """[step 1] The transitions of an episode that ended, with goals that it reached; None without hindsight.

        `counter` tells the episodes of a seed apart; the replay memory has room for `capacity` transitions.
        """
        length = int(self.episode_length[k, i])
        if self.hindsight is None or not length:
            return None
        rows = self.hindsight.relabeled(self.transitions.episode(k, i), self.seeds[k], counter)
        if len(rows) > capacity:
            raise T3DError(
                f"--buffer-size {capacity:,} does not hold an episode of {length:,} steps with --her"
                f" {self.hindsight.count}."
            )
        return unpack(rows[None], self.obs_dim)

    def begin(self, ended: Flags) -> None:
        """Reset the returns, lengths and logs of the episodes that follow those that `ended` (S, N)."""
        self.flush()
        self.episode_return[ended] = self.episode_length[ended] = 0
        self.actions.forget(ended)
        self.transitions.forget(ended)
        self.episodes[:] = np.reshape(self.envs.episodes, self.episodes.shape)

    def cut(self, missed: Flags, obs: Floats) -> Transitions:
        """End episodes (S, N) as truncated where they are; `obs` are the first observations of the next ones.

        Returns what n-step returns still held.
        """
        before = self.obs if self.frames is None else self.frames.refer(self.obs)
        zeros, none = np.zeros((*missed.shape, self.envs.actions.dim), np.float32), np.zeros(missed.shape, bool)
        last = Transitions(before, zeros, np.zeros(missed.shape), before, none, self._span, none)
        held = self.n_step.add(last, missed)
        if self.frames is not None:
            self.frames.start(obs, missed)
        self.obs = obs
        return held
