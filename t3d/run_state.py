"""The state of a run: everything that changes while it trains, how it is made, and how it is restored.

Shapes: S seeds, N environments a seed.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from t3d import files, steps
from t3d.collector import Collector
from t3d.config import Config, Preset
from t3d.custom_network import Network
from t3d.envs import EnvBatch, EnvFactory
from t3d.errors import T3DError
from t3d.evaluate.evaluator import PolicySnapshot
from t3d.learners import LearnerState
from t3d.limits import refuse_large_networks, refuse_oversize
from t3d.networks import Networks, first
from t3d.pixels.encoder import FEATURES, image_networks
from t3d.pixels.frame_stack import FrameStack
from t3d.pixels.frame_store import MAX_FRAMES, FrameStore
from t3d.replay import Replay, row_width
from t3d.runs.manifest import SPARE
from t3d.state_dict import load_numbers, state_dict
from t3d.steps import Agent

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

LONGEST_REPLAY = 1_000_000  # steps of a current episode


@dataclass(frozen=True)
class RunSetup:
    """What a run trains: the environment, the seeds, the options, and a user's own network or algorithm."""

    factory: EnvFactory
    seeds: Sequence[int]
    config: Config
    preset: Preset = "td3"
    network: Network | None = None
    algorithm: ModuleType = steps  # a module with the functions of `steps`


@dataclass
class RunState:
    """Everything of a run that changes."""

    seeds: list[int]
    learner: LearnerState  # the agent, its replay memory, the metrics since they were last logged
    collector: Collector  # the environments and their current episodes
    update_credit: NDArray[np.int64]  # (S,) environment steps that count towards updates, so far
    updates: NDArray[np.int64]  # (S,) `agent.updates` on the host: reading it does not wait for a GPU
    updates_logged: NDArray[np.int64]  # (S,) updates that are in the rows of metrics
    best: NDArray[np.float64]  # (S,) each seed's best evaluation
    step: int = 0  # environment steps of each seed
    logged: int = 0  # the step of the last rows of training metrics
    evaluated: int = -1  # the step of the last evaluation
    pending_eval: PolicySnapshot | None = None  # of an evaluation whose result is not recorded yet

    def close(self) -> None:
        """Close the environments."""
        self.collector.close()

    def state_dict(self) -> dict[str, Tensor]:
        """Every number to save, by name. Arrays share their memory with the state."""
        self.collector.flush()
        return state_dict(self)


def create_state(setup: RunSetup) -> RunState:
    """[steps 1 to 3] An empty replay memory, new networks, environments at their first observation."""
    state = make_state(setup)
    try:
        state.collector.reset()
    except BaseException:
        state.close()
        raise
    return state


def make_state(setup: RunSetup) -> RunState:
    """The state of a new run whose environments are not reset yet."""
    config, count = setup.config, len(setup.seeds)
    collector = Collector(setup.factory, setup.seeds, config)
    try:
        memory = make_memory(collector.envs, count, config)
        agent = make_agent(setup, collector.envs)
        refuse_large_policies(agent, count)
        collector.connect(memory.obs_dim, memory.frames, config)
    except BaseException:
        collector.close()
        raise
    names = (*setup.algorithm.METRICS, *setup.algorithm.POLICY_METRICS)
    return RunState(
        seeds=list(setup.seeds),
        learner=LearnerState(
            agent, memory, {name: torch.zeros_like(agent.seeds, dtype=torch.float32) for name in names}, setup.algorithm
        ),
        collector=collector,
        update_credit=np.zeros(count, np.int64),
        updates=np.zeros(count, np.int64),
        updates_logged=np.zeros(count, np.int64),
        best=np.full(count, -np.inf),
    )


def make_agent(setup: RunSetup, envs: EnvBatch) -> Agent:
    """[steps 2 and 3] Actor, critics and their targets for these environments, if there is room for them."""
    config, device = setup.config, torch.device(setup.config.device)
    if setup.network is None:
        sizes = [envs.obs_dim if envs.frame_stack is None else FEATURES, *config.hidden, envs.actions.dim]
        refuse_large_networks(sizes, len(setup.seeds) * (1 + config.critics), device)
    networks = make_networks(config, envs.frame_stack, setup.network)
    seeds = torch.tensor(setup.seeds, device=device)
    made: Agent = setup.algorithm.init_agent(
        seeds, envs.obs_dim, envs.actions.dim, config.hidden, torch.float32, networks
    )
    return made


def make_networks(config: Config, frame_stack: FrameStack | None, own: Network | None = None) -> Networks:
    """The user's own networks, or those that fit the observations."""
    if own is not None:
        return own.networks(config.critics)
    norm = config.critic_norm == "layer"
    if frame_stack is None:
        return Networks(critics=config.critics, critic_norm=norm)
    return image_networks(frame_stack, config.encoder, config.critics, norm)


def refuse_large_policies(agent: Agent, seeds: int) -> None:
    """Refuse a policy that would not fit into a file that can be read again."""
    size = sum(tensor.nbytes for tensor in agent.actor.values()) // seeds
    if size > files.MOST_TENSORS - files.MOST_HEADER:
        raise T3DError(
            f"the actor has {size / 2**20:,.0f} MiB of weights, and a policy file holds"
            f" {files.MOST_TENSORS / 2**20:,.0f}: make the network smaller."
        )


def make_memory(envs: EnvBatch, seeds: int, config: Config) -> Replay:
    """[step 1] A replay memory for these environments, if there is room for it."""
    rows, dim, frame_stack = config.steps * (1 + config.her), envs.actions.dim, envs.frame_stack
    capacity = max(min(config.buffer_size, rows), config.num_envs * config.n_step)  # at least what a step can bring
    obs_dim = envs.obs_dim if frame_stack is None else frame_stack.stack + len(frame_stack.numbers)
    size = row_width(obs_dim, dim) * 4 + (0 if frame_stack is None else frame_stack.frame_size + 8)
    refuse_oversize(capacity, size, seeds, torch.device(config.device))
    if frame_stack is not None and capacity > MAX_FRAMES // 2:
        raise T3DError(f"--buffer-size can be {MAX_FRAMES // 2:,} at most where observations have images.")
    try:
        frames = None
        if frame_stack is not None:
            lanes, augment = (seeds, config.num_envs), config.augment == "on"
            frames = FrameStore(frame_stack, capacity, lanes, config.n_step, augment, config.device)
        normalize = config.normalize_obs == "on"
        return Replay(seeds, capacity, obs_dim, dim, normalize=normalize, frames=frames, device=config.device)
    except RuntimeError as error:
        gib = seeds * capacity * size / 2**30
        raise T3DError(f"the replay memory needs {gib:,.1f} GiB and cannot be had: lower --buffer-size.") from error


def take_snapshot(state: RunState, config: Config) -> PolicySnapshot:
    """A copy of every seed's policy for an evaluation, on the device that evaluates."""
    agent, scaling = state.learner.agent, state.learner.memory.scaling()
    critic = first(agent.critic) if config.eval_values == "on" else {}
    return PolicySnapshot(agent.networks, agent.actor, critic, scaling).copied(config.eval_device)


# ------------------------------------------------------------------------------------------------- restoring


def restore(
    state: RunState,
    given: dict[str, Tensor],
    path: Path,
    config: Config,
    say: Callable[[str], None] = lambda sentence: None,
) -> NDArray[np.bool_]:
    """Load a saved state; the replay memory has its rows already.

    Environments are restored by replaying their current episodes, which `say` reports. Returns which of them (S, N)
    did not come back to where they were: their episodes are cut there. A real environment is not replayed.
    """
    _load(state, given, path, config)
    collector = state.collector
    if config.real_env and state.step >= config.steps:
        return np.ones(collector.episode_length.shape, bool)  # no step is left to train
    episodes = collector.episodes.flatten().tolist()
    actions = [collector.actions.episode(k, i) for k, i in np.ndindex(collector.episode_length.shape)]
    if config.real_env:
        missed = np.ones(len(actions), bool)
    else:
        if count := sum(map(len, actions)):
            say(f"Replaying {count:,} actions to restore the environments.")
        expected, returns = collector.obs.reshape(len(actions), -1), collector.episode_return.reshape(-1)
        missed = ~replay_matches(collector.envs, episodes, actions, expected, returns)
    if missed.any() or (collector.envs.together and len({len(part) for part in actions}) > 1):
        # Environments that can only step together went on while the longest episode was replayed.
        missed |= collector.envs.together
        new = [episode + bool(lost) for episode, lost in zip(episodes, missed, strict=True)]
        actions = [part[:0] if lost else part for part, lost in zip(actions, missed, strict=True)]
        obs = replay_episodes(collector.envs, new, actions)[0].reshape(collector.obs.shape)
        cut_episodes(state, missed.reshape(collector.episode_length.shape), obs)
    return missed.reshape(collector.episode_length.shape)


def _load(state: RunState, given: dict[str, Tensor], path: Path, config: Config) -> None:
    """Check every saved number, then copy it to its place."""
    collector = state.collector
    longest = _logged_steps(given, "collector.actions.steps", path)
    _logged_steps(given, "collector.transitions.steps", path)
    collector.actions.resize(longest)
    collector.transitions.resize(longest if collector.hindsight else 0)
    collector.episode_length[:] = longest  # for now: `state_dict` then gives the logs the length of the saved ones
    if any(name.startswith("pending_eval.") for name in given):
        state.pending_eval = take_snapshot(state, config)
    live = state.state_dict()
    if not torch.equal(given.get("seeds", torch.empty(0)), live["seeds"]):
        raise T3DError(f"{path} belongs to a run with other seeds.")
    files.refuse_mismatch(path, given, live)
    _refuse_impossible(state, given, path, longest)
    files.copy_tensors(path, given, live)
    load_numbers(state, given)
    try:
        state.learner.memory.restored(collector.n_step.obs)
    except ValueError as error:
        raise T3DError(f"{path}: {error}.") from error


def _logged_steps(given: dict[str, Tensor], name: str, path: Path) -> int:
    """Steps in a saved episode log; too many are refused before memory is reserved for them."""
    log = given.get(name, torch.empty(0, 1, 1, 1))
    count = len(log) if log.dim() == 4 and log.numel() else 0
    if count > LONGEST_REPLAY:
        raise T3DError(f"{path}: {name} has {count:,} steps; at most {LONGEST_REPLAY:,} are replayed.")
    return count


def _refuse_impossible(state: RunState, given: dict[str, Tensor], path: Path, longest: int) -> None:
    """Refuse numbers that no run has, before any of them is used: the files may come from a stranger."""

    def allowed(name: str, tensor: Tensor) -> bool:
        if name == "best":  # of a seed that was never evaluated
            return bool((tensor < float("inf")).all())
        return name.startswith("learner.sums.") or (name == "evaluated" and int(tensor) == -1)

    files.refuse_numbers(path, given, allowed)
    collector, length = state.collector, "collector.episode_length"
    for name, most in {length: longest, "collector.n_step.pending": collector.n_step.n}.items():
        if name in given and int(given[name].max()) > most:
            raise T3DError(f"{path}: {name} is {int(given[name].max()):,}, and at most {most:,} are there.")
    limit = collector.envs.longest_episode
    if limit is not None and length in given and int(given[length].max()) > limit:
        raise T3DError(f"{path}: an episode has {int(given[length].max()):,} steps, and can have {limit:,}.")


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
        result = envs.step(now, active)
        obs, returns = result.obs, returns + result.reward
        ended |= result.terminated | result.truncated
    return obs, returns, ended


def replay_matches(
    envs: EnvBatch,
    episodes: Sequence[int],
    actions: Sequence[NDArray[np.float32]],
    obs: NDArray[np.float32],
    returns: NDArray[np.float64],
) -> NDArray[np.bool_]:
    """Replay the episodes; which environments arrived at the same observation and return, to the last bit."""
    cut, envs.cut_failures = envs.cut_failures, True  # a failure in the replay only counts as not restored
    try:
        now, again, ended = replay_episodes(envs, episodes, actions)
    finally:
        envs.cut_failures = cut
    same: NDArray[np.bool_] = (now == obs).all(1) & (again == returns) & ~ended
    return same


def cut_episodes(state: RunState, missed: NDArray[np.bool_], obs: NDArray[np.float32]) -> None:
    """End episodes that cannot be continued as if by a time limit: their transitions are kept."""
    collector, memory = state.collector, state.learner.memory
    memory.add(collector.cut(missed, obs))
    for k, i in np.argwhere(missed):
        if (rows := collector.relabeled(k, i, relabel_counter(state, i), memory.capacity)) is not None:
            memory.seed(k).add(rows)
    collector.begin(missed)


def relabel_counter(state: RunState, env: int) -> int:
    """A number for an episode that ends at this step, different from those of the seed's other episodes."""
    return state.step * state.collector.envs_per_seed + env


# ------------------------------------------------------------------------------------------------- sizes


def most_state(state: RunState) -> int:
    """Bytes that a saved state can have at most: the logs of current episodes grow with them."""
    collector = state.collector
    step = collector.actions.step_bytes + collector.transitions.step_bytes
    return _largest_state(state) + LONGEST_REPLAY * step + SPARE


def disk_needed(state: RunState) -> int:
    """Bytes that checkpoints take at most: the rows, twice while segments are merged, and three states."""
    return 2 * state.learner.memory.nbytes + 3 * _largest_state(state)


def _largest_state(state: RunState) -> int:
    """Bytes of a saved state with an evaluation pending, without the logs of current episodes."""
    agent = state.learner.agent
    most = replace(state, pending_eval=PolicySnapshot(agent.networks, agent.actor, agent.critic)).state_dict()
    size: int = sum(tensor.nbytes for name, tensor in most.items() if not name.endswith(".steps"))
    return size


def peak_memory(state: RunState) -> int:
    """Bytes of host memory that this process needs at most: its peak so far, and the replay memory, still untouched."""
    memory, so_far = state.learner.memory, 0
    if resource is not None:
        so_far = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return so_far + (memory.nbytes if memory.rows.device.type == "cpu" else 0)
