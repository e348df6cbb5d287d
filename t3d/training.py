"""The loop: act, step the environments, store what happened, learn; now and then evaluate.

Everything that changes during a run hangs off one `State`. Shapes: S seeds, N environments a seed.
"""

import platform
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from t3d import agent as agents
from t3d import files, rng
from t3d.accelerate import Verbs
from t3d.config import Config, parse_every
from t3d.display import Display
from t3d.envs import EnvBatch, Source
from t3d.errors import T3DError
from t3d.evaluation import Evaluation, Evaluator
from t3d.limits import refuse_oversize
from t3d.policy import Card, Policy
from t3d.replay import NStep, Replay, row_width
from t3d.rng import Purpose
from t3d.runs.checkpoints import Checkpoints
from t3d.runs.folder import Run, Which
from t3d.steps import Agent, init_agent, is_delayed

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
    episode_return: NDArray[np.float64]  # (S, N) of the episodes under way
    episode_length: NDArray[np.int64]  # (S, N)
    earned: NDArray[np.int64]  # (S,) environment steps that updates are owed for
    updates: NDArray[np.int64]  # (S,) updates that were run: `agent.updates`, known without asking the device
    best: NDArray[np.float64]  # (S,) each seed's best evaluation
    sums: dict[str, Tensor]  # (S,) metrics added up since the last row
    counts: dict[str, NDArray[np.int64]]  # (S,) and how many of each
    fingerprint: NDArray[np.uint8]  # (32,) a hash of every action, observation and reward so far
    step: int = 0  # environment steps of each seed
    logged: int = 0  # the step of the last rows of losses
    evaluated: int = -1  # the step of the last evaluation


def begin(source: Source, seeds: Sequence[int], config: Config) -> State:
    """Steps 1 to 3: an empty memory, fresh networks, environments at their first observation."""
    count, per_seed = len(seeds), config.num_envs

    def episode_seed(env: int, episode: int) -> int:
        return rng.integer(seeds[env // per_seed], Purpose.EPISODE, episode, env % per_seed)

    envs = source.training_batch(count * per_seed, episode_seed, config.workers, config.stall_seconds)
    device = torch.device(config.device)
    capacity = min(config.buffer_size, config.steps)
    try:
        refuse_oversize(capacity, row_width(envs.obs_dim, envs.actions.dim) * 4, count, device)
        memory = Replay(count, capacity, envs.obs_dim, envs.actions.dim, device=device)
    except T3DError:
        envs.close()
        raise
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
        played=np.zeros((count, per_seed, 0, envs.actions.dim), np.float32),
        episode_return=np.zeros((count, per_seed)),
        episode_length=np.zeros((count, per_seed), np.int64),
        earned=np.zeros(count, np.int64),
        updates=np.zeros(count, np.int64),
        best=np.full(count, -np.inf),
        sums={name: torch.zeros(count, device=device) for name in METRICS},
        counts={name: np.zeros(count, np.int64) for name in METRICS},
        fingerprint=np.zeros(32, np.uint8),
    )


def saved(state: State) -> dict[str, Tensor]:
    """Every number of the state by its name, but the rows of the memory and what environments hold inside.

    Arrays share their memory with the state, so what is copied into them is in the state.
    """
    parts = {field.name: getattr(state, field.name) for field in fields(state)}
    parts |= {"memory": {"stored": state.memory.stored}, "envs": {"episodes": np.array(state.envs.episodes)}}
    parts["steps_under_way"] = {k: v for k, v in vars(state.steps_under_way).items() if isinstance(v, np.ndarray)}
    parts["played"] = state.played[:, :, : state.episode_length.max()]
    return agents.tensors(parts)


def restore(state: State, given: dict[str, Tensor], path: Path) -> NDArray[np.bool_]:
    """Put a state that was saved in the place of a fresh one; the memory has its rows already.

    Environments find the way back by playing the episodes under way again. Returns which of them (S, N) did not arrive
    where they had been: their episodes are cut there.
    """
    # As long as it was when it was saved, not as it is now.
    state.played = np.zeros((*state.played.shape[:2], *given["played"].shape[2:]), np.float32)
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


def cut_episodes(state: State, missed: NDArray[np.bool_], obs: NDArray[np.float32]) -> None:
    """End episodes that cannot be gone on with as if a time limit had: what came before them is kept."""
    no = np.zeros(missed.shape, bool)
    nothing = np.zeros((*missed.shape, state.envs.actions.dim), np.float32)
    rows = state.steps_under_way.add(state.obs, nothing, np.zeros(missed.shape), state.obs, no, missed, no)
    state.memory.add(*rows)
    state.obs = obs
    for of_episode in (state.episode_return, state.episode_length, state.played):
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


def run(
    state: State,
    verbs: Verbs,
    evaluator: Evaluator,
    config: Config,
    folder: Run,
    display: Display,
    checkpoints: Checkpoints,
    stop: Callable[[], bool],
) -> None:
    """Train to the last step, or until told to stop, keeping the folder up to date.

    A run that was stopped anywhere goes on from the top: what is owed is done first, in the same order.
    """
    schedule = Schedule(config.checkpoint_every, state.step)
    marked, marked_step = time.perf_counter(), state.step
    if state.evaluated < 0:
        checkpoints.save(state.step, saved(state), state.memory)
    while True:
        last = state.step >= config.steps
        log = due(state.logged, state.step, config.log_every) or (last and state.logged < state.step)
        test = due(state.evaluated, state.step, config.eval_every) or (last and state.evaluated < state.step)
        # With overlap the updates that are owed are left for the next turn, unless they are in what is read here.
        if config.overlap == "off" or log or test:
            learn_owed(state, config, verbs, stop)
        if log and not stop():
            now = time.perf_counter()
            rows = training_rows(state, (state.step - marked_step) / (now - marked))
            marked, marked_step, state.logged = now, state.step, state.step
            display.training(rows)
            folder.record(rows)
        if test and not stop():
            paused = time.perf_counter()
            evaluate(state, evaluator, config, folder, display, stop)
            marked += time.perf_counter() - paused
        if stop() or last:
            break
        # Counted in steps, training waits for the disk, so that never more than so many are done again; counted in
        # seconds it does not wait.
        if not checkpoints.busy and schedule.due(state.step):
            checkpoints.save(state.step, saved(state), state.memory)
            if schedule.steps:
                checkpoints.wait()
        rows = turn(state, config, verbs)
        if rows:
            folder.record(rows)
        display.advance(state.step, state.envs.lost)
    checkpoints.save(state.step, saved(state), state.memory)
    checkpoints.wait()


def due(before: int, now: int, every: int) -> bool:
    """Whether a multiple of `every` was reached since `before`; the first time always."""
    return before < 0 or now // every > before // every


class Schedule:
    """When to save: every so many steps, or every so many seconds."""

    def __init__(self, every: str, step: int) -> None:
        self.seconds, self.steps = parse_every(every)
        self._step, self._clock = step, time.monotonic()

    def due(self, step: int) -> bool:
        now = time.monotonic()
        if now - self._clock < self.seconds if self.seconds else not due(self._step, step, self.steps):
            return False
        self._step, self._clock = step, now
        return True


def turn(state: State, config: Config, verbs: Verbs) -> list[dict[str, Any]]:
    """Every environment one step further; returns a row for each episode that ended."""
    action = act(state, config, verbs)
    if config.overlap == "on":
        learn_owed(state, config, verbs)  # asked for now, done while the environments move
    return collect(state, action(), config, verbs)


def act(state: State, config: Config, verbs: Verbs) -> Callable[[], NDArray[np.float32]]:
    """Random actions first, then the actor's with noise: (S, N, A) in [−1, 1], when called for."""
    if state.step >= config.random_steps:
        return verbs.explore(state.obs, state.step)
    action = agents.random_action(torch.tensor(state.seeds), state.step, config.num_envs, state.envs.actions.dim)
    return lambda: np.asarray(action.numpy())


def collect(state: State, action: NDArray[np.float32], config: Config, verbs: Verbs) -> list[dict[str, Any]]:
    """[step 1] Step the environments and store the transitions; returns a row for each episode that ended."""
    agents.refuse_divergence(action, state.seeds)
    shape = action.shape[:2]  # (S, N)
    left = config.steps - state.step
    active = None if left >= shape[1] else np.tile(np.arange(shape[1]) < left, shape[0])  # the last steps, exactly
    moved = state.envs.step(action.reshape(-1, action.shape[-1]), active)
    reward, valid = moved.reward.reshape(shape), moved.valid.reshape(shape)
    terminated, truncated = moved.terminated.reshape(shape), moved.truncated.reshape(shape)
    obs, final_obs = moved.obs.reshape(state.obs.shape), moved.final_obs.reshape(state.obs.shape)

    # Terminated alone ends the value; a truncated episode goes on behind its last observation.
    transitions = state.steps_under_way.add(state.obs, action, reward, final_obs, terminated, truncated, valid)
    verbs.store(transitions)

    told = b"".join(part.tobytes() for part in (state.fingerprint, action, obs, reward))
    state.fingerprint = np.frombuffer(blake2b(told, digest_size=32).digest(), np.uint8).copy()
    _note(state, action)
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
    for of_episode in (state.episode_return, state.episode_length, state.played) if len(rows) else ():
        of_episode[ended] = 0
    return rows


def _note(state: State, action: NDArray[np.float32]) -> None:
    """Keep the actions of the episodes under way."""
    longest = state.played.shape[2]
    if state.episode_length.max() >= longest:
        more = np.zeros((*action.shape[:2], max(longest, 128), action.shape[2]), np.float32)
        state.played = np.concatenate([state.played, more], 2)
    seed, env = np.ogrid[: action.shape[0], : action.shape[1]]
    state.played[seed, env, state.episode_length] = action


def learn_owed(state: State, config: Config, verbs: Verbs, stop: Callable[[], bool] = lambda: False) -> None:
    """Run the updates that are owed, or as many of them as there is time for."""
    # From the whole count each time: 0.3 added up fifty times is not 15.
    owed = np.floor(state.earned * config.updates_per_step + 1e-9).astype(np.int64) - state.updates
    if config.update_after == "step":
        if not state.memory.stored.all():
            return  # nothing to sample yet; the updates stay owed
        _learn(state, config, verbs, 0, slice(None), int(owed[0]), stop)  # all seeds together: they owe the same
        return
    for k in map(int, np.flatnonzero(owed)):
        _learn(state, config, verbs, k, slice(k, k + 1), int(owed[k]), stop)


def _learn(
    state: State, config: Config, verbs: Verbs, learner: int, seeds: slice, times: int, stop: Callable[[], bool]
) -> None:
    for _ in range(times):
        if stop():
            return
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


def evaluate(
    state: State, evaluator: Evaluator, config: Config, folder: Run, display: Display, stop: Callable[[], bool]
) -> None:
    """Play the fixed episodes with every seed's actor, record them, and keep the best and the last policies."""
    evaluation = evaluator.play(state.agent.actor, stop=stop)
    if stop():
        return  # it is still owed
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
    state.evaluated = state.step
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


def about(config: Config) -> dict[str, Any]:
    """What bits depend on beside the run itself: written with every checkpoint."""
    return {"versions": versions(), "device": config.device, "threads": config.threads, "processor": platform.machine()}


def versions() -> dict[str, str]:
    """Of what results depend on."""
    found = {"python": platform.python_version()}
    for package in ("t3d", "torch", "numpy", "gymnasium", "mujoco"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
