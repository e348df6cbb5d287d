"""The loop: act, step the environments, store what happened, learn; now and then evaluate.

Everything that changes during a run hangs off one `State`. Shapes: S seeds, N environments a seed.
"""

import platform
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from t3d import agent as agents
from t3d import rng
from t3d.accelerate import Verbs
from t3d.config import Config
from t3d.display import Display
from t3d.envs import EnvBatch, Source
from t3d.errors import T3DError
from t3d.evaluation import Evaluation, Evaluator
from t3d.policy import Card, Policy
from t3d.replay import NStep, Replay, row_width
from t3d.rng import Purpose
from t3d.runs.folder import Run, Which
from t3d.steps import Agent, init_agent, is_delayed

METRICS = ("critic_loss", "q_mean", "actor_loss")  # the last one only where the actor moves


@dataclass
class State:
    """A run in progress."""

    seeds: list[int]
    agent: Agent
    memory: Replay
    steps_under_way: NStep
    envs: EnvBatch
    obs: NDArray[np.float32]  # (S, N, O) what to act on next
    episode_return: NDArray[np.float64]  # (S, N) of the episodes under way
    episode_length: NDArray[np.int64]  # (S, N)
    earned: NDArray[np.int64]  # (S,) environment steps that updates are owed for
    updates: NDArray[np.int64]  # (S,) updates that were run: `agent.updates`, known without asking the device
    best: list[float]  # each seed's best evaluation
    sums: dict[str, Tensor]  # (S,) metrics added up since the last row
    counts: dict[str, NDArray[np.int64]]  # (S,) and how many of each
    step: int = 0  # environment steps of each seed


def begin(source: Source, seeds: Sequence[int], config: Config) -> State:
    """Steps 1 to 3: an empty memory, fresh networks, environments at their first observation."""
    count, per_seed = len(seeds), config.num_envs

    def episode_seed(env: int, episode: int) -> int:
        return rng.integer(seeds[env // per_seed], Purpose.EPISODE, episode, env % per_seed)

    envs = source.training_batch(count * per_seed, episode_seed, config.workers, config.stall_seconds)
    device = torch.device(config.device)
    capacity = min(config.buffer_size, config.steps)
    try:
        memory = Replay(count, capacity, envs.obs_dim, envs.actions.dim, device=device)
    except RuntimeError as error:
        envs.close()
        size = count * capacity * row_width(envs.obs_dim, envs.actions.dim) * 4 / 2**30
        raise T3DError(f"the replay memory needs {size:,.1f} GiB and cannot be had: lower --buffer-size.") from error
    return State(
        seeds=list(seeds),
        agent=init_agent(torch.tensor(seeds, device=device), envs.obs_dim, envs.actions.dim, config.hidden),
        memory=memory,
        steps_under_way=NStep(config.n_step, config.gamma, count, per_seed, envs.obs_dim, envs.actions.dim),
        envs=envs,
        obs=envs.reset().reshape(count, per_seed, -1),
        episode_return=np.zeros((count, per_seed)),
        episode_length=np.zeros((count, per_seed), np.int64),
        earned=np.zeros(count, np.int64),
        updates=np.zeros(count, np.int64),
        best=[-np.inf] * count,
        sums={name: torch.zeros(count, device=device) for name in METRICS},
        counts={name: np.zeros(count, np.int64) for name in METRICS},
    )


def peak_memory(state: State) -> int:
    """Bytes that this process will have had at most: what it has had so far, and the replay memory, still untouched.

    What is on a GPU is not counted here.
    """
    rows = state.memory.rows
    so_far = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return so_far + (rows.nbytes if rows.device.type == "cpu" else 0)


def run(state: State, verbs: Verbs, evaluator: Evaluator, config: Config, folder: Run, display: Display) -> None:
    """Train to the last step, keeping the folder up to date."""
    evaluate(state, evaluator, config, folder, display)
    marked, marked_step = time.perf_counter(), 0
    while state.step < config.steps:
        before = state.step
        rows = collect(state, act(state, config, verbs), config)
        learn_owed(state, config, verbs)
        display.advance(state.step, state.envs.lost)

        last = state.step == config.steps
        if state.step // config.log_every > before // config.log_every or last:
            now = time.perf_counter()
            training = training_rows(state, (state.step - marked_step) / (now - marked))
            marked, marked_step = now, state.step
            display.training(training)
            rows += training
        if rows:
            folder.record(rows)
        if state.step // config.eval_every > before // config.eval_every or last:
            paused = time.perf_counter()
            evaluate(state, evaluator, config, folder, display)
            marked += time.perf_counter() - paused


def act(state: State, config: Config, verbs: Verbs) -> NDArray[np.float32]:
    """Random actions first, then the actor's with noise: (S, N, A) in [−1, 1]."""
    if state.step < config.random_steps:
        action = agents.random_action(state.agent, state.step, config.num_envs, state.envs.actions.dim)
        played = np.asarray(action.cpu().numpy())
    else:
        played = verbs.explore(state.obs, state.step)
    agents.refuse_divergence(played, state.seeds)
    return played


def collect(state: State, action: NDArray[np.float32], config: Config) -> list[dict[str, Any]]:
    """[step 1] Step the environments and store the transitions; returns a row for each episode that ended."""
    shape = action.shape[:2]  # (S, N)
    left = config.steps - state.step
    active = None if left >= shape[1] else np.tile(np.arange(shape[1]) < left, shape[0])  # the last steps, exactly
    moved = state.envs.step(action.reshape(-1, action.shape[-1]), active)
    reward, valid = moved.reward.reshape(shape), moved.valid.reshape(shape)
    terminated, truncated = moved.terminated.reshape(shape), moved.truncated.reshape(shape)
    obs, final_obs = moved.obs.reshape(state.obs.shape), moved.final_obs.reshape(state.obs.shape)

    # Terminated alone ends the value; a truncated episode goes on behind its last observation.
    transitions = state.steps_under_way.add(state.obs, action, reward, final_obs, terminated, truncated, valid)
    state.memory.add(*transitions)

    state.obs = obs
    state.episode_return += reward
    state.episode_length += valid
    state.step += min(left, shape[1])
    ended = terminated | truncated
    rows: list[dict[str, Any]] = []
    for k, i in np.argwhere(ended) if np.count_nonzero(ended) else ():
        score, length = float(state.episode_return[k, i]), int(state.episode_length[k, i])
        row = {"kind": "episode", "step": state.step, "seed": state.seeds[k], "return": score, "length": length}
        rows.append(row | {"terminated": bool(terminated[k, i]), "lost": not valid[k, i]})
        if config.update_after == "episode":
            state.earned[k] += length
    if config.update_after == "step":
        state.earned[:] = max(0, state.step - config.random_steps)
    state.episode_return[ended] = 0
    state.episode_length[ended] = 0
    return rows


def learn_owed(state: State, config: Config, verbs: Verbs) -> None:
    """Run the updates that are owed."""
    # From the whole count each time: 0.3 added up fifty times is not 15.
    due = np.floor(state.earned * config.updates_per_step + 1e-9).astype(np.int64) - state.updates
    if config.update_after == "step":
        if not state.memory.stored.all():
            return  # nothing to sample yet; the updates stay owed
        _learn(state, config, verbs, 0, slice(None), int(due[0]))  # all seeds together: they owe the same
        return
    for k in map(int, np.flatnonzero(due)):
        _learn(state, config, verbs, k, slice(k, k + 1), int(due[k]))


def _learn(state: State, config: Config, verbs: Verbs, learner: int, seeds: slice, times: int) -> None:
    for _ in range(times):
        state.updates[seeds] += 1
        delayed = is_delayed(int(state.updates[seeds][0]), config.policy_delay)
        verbs.update(learner, delayed)
        for name in METRICS if delayed else METRICS[:2]:
            state.counts[name][seeds] += 1


def training_rows(state: State, steps_per_second: float) -> list[dict[str, Any]]:
    """The means since the last rows, one row a seed; null where there was no update."""
    sums = {name: tensor.cpu().tolist() for name, tensor in state.sums.items()}
    rows: list[dict[str, Any]] = []
    for k, seed in enumerate(state.seeds):
        row: dict[str, Any] = {"kind": "training", "step": state.step, "seed": seed}
        for name, values in sums.items():
            count = int(state.counts[name][k])
            row[name] = _finite(values[k] / count) if count else None
        rows.append(row | {"steps_per_second": round(steps_per_second, 1)})
    for name in METRICS:
        state.sums[name].zero_()
        state.counts[name][:] = 0
    return rows


def _finite(number: float) -> float | None:
    return number if np.isfinite(number) else None


def evaluate(state: State, evaluator: Evaluator, config: Config, folder: Run, display: Display) -> None:
    """Play the fixed episodes with every seed's actor, record them, and keep the best and the last policies."""
    evaluation = evaluator.play(state.agent.actor)
    rows = []
    for k, seed in enumerate(state.seeds):
        returns, lengths = evaluation.returns[k].tolist(), evaluation.lengths[k].tolist()
        mean = float(evaluation.returns[k].mean())
        row = {"kind": "evaluation", "step": state.step, "seed": seed, "returns": returns, "lengths": lengths}
        rows.append(row | {"mean": mean})
        names: list[Which] = ["last"]
        if mean > state.best[k]:
            state.best[k] = mean
            names.append("best")
        policy = policy_of(state, k, config, evaluation)
        for which in names:
            policy.save(folder.policy_path(seed, which))
    folder.record(rows)
    display.evaluated(state.step, evaluation)


def policy_of(state: State, k: int, config: Config, evaluation: Evaluation) -> Policy:
    """The k-th seed's actor as it is now, with its card."""
    actions = state.envs.actions
    card = Card(
        env=state.envs.name,
        seed=state.seeds[k],
        step=state.step,
        returns=evaluation.returns[k].tolist(),
        lengths=evaluation.lengths[k].tolist(),
        obs_shape=list(state.envs.obs_shape),
        action_low=actions.low.tolist(),
        action_high=actions.high.tolist(),
        action_dtype=str(actions.low.dtype),
        hidden=list(config.hidden),
    )
    return Policy(agents.one_seed(state.agent, k).actor, card)


def describe(source: Source, preset: str, seeds: Sequence[int], config: Config) -> dict[str, Any]:
    """What config.json says."""
    env = {"env": source.name, "env_args": source.args, "callable": source.from_python}
    return {**env, "seeds": list(seeds), "preset": preset, **asdict(config), "versions": versions()}


def versions() -> dict[str, str]:
    """Of what results depend on."""
    found = {"python": platform.python_version()}
    for package in ("t3d", "torch", "numpy", "gymnasium", "mujoco"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
