"""A run in progress: all that changes hangs off one `State`. It begins, it is saved, and it is found again.

Shapes: S seeds, N environments a seed.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from t3d import agent as agents
from t3d import files, networks, rng
from t3d.config import Config
from t3d.envs import EnvBatch, EnvFactory
from t3d.episode_log import EpisodeLog
from t3d.errors import T3DError
from t3d.evaluate.evaluator import PolicySnapshot
from t3d.hindsight import Hindsight
from t3d.limits import refuse_large_networks, refuse_oversize
from t3d.nstep import NStep
from t3d.pixels.encoder import FEATURES, seeing
from t3d.pixels.frame_replay import LARGEST, FrameReplay
from t3d.replay import Replay, row_width, unpack
from t3d.rng import Purpose
from t3d.runs.manifest import SPARE
from t3d.steps import Agent, init_agent

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

LONGEST_REPLAY = 1_000_000  # steps of an episode under way
METRICS = ("critic_loss", "q_mean", "actor_loss")  # the last one only where the actor moves


@dataclass
class State:
    """A run in progress: all that changes."""

    seeds: list[int]
    agent: Agent
    memory: Replay
    n_step_buffer: NStep
    envs: EnvBatch
    obs: NDArray[np.float32]  # (S, N, O) what to act on next
    episode_actions: EpisodeLog  # the actions of the episodes under way, to find the way back to here
    episode_rows: EpisodeLog  # their rows, if they are to be relabeled when they end
    episode_return: NDArray[np.float64]  # (S, N) of the episodes under way
    episode_length: NDArray[np.int64]  # (S, N)
    update_credit: NDArray[np.int64]  # (S,) environment steps that updates are owed for
    updates: NDArray[np.int64]  # (S,) updates that were run: `agent.updates`, known without asking the device
    updates_logged: NDArray[np.int64]  # (S,) those of them that are in the rows of losses
    best: NDArray[np.float64]  # (S,) each seed's best evaluation
    sums: dict[str, Tensor]  # (S,) metrics added up since the last row
    fingerprint: NDArray[np.uint8]  # (32,) a hash of every action, observation and reward so far
    unnoted: tuple[NDArray[Any], ...] | None = None  # the step that is not in there yet: what it was, and what came
    goals: Hindsight | None = None  # what relabels the rows
    network: networks.Network | None = None  # what actor and critics are made of, if not of mlps alone
    step: int = 0  # environment steps of each seed
    logged: int = 0  # the step of the last rows of losses
    evaluated: int = -1  # the step of the last evaluation
    env_errors: int = 0  # steps of environments that failed, and whose episodes were cut
    pending_eval: PolicySnapshot | None = None  # those who play in it, until what came of it is recorded

    def close(self) -> None:
        """Let go of the environments."""
        self.envs.close()
        if self.goals is not None:
            self.goals.close()


def begin(factory: EnvFactory, seeds: Sequence[int], config: Config, own: networks.Network | None = None) -> State:
    """Steps 1 to 3: an empty memory, fresh networks, environments at their first observation."""
    state = make(factory, seeds, config, own)
    try:
        first_reset(state)
    except BaseException:
        state.close()
        raise
    return state


def first_reset(state: State) -> None:
    """Begin the first episodes."""
    state.obs = state.envs.reset().reshape(state.obs.shape)
    state.memory.start(state.obs, np.ones(state.obs.shape[:2], bool))


def make(factory: EnvFactory, seeds: Sequence[int], config: Config, own: networks.Network | None = None) -> State:
    """The same before any environment was reset.

    Networks are `own` if that is given, and otherwise what fits the observations.
    """
    count, per_seed = len(seeds), config.num_envs

    def episode_seed(env: int, episode: int) -> int:
        return rng.integer(seeds[env // per_seed], Purpose.EPISODE, episode, env % per_seed)

    envs = factory.training_batch(count * per_seed, episode_seed, config.workers, config.worker_timeout)
    envs.cut_failures = config.on_env_error == "cut"
    device = torch.device(config.device)
    network = own or (None if envs.frame_stack is None else seeing(envs.frame_stack, config.encoder))
    try:
        goals = Hindsight(factory, config.her) if config.her else None
        memory = empty_memory(envs, count, config)
        if own is None:
            sizes = [envs.obs_dim if envs.frame_stack is None else FEATURES, *config.hidden, envs.actions.dim]
            refuse_large_networks(sizes, count * (1 + config.critics), device)
        with networks.using(network):
            agent = init_agent(
                torch.tensor(seeds, device=device),
                envs.obs_dim,
                envs.actions.dim,
                config.hidden,
                twins=config.critics,
                normalized=config.critic_norm == "layer",
            )
        refuse_large_policies(agent, count)
    except BaseException:
        envs.close()
        raise
    return State(
        seeds=list(seeds),
        agent=agent,
        memory=memory,
        n_step_buffer=NStep(config.n_step, config.gamma, count, per_seed, memory.obs_dim, envs.actions.dim),
        envs=envs,
        obs=np.zeros((count, per_seed, envs.obs_dim), np.float32),
        episode_actions=EpisodeLog(count, per_seed, envs.actions.dim),
        episode_rows=EpisodeLog(count, per_seed, memory.rows.shape[-1]),
        episode_return=np.zeros((count, per_seed)),
        episode_length=np.zeros((count, per_seed), np.int64),
        update_credit=np.zeros(count, np.int64),
        updates=np.zeros(count, np.int64),
        best=np.full(count, -np.inf),
        sums={name: torch.zeros(count, device=device) for name in METRICS},
        updates_logged=np.zeros(count, np.int64),
        fingerprint=np.zeros(32, np.uint8),
        goals=goals,
        network=network,
    )


def refuse_large_policies(agent: Agent, seeds: int) -> None:
    """Say now that a policy would not fit into a file that can be read again."""
    size = sum(tensor.nbytes for tensor in agent.actor.values()) // seeds
    if size > files.MOST_TENSORS - files.MOST_HEADER:
        raise T3DError(
            f"the actor has {size / 2**20:,.0f} MiB of weights, and the file of a policy holds"
            f" {files.MOST_TENSORS / 2**20:,.0f}: make the network smaller."
        )


def empty_memory(envs: EnvBatch, seeds: int, config: Config) -> Replay:
    """[step 1] A replay memory for what these environments show, if there is room for it."""
    rows, dim, frame_stack = config.steps * (1 + config.her), envs.actions.dim, envs.frame_stack
    capacity = max(min(config.buffer_size, rows), config.num_envs * config.n_step)  # at least what a step can bring
    size = row_width(envs.obs_dim if frame_stack is None else frame_stack.stack + len(frame_stack.numbers), dim) * 4
    size += 0 if frame_stack is None else frame_stack.frame_size + 8
    refuse_oversize(capacity, size, seeds, torch.device(config.device))
    options: dict[str, Any] = {
        "device": config.device,
        "normalize": config.normalize_obs == "on",
        "reward_scale": config.reward_scale,
    }
    try:
        if frame_stack is None:
            return Replay(seeds, capacity, envs.obs_dim, dim, **options)
        if capacity > LARGEST // 2:
            raise T3DError(f"--buffer-size can be {LARGEST // 2:,} at most where observations have images.")
        augment = config.augment == "on"
        return FrameReplay(seeds, capacity, frame_stack, dim, config.num_envs, config.n_step, augment, **options)
    except RuntimeError as error:
        gib = seeds * capacity * size / 2**30
        raise T3DError(f"the replay memory needs {gib:,.1f} GiB and cannot be had: lower --buffer-size.") from error


def policy_snapshot(state: State, config: Config) -> PolicySnapshot:
    """A copy of who plays in an evaluation now, where it will be played."""
    normalizer = state.memory.normalizer()
    parts = {
        "actor": state.agent.actor,
        "critic": networks.first(state.agent.critic) if config.eval_values == "on" else {},
        "normalizer": {} if normalizer is None else normalizer._asdict(),
    }
    where = config.eval_device
    return PolicySnapshot(**{part: {k: t.to(where, copy=True) for k, t in own.items()} for part, own in parts.items()})


def saved(state: State) -> dict[str, Tensor]:
    """Every number of the state by its name, but the rows of the memory and what environments hold inside.

    Arrays share their memory with the state, so what is copied into them is in the state.
    """
    parts = {field.name: getattr(state, field.name) for field in fields(state)}
    statistics = state.memory.statistics
    parts["memory"] = {**state.memory.counters(), **(vars(statistics) if statistics else {})}
    parts["envs"] = {"episodes": np.array(state.envs.episodes)}
    parts["n_step_buffer"] = {
        k: v for k, v in vars(state.n_step_buffer).items() if not k.startswith("_") and isinstance(v, np.ndarray)
    }
    longest = int(state.episode_length.max())
    parts["pending_eval"] = state.pending_eval or {}
    parts["episode_actions"], parts["episode_rows"] = (
        state.episode_actions.last(longest),
        state.episode_rows.last(longest if state.goals else 0),
    )
    assert state.unnoted is None, "steps are to be written down before they are saved"
    del parts["goals"], parts["network"], parts["unnoted"]
    return agents.tensors(parts)


def restore(
    state: State,
    given: dict[str, Tensor],
    path: Path,
    config: Config,
    say: Callable[[str], None] = lambda sentence: None,
) -> NDArray[np.bool_]:
    """Put a state that was saved in the place of a fresh one; the memory has its rows already.

    Environments find the way back by playing the episodes under way again, which `say` is told of. Returns which of
    them (S, N) did not arrive where they had been: their episodes are cut there. A real environment is not replayed.
    """
    # As long as it was when it was saved, not as it is now.
    longest = _tape_length(given, "episode_actions", path)
    _tape_length(given, "episode_rows", path)
    state.episode_actions.rewind(longest)
    state.episode_rows.rewind(longest if state.goals else 0)
    state.episode_length[:] = longest
    if any(name.startswith("pending_eval.") for name in given):
        state.pending_eval = policy_snapshot(state, config)
    live = saved(state)
    if not torch.equal(given.get("seeds", torch.empty(0)), live["seeds"]):
        raise T3DError(f"{path} belongs to a run with other seeds.")
    files.refuse_mismatch(path, given, live)
    refuse_state(state, given, path, longest)
    files.copy_tensors(path, given, live)
    try:
        state.memory.restored(state.n_step_buffer.obs)
    except ValueError as error:
        raise T3DError(f"{path}: {error}.") from error
    counts = (int(given[name]) for name in ("step", "logged", "evaluated", "env_errors"))
    state.step, state.logged, state.evaluated, state.env_errors = counts
    episodes = given["envs.episodes"].tolist()
    actions = [state.episode_actions.last(int(n))[:, k, i] for (k, i), n in np.ndenumerate(state.episode_length)]
    expected, returns = state.obs.reshape(len(actions), -1), state.episode_return.reshape(-1)
    if config.real_env and state.step >= config.steps:
        return np.ones(state.episode_length.shape, bool)  # nothing is done to it any more
    if config.real_env:
        missed = np.ones(len(actions), bool)
    else:
        if count := sum(map(len, actions)):
            say(f"Replaying {count:,} actions, to bring the environments back to where they were.")
        missed = ~replay_matches(state.envs, episodes, actions, expected, returns)
    if missed.any() or (state.envs.together and len({len(part) for part in actions}) > 1):
        # Where all move at once, those that had arrived went on while others were still on their way.
        missed |= state.envs.together
        new = [episode + bool(lost) for episode, lost in zip(episodes, missed, strict=True)]
        actions = [part[:0] if lost else part for part, lost in zip(actions, missed, strict=True)]
        obs = replay_episodes(state.envs, new, actions)[0].reshape(state.obs.shape)
        cut_episodes(state, missed.reshape(state.episode_length.shape), obs)
    return missed.reshape(state.episode_length.shape)


def _tape_length(given: dict[str, Tensor], name: str, path: Path) -> int:
    """Steps of a tape, before one of that length is made."""
    tape = given.get(name, torch.empty(0, 1, 1, 1))
    steps = len(tape) if tape.dim() == 4 and tape.numel() else 0
    if steps > LONGEST_REPLAY:
        raise T3DError(f"{path}: {name} has {steps:,} steps; at most {LONGEST_REPLAY:,} are replayed.")
    return steps


def refuse_state(state: State, given: dict[str, Tensor], path: Path, longest: int) -> None:
    """Refuse numbers that no run has, before any of them is used: the files may be somebody else's work."""

    def allowed(name: str, tensor: Tensor) -> bool:
        if name == "best":  # of a seed that was never evaluated
            return bool((tensor < float("inf")).all())
        return name.startswith("sums.") or (name == "evaluated" and int(tensor) == -1)

    files.refuse_numbers(path, given, allowed)
    for name, most in {"episode_length": longest, "n_step_buffer.pending": state.n_step_buffer.n}.items():
        if name in given and int(given[name].max()) > most:
            raise T3DError(f"{path}: {name} is {int(given[name].max()):,}, and at most {most:,} are there.")
    limit = state.envs.longest_episode
    if limit is not None and "episode_length" in given and int(given["episode_length"].max()) > limit:
        raise T3DError(f"{path}: an episode has {int(given['episode_length'].max()):,} steps, and can have {limit:,}.")


def most_state(state: State) -> int:
    """Bytes that a saved state can have at most: the tapes of episodes under way grow with them."""
    most = saved(replace(state, pending_eval=PolicySnapshot(state.agent.actor, state.agent.critic)))
    fixed = sum(tensor.nbytes for name, tensor in most.items() if name not in ("episode_actions", "episode_rows"))
    return fixed + LONGEST_REPLAY * (state.episode_actions.step_bytes + state.episode_rows.step_bytes) + SPARE


def replay_episodes(
    envs: EnvBatch, episodes: Sequence[int], actions: Sequence[NDArray[np.float32]]
) -> tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.bool_]]:
    """Each environment from its episode's start through its actions: observations, returns, whose episode ended."""
    obs, returns, ended = envs.reset(episodes), np.zeros(envs.count), np.zeros(envs.count, bool)
    lengths = np.array([len(part) for part in actions])
    for t in range(int(lengths.max(initial=0))):
        active = (lengths > t) & ~ended
        if not active.any():
            break
        now = np.zeros((envs.count, envs.actions.dim), np.float32)
        for i in map(int, np.flatnonzero(active)):
            now[i] = actions[i][t]
        moved = envs.step(now, active)
        obs, returns = moved.obs, returns + moved.reward
        ended |= moved.terminated | moved.truncated
    return obs, returns, ended


def replay_matches(
    envs: EnvBatch,
    episodes: Sequence[int],
    actions: Sequence[NDArray[np.float32]],
    obs: NDArray[np.float32],
    returns: NDArray[np.float64],
) -> NDArray[np.bool_]:
    """Play them again; which arrived at the same observation and the same return, to the last bit."""
    cut, envs.cut_failures = envs.cut_failures, True  # one that fails now did not come back, and nothing worse
    try:
        now, again, ended = replay_episodes(envs, episodes, actions)
    finally:
        envs.cut_failures = cut
    same: NDArray[np.bool_] = (now == obs).all(1) & (again == returns) & ~ended
    return same


def relabel_episode(state: State, k: int, i: int) -> None:
    """[step 1] Store the rows of an episode that ended again, with goals that it reached, if they are to be."""
    length = int(state.episode_length[k, i])
    if state.goals is None or not length:
        return
    counter = state.step * state.episode_length.shape[1] + i
    rows = state.goals.relabeled(state.episode_rows.last(length)[:, k, i], state.seeds[k], counter)
    if len(rows) > state.memory.capacity:
        raise T3DError(
            f"--buffer-size {state.memory.capacity:,} does not hold an episode of {length:,} steps with --her"
            f" {state.goals.count}."
        )
    state.memory.seed(k).add_rows(unpack(rows[None], state.memory.obs_dim))


def cut_episodes(state: State, missed: NDArray[np.bool_], obs: NDArray[np.float32]) -> None:
    """End episodes that cannot be gone on with as if a time limit had: what came before them is kept."""
    no = np.zeros(missed.shape, bool)
    nothing = np.zeros((*missed.shape, state.envs.actions.dim), np.float32)
    before = state.memory.refer(state.obs)
    rows = state.n_step_buffer.add(before, nothing, np.zeros(missed.shape), before, no, missed, no)
    state.memory.start(obs, missed)
    state.memory.add_rows(rows)
    for k, i in np.argwhere(missed):
        relabel_episode(state, k, i)
    state.obs = obs
    begin_anew(state, missed)


def reset_environments(state: State) -> None:
    """Begin the episodes under way again: others have played in the environments."""
    state.obs = state.envs.reset(state.envs.episodes).reshape(state.obs.shape)
    state.memory.start(state.obs, np.ones(state.obs.shape[:2], bool))


def begin_anew(state: State, ended: NDArray[np.bool_]) -> None:
    """A fresh page for the episodes that follow those that `ended` (S, N)."""
    state.episode_return[ended] = state.episode_length[ended] = 0
    state.episode_actions.forget(ended)
    state.episode_rows.forget(ended)


def peak_memory(state: State) -> int:
    """Bytes that this process will have had at most: what it has had so far, and the replay memory, still untouched.

    What is on a GPU is not counted here.
    """
    memory = state.memory
    so_far = 0
    if resource is not None:
        so_far = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return so_far + (memory.nbytes if memory.rows.device.type == "cpu" else 0)


def disk_needed(state: State) -> int:
    """Bytes that checkpoints will take at most: the rows, twice while they are put together, and three states."""
    most = saved(replace(state, pending_eval=PolicySnapshot(state.agent.actor, state.agent.critic)))
    return 2 * state.memory.nbytes + 3 * sum(tensor.nbytes for tensor in most.values())
