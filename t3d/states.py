"""A run in progress: all that changes hangs off one `State`. It begins, it is saved, and it is found again.

Shapes: S seeds, N environments a seed.
"""

import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from t3d import agent as agents
from t3d import files, rng
from t3d.config import Config
from t3d.envs import EnvBatch, Source
from t3d.errors import T3DError
from t3d.goals import Goals
from t3d.limits import refuse_oversize
from t3d.replay import NStep, Replay, out_of_row, row_width
from t3d.rng import Purpose
from t3d.steps import Agent, init_agent

METRICS = ("critic_loss", "q_mean", "actor_loss")  # the last one only where the actor moves


@dataclass
class State:
    """A run in progress: all that changes."""

    seeds: list[int]
    agent: Agent
    memory: Replay
    steps_under_way: NStep
    envs: EnvBatch
    obs: NDArray[np.float32]  # (S, N, O) what to act on next
    played: NDArray[np.float32]  # (S, N, T, A) the actions of the episodes under way, to find the way back to here
    history: NDArray[np.float32]  # (S, N, T, W) their rows, if they are to be relabelled when they end
    episode_return: NDArray[np.float64]  # (S, N) of the episodes under way
    episode_length: NDArray[np.int64]  # (S, N)
    earned: NDArray[np.int64]  # (S,) environment steps that updates are owed for
    updates: NDArray[np.int64]  # (S,) updates that were run: `agent.updates`, known without asking the device
    updates_logged: NDArray[np.int64]  # (S,) those of them that are in the rows of losses
    best: NDArray[np.float64]  # (S,) each seed's best evaluation
    sums: dict[str, Tensor]  # (S,) metrics added up since the last row
    fingerprint: NDArray[np.uint8]  # (32,) a hash of every action, observation and reward so far
    goals: Goals | None = None  # what relabels them
    network: str | None = None  # the name of the user's own
    step: int = 0  # environment steps of each seed
    logged: int = 0  # the step of the last rows of losses
    evaluated: int = -1  # the step of the last evaluation

    def close(self) -> None:
        """Let go of the environments."""
        self.envs.close()
        if self.goals is not None:
            self.goals.close()


def begin(source: Source, seeds: Sequence[int], config: Config) -> State:
    """Steps 1 to 3: an empty memory, fresh networks, environments at their first observation."""
    count, per_seed = len(seeds), config.num_envs

    def episode_seed(env: int, episode: int) -> int:
        return rng.integer(seeds[env // per_seed], Purpose.EPISODE, episode, env % per_seed)

    envs = source.training_batch(count * per_seed, episode_seed, config.workers, config.stall_seconds)
    device = torch.device(config.device)
    rows = config.steps * (1 + config.relabel)
    capacity = max(min(config.buffer_size, rows), per_seed * config.n_step)  # at least what a step can bring
    try:
        goals = Goals(source, config.relabel) if config.relabel else None
        refuse_oversize(capacity, row_width(envs.obs_dim, envs.actions.dim) * 4, count, device)
        memory = Replay(
            count, capacity, envs.obs_dim, envs.actions.dim, device=device,
            normalize=config.normalize_obs == "on", reward_scale=config.reward_scale,
        )  # fmt: skip
    except T3DError:
        envs.close()
        raise
    except RuntimeError as error:
        envs.close()
        size = count * capacity * row_width(envs.obs_dim, envs.actions.dim) * 4 / 2**30
        raise T3DError(f"the replay memory needs {size:,.1f} GiB and cannot be had: lower --buffer-size.") from error
    return State(
        seeds=list(seeds),
        agent=init_agent(
            torch.tensor(seeds, device=device),
            envs.obs_dim,
            envs.actions.dim,
            config.hidden,
            twins=config.critics,
            normalized=config.critic_norm == "layer",
        ),
        memory=memory,
        steps_under_way=NStep(config.n_step, config.gamma, count, per_seed, envs.obs_dim, envs.actions.dim),
        envs=envs,
        obs=envs.reset().reshape(count, per_seed, -1),
        played=np.zeros((count, per_seed, 0, envs.actions.dim), np.float32),
        history=np.zeros((count, per_seed, 0, memory.rows.shape[-1] if goals else 0), np.float32),
        episode_return=np.zeros((count, per_seed)),
        episode_length=np.zeros((count, per_seed), np.int64),
        earned=np.zeros(count, np.int64),
        updates=np.zeros(count, np.int64),
        best=np.full(count, -np.inf),
        sums={name: torch.zeros(count, device=device) for name in METRICS},
        updates_logged=np.zeros(count, np.int64),
        fingerprint=np.zeros(32, np.uint8),
        goals=goals,
    )


def saved(state: State) -> dict[str, Tensor]:
    """Every number of the state by its name, but the rows of the memory and what environments hold inside.

    Arrays share their memory with the state, so what is copied into them is in the state.
    """
    parts = {field.name: getattr(state, field.name) for field in fields(state)}
    counted = {name: t for name, t in state.memory.tensors().items() if name not in ("rows", "length")}
    parts["memory"] = {"stored": state.memory.stored, **counted}
    parts["envs"] = {"episodes": np.array(state.envs.episodes)}
    parts["steps_under_way"] = {
        k: v for k, v in vars(state.steps_under_way).items() if not k.startswith("_") and isinstance(v, np.ndarray)
    }
    parts["played"], parts["history"] = (x[:, :, : state.episode_length.max()] for x in (state.played, state.history))
    del parts["goals"], parts["network"]
    return agents.tensors(parts)


def restore(state: State, given: dict[str, Tensor], path: Path) -> NDArray[np.bool_]:
    """Put a state that was saved in the place of a fresh one; the memory has its rows already.

    Environments find the way back by playing the episodes under way again. Returns which of them (S, N) did not arrive
    where they had been: their episodes are cut there.
    """
    # As long as it was when it was saved, not as it is now.
    state.played, state.history = (np.zeros(given[name].shape, np.float32) for name in ("played", "history"))
    state.episode_length[:] = given["played"].shape[2]
    live = saved(state)
    if not torch.equal(given.get("seeds", torch.empty(0)), live["seeds"]):
        raise T3DError(f"{path} belongs to a run with other seeds.")
    files.copy_tensors(path, given, live)
    state.step, state.logged, state.evaluated = (int(given[name]) for name in ("step", "logged", "evaluated"))
    episodes = given["envs.episodes"].tolist()
    actions = [state.played[k, i, : state.episode_length[k, i]] for k, i in np.ndindex(state.episode_length.shape)]
    expected, returns = state.obs.reshape(len(actions), -1), state.episode_return.reshape(-1)
    missed = ~played_again(state.envs, episodes, actions, expected, returns)
    if missed.any():
        new = [episode + bool(lost) for episode, lost in zip(episodes, missed, strict=True)]
        actions = [part[:0] if lost else part for part, lost in zip(actions, missed, strict=True)]
        obs = play_again(state.envs, new, actions)[0].reshape(state.obs.shape)
        cut_episodes(state, missed.reshape(state.episode_length.shape), obs)
    return missed.reshape(state.episode_length.shape)


def play_again(
    envs: EnvBatch, episodes: Sequence[int], actions: Sequence[NDArray[np.float32]]
) -> tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.bool_]]:
    """Each environment from its episode's start through its actions: observations, returns, whose episode ended."""
    obs, returns, ended = envs.reset(episodes), np.zeros(envs.count), np.zeros(envs.count, bool)
    lengths = np.array([len(part) for part in actions])
    for t in range(int(lengths.max(initial=0))):
        active = (lengths > t) & ~ended
        now = np.zeros((envs.count, envs.actions.dim), np.float32)
        for i in map(int, np.flatnonzero(active)):
            now[i] = actions[i][t]
        moved = envs.step(now, active)
        obs, returns = moved.obs, returns + moved.reward
        ended |= moved.terminated | moved.truncated
    return obs, returns, ended


def played_again(
    envs: EnvBatch,
    episodes: Sequence[int],
    actions: Sequence[NDArray[np.float32]],
    obs: NDArray[np.float32],
    returns: NDArray[np.float64],
) -> NDArray[np.bool_]:
    """Play them again; which arrived at the same observation and the same return, to the last bit."""
    now, again, ended = play_again(envs, episodes, actions)
    same: NDArray[np.bool_] = (now == obs).all(1) & (again == returns) & ~ended
    return same


def relabel(state: State, k: int, i: int) -> None:
    """[step 1] Store the rows of an episode that ended again, with goals that it reached, if they are to be."""
    length = int(state.episode_length[k, i])
    if state.goals is None or not length:
        return
    counter = state.step * state.episode_length.shape[1] + i
    rows = state.goals.relabelled(state.history[k, i, :length], state.seeds[k], counter)
    if len(rows) > state.memory.capacity:
        raise T3DError(
            f"--buffer-size {state.memory.capacity:,} does not hold an episode of {length:,} steps with --relabel"
            f" {state.goals.count}."
        )
    state.memory.seed(k).add_rows(out_of_row(rows[None], state.memory.obs_dim))


def cut_episodes(state: State, missed: NDArray[np.bool_], obs: NDArray[np.float32]) -> None:
    """End episodes that cannot be gone on with as if a time limit had: what came before them is kept."""
    no = np.zeros(missed.shape, bool)
    nothing = np.zeros((*missed.shape, state.envs.actions.dim), np.float32)
    rows = state.steps_under_way.add(state.obs, nothing, np.zeros(missed.shape), state.obs, no, missed, no)
    state.memory.add_rows(rows)
    for k, i in np.argwhere(missed):
        relabel(state, k, i)
    state.obs = obs
    for of_episode in (state.episode_return, state.episode_length, state.played, state.history):
        of_episode[missed] = 0


def peak_memory(state: State) -> int:
    """Bytes that this process will have had at most: what it has had so far, and the replay memory, still untouched.

    What is on a GPU is not counted here.
    """
    rows = state.memory.rows
    so_far = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return so_far + (rows.nbytes if rows.device.type == "cpu" else 0)


def disk_needed(state: State) -> int:
    """Bytes that checkpoints will take at most: the rows, twice while they are put together, and three states."""
    return 2 * state.memory.rows.nbytes + 3 * sum(tensor.nbytes for tensor in saved(state).values())
