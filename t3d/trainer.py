"""The loop: act, step the environments, store what happened, learn; now and then evaluate.

Shapes: S seeds, N environments a seed.
"""

import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from math import floor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from t3d import agent as agents
from t3d.config import Config, parse_every
from t3d.display import Display
from t3d.envs import EnvFactory
from t3d.envs.batch import MOST_LOSSES, EnvError
from t3d.errors import T3DError, plain_lines, shown
from t3d.evaluate.async_evaluator import AsyncEvaluator
from t3d.evaluate.evaluator import Evaluation, Evaluator, NoEvaluator, PolicySnapshot
from t3d.learners import Learner
from t3d.policy import Card, Policy
from t3d.replay import Flags, Normalizer, pack
from t3d.run_state import METRICS, State, begin_anew, policy_snapshot, relabel_episode, reset_environments, saved
from t3d.runs.checkpoints import Checkpoints
from t3d.runs.folder import Run, Which
from t3d.steps import is_policy_step


def run(
    state: State,
    learner: Learner,
    evaluator: Evaluator | AsyncEvaluator | NoEvaluator,
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

    def save() -> None:
        learner.flush()
        note(state)
        agents.refuse_diverged(agents.tensors(state.agent), state.seeds)
        checkpoints.save(state.step, saved(state), state.memory)
        if not config.eval_every:
            save_last_policies(state, config, folder)

    def take_in(pending_eval: PolicySnapshot) -> None:
        try:
            evaluation = evaluator.result(pending_eval, stop)
        except EnvError as failure:
            raise stopped_by(failure) from failure
        if evaluation is not None:  # else it is still owed
            record(state, pending_eval, evaluation, config, folder, display)
            state.pending_eval = None
            if config.real_env and not stop() and state.step < config.steps:
                reset_environments(state)

    def stopped_by(failure: EnvError) -> T3DError:
        """The same, when it is written down and all before it is saved."""
        folder.record(failure.rows)
        try:
            save()
            checkpoints.wait()
            kept = "All before it is saved."
        except T3DError as problem:  # it must not hide what happened
            kept = f"What came since the last checkpoint could not be saved: {problem}"
        report = write_report(failure, state, folder)
        can_be_cut = failure.call == "step" and not state.envs.together and not failure.in_evaluation
        how = {"on_env_error": "cut"} if can_be_cut else {}
        return T3DError(
            f"{failure} {report} {kept} To go on"
            f"{' without this episode' if how else ''}: {folder.command('resume', **how)}"
        )

    if state.evaluated < 0:
        save()
        if not config.eval_every:
            state.evaluated = 0
    if state.pending_eval is not None:
        evaluator.submit(state.pending_eval)  # again: when the run was stopped, what came of it was not recorded
    while True:
        last = state.step >= config.steps
        log = due(state.logged, state.step, config.log_every) or (last and state.logged < state.step)
        test = evaluation_due(state, config, last)
        # With overlap the updates that are owed are left for the next turn, unless they are in what is read here.
        if config.overlap != "on" or log or test:
            learn_owed(state, config, learner, stop)
        if log and not stop():
            now = time.perf_counter()
            rows = training_rows(state, config, (state.step - marked_step) / (now - marked))
            marked, marked_step, state.logged = now, state.step, state.step
            display.training(rows)
            folder.record(rows)
            if early := evaluator.poll():
                display.evaluated(state.evaluated, early)
        # What is played beside training is taken in when the next evaluation is due, or at the end: at a fixed step, so
        # that rows keep their order.
        paused = time.perf_counter()
        if test and not stop() and state.pending_eval is not None:
            take_in(state.pending_eval)
        if test and not stop():
            learner.flush()
            state.pending_eval, state.evaluated = policy_snapshot(state, config), state.step
            evaluator.submit(state.pending_eval)
        if state.pending_eval is not None and (last or not evaluator.beside) and not stop():
            take_in(state.pending_eval)
        marked += time.perf_counter() - paused
        if stop() or last:
            break
        # Counted in steps, training waits for the disk, so that never more than so many are done again; counted in
        # seconds it does not wait.
        if not checkpoints.busy and schedule.due(state.step):
            save()
            if schedule.steps:
                checkpoints.wait()
        try:
            rows = turn(state, config, learner)
        except EnvError as failure:
            raise stopped_by(failure) from failure
        if rows:
            folder.record(rows)
            display.ended(rows)
        for cut in state.envs.failures:
            state.env_errors += 1
            report = write_report(cut, state, folder)
            display.say(f"{cut} {report} Its episode is cut, the {nth(state.env_errors)} because of an error.")
        if state.envs.failures and state.env_errors > config.max_env_errors:
            save()
            checkpoints.wait()
            more = folder.command("resume", max_env_errors=2 * state.env_errors)
            raise T3DError(
                f"{state.env_errors} steps of {state.envs.name} failed, and --max-env-errors is"
                f" {config.max_env_errors}: the run is saved and stopped at step {state.step:,}. To go on: {more}"
            )
        display.advance(state.step, state.envs.lost)
    save()
    checkpoints.wait()


def write_report(failure: EnvError, state: State, folder: Run) -> str:
    """All that is known of a failure, in a file of the run folder; a sentence with the most important of it."""
    place = failure.place
    if not place and failure.index is not None:
        k, i = divmod(failure.index, state.obs.shape[1])
        place = f"environment {i} of seed {state.seeds[k]}"
    about = {
        "what": str(failure),
        "environment": place or "the vector environment",
        "global step": f"{state.step:,}",
        "episode": f"{failure.episode:,}",
        "step of the episode": f"{failure.length:,}",
        "last action": None if failure.action is None else np.array2string(failure.action, threshold=10_000),
        "last observation": None if failure.obs is None else np.array2string(failure.obs, threshold=10_000),
    }
    lines = [f"{name}: {value}" for name, value in about.items() if value is not None]
    text = "\n".join(map(plain_lines, [*lines, "", failure.whole]))
    name = f"step-{state.step}-{failure.index or 0}.txt"
    try:
        folder.write("errors", name, text.encode(errors="replace"))
        all_of_it = f"All of it is in {folder.path / 'errors' / name}."
    except T3DError as problem:
        all_of_it = f"It could not be written down: {problem}"
    last = "".join(
        f", the last {name} {shown(value.tolist())}"
        for name, value in (("action", failure.action), ("observation", failure.obs))
        if value is not None
    )
    where = f"It is {place}, at step {state.step:,} of the run{last}." if place else f"Step {state.step:,} of the run."
    return f"{where} {all_of_it}"


def nth(number: int) -> str:
    """1st, 2nd, 3rd, 4th, …"""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"


def save_last_policies(state: State, config: Config, folder: Run) -> None:
    """Where no evaluation saves them: every seed's actor as it is now, with a card that has no returns."""
    pending_eval = policy_snapshot(state, config)
    for k in range(len(state.seeds)):
        folder.save_policy(policy_of(state, k, pending_eval, config, folder, state.step), "last")


def evaluation_due(state: State, config: Config, last: bool) -> bool:
    """Whether there is to be an evaluation now. On a real environment it waits for the episode to end."""
    if not config.eval_every:
        return False
    if not last and config.real_env and state.episode_length.any():
        return False
    return due(state.evaluated, state.step, config.eval_every) or (last and state.evaluated < state.step)


def finished(state: State, config: Config) -> bool:
    """Whether nothing is left to do."""
    evaluated = not config.eval_every or (state.evaluated == state.step and state.pending_eval is None)
    return state.step >= config.steps and evaluated


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


def turn(state: State, config: Config, learner: Learner) -> list[dict[str, Any]]:
    """Every environment one step further; returns a row for each episode that ended."""
    action = act(state, config, learner)
    if config.overlap == "on":
        learn_owed(state, config, learner)  # asked for now, done while the environments move
    note(state)  # the step before this one, while a GPU is busy with the actions
    return collect(state, action(), config, learner)


def act(state: State, config: Config, learner: Learner) -> Callable[[], NDArray[np.float32]]:
    """Random actions first, then the actor's with noise: (S, N, A) in [−1, 1], when called for."""
    random = config.random_steps - state.step
    if random <= 0:
        return learner.explore(state.obs, state.step)
    action = agents.random_action(torch.tensor(state.seeds), state.step, config.num_envs, state.envs.actions.dim)
    drawn = np.asarray(action.numpy())
    if random >= config.num_envs:
        return lambda: drawn
    explored = learner.explore(state.obs, state.step)  # the last random steps are fewer than there are environments
    return lambda: np.concatenate([drawn[:, :random], explored()[:, random:]], 1)


def collect(state: State, action: NDArray[np.float32], config: Config, learner: Learner) -> list[dict[str, Any]]:
    """[step 1] Step the environments and store the transitions; returns a row for each episode that ended."""
    agents.refuse_divergence(action, state.seeds)
    shape = action.shape[:2]  # (S, N)
    left = config.steps - state.step
    active = None if left >= shape[1] else np.tile(np.arange(shape[1]) < left, shape[0])  # the last steps, exactly
    failed = None
    try:
        moved = state.envs.step(action.reshape(-1, action.shape[-1]), active)
    except EnvError as failure:
        if failure.moved is None:
            raise
        moved, failed = failure.moved, failure  # only the reset after it failed: the step counts
    reward, valid = moved.reward.reshape(shape), moved.valid.reshape(shape)
    terminated, truncated = moved.terminated.reshape(shape), moved.truncated.reshape(shape)
    obs, final_obs = moved.obs.reshape(state.obs.shape), moved.final_obs.reshape(state.obs.shape)

    # Terminated alone ends the value; a truncated episode goes on behind its last observation.
    before, after, frames = state.memory.look(
        state.obs, final_obs, obs, valid, lambda: moved.begun(active).reshape(shape)
    )
    transitions = state.n_step_buffer.add(before, action, reward, after, terminated, truncated, valid)
    learner.store(transitions if frames is None else transitions._replace(frames=frames))

    state.unnoted = action, obs, reward, valid
    state.obs = obs
    state.episode_return += reward
    state.episode_length += valid
    if state.goals is not None:
        whole = np.empty((*shape, state.memory.rows.shape[-1]), np.float32)
        pack(whole, transitions, state.memory.obs_dim)
        state.episode_rows.add(whole, valid, state.episode_length)
    state.step += min(left, shape[1])
    if config.train_freq == "step":
        state.update_credit.fill(max(0, state.step - config.random_steps))
    ended = terminated | truncated
    rows = episodes_ended(state, ended, terminated, valid, config, learner) if np.count_nonzero(ended) else []
    if failed is not None:
        failed.rows = rows
        raise failed
    return rows


def episodes_ended(
    state: State, ended: Flags, terminated: Flags, valid: Flags, config: Config, learner: Learner
) -> list[dict[str, Any]]:
    """A row for each of the episodes (S, N) that ended, and a fresh page for those that begin."""
    note(state)
    rows: list[dict[str, Any]] = []
    for k, i in np.argwhere(ended):
        score, length = float(state.episode_return[k, i]), int(state.episode_length[k, i])
        row = {"kind": "episode", "step": state.step, "seed": state.seeds[k], "return": score, "length": length}
        rows.append(row | {"terminated": bool(terminated[k, i]), "lost": not valid[k, i]})
        if config.train_freq == "episode":
            state.update_credit[k] += length
        if state.goals is not None:
            learner.flush()  # what came before goes in before
            relabel_episode(state, k, i)
    begin_anew(state, ended)
    return rows


def note(state: State) -> None:
    """Write the last step down: its actions, to find the way back, and a hash of all that came."""
    if state.unnoted is None:
        return
    action, obs, reward, valid = state.unnoted
    step = action.tobytes() + obs.tobytes() + reward.tobytes()
    told = blake2b(state.fingerprint.tobytes() + step, digest_size=32).digest()
    state.fingerprint = np.frombuffer(bytearray(told), np.uint8)
    state.episode_actions.add(action, valid, state.episode_length)
    state.unnoted = None


def learn_owed(state: State, config: Config, learner: Learner, stop: Callable[[], bool] = lambda: False) -> None:
    """Run the updates that are owed, or as many of them as there is time for."""
    together = config.train_freq == "step"  # all seeds at once: they owe the same
    for k in range(1 if together else len(state.seeds)):
        # From the whole count each time: 0.3 added up fifty times is not 15.
        done, all_owed = int(state.updates[k]), floor(int(state.update_credit[k]) * config.updates_per_step + 1e-9)
        if done == 0 and all_owed and not state.memory.stored.all():
            return  # nothing to sample yet; the updates stay owed
        for update in range(done + 1, all_owed + 1):
            if stop():
                return
            state.updates[slice(None) if together else k] = update
            learner.update(k, is_policy_step(update, config.policy_delay))


def training_rows(state: State, config: Config, steps_per_second: float) -> list[dict[str, Any]]:
    """The means since the last rows, one row a seed; null where there was no update."""
    sums = {name: tensor.cpu().tolist() for name, tensor in state.sums.items()}
    delay = config.policy_delay
    critic, actor = (state.updates // n - state.updates_logged // n for n in (1, delay))
    counts = {name: actor if name == "actor_loss" else critic for name in METRICS}
    rows: list[dict[str, Any]] = []
    for k, seed in enumerate(state.seeds):
        row: dict[str, Any] = {"kind": "training", "step": state.step, "seed": seed}
        for name, values in sums.items():
            count = int(counts[name][k])
            row[name] = _finite(values[k] / count) if count else None
        rows.append(row | {"steps_per_second": round(steps_per_second, 1)})
    for name in METRICS:
        state.sums[name].zero_()
    state.updates_logged[:] = state.updates
    return rows


def _finite(number: float) -> float | None:
    return number if np.isfinite(number) else None


def record(
    state: State, pending_eval: PolicySnapshot, evaluation: Evaluation, config: Config, folder: Run, display: Display
) -> None:
    """The rows of an evaluation of every seed's actor, and the best and the last policies."""
    agents.refuse_diverged(pending_eval.actor, state.seeds)
    rows = []
    for k, seed in enumerate(state.seeds):
        returns, lengths = evaluation.returns[k], evaluation.lengths[k].tolist()
        mean, given_up = float(evaluation.means[k]), np.flatnonzero(np.isnan(returns))
        row = {"kind": "evaluation", "step": state.evaluated, "seed": seed, "returns": _numbers(returns)}
        rows.append({**row, "lengths": lengths, "mean": _finite(mean)})
        if evaluation.values is not None:
            rows[-1]["q_predicted"] = _finite(float(evaluation.values.expected[k]) / config.reward_scale)
            rows[-1]["discounted_return"] = _finite(float(evaluation.values.came[k]))
        names: list[Which] = ["last"]
        for episode in given_up:
            display.say(
                f"step {state.evaluated:,}: episode {episode} of the evaluation of seed {seed} has no return: its"
                f" worker process died or hung {MOST_LOSSES} times. This evaluation cannot be the best."
            )
        if not len(given_up) and mean > state.best[k]:
            state.best[k] = mean
            names.append("best")
        policy = policy_of(state, k, pending_eval, config, folder, state.evaluated, _numbers(returns), lengths)
        for which in names:
            folder.save_policy(policy, which)
    if evaluation.replayed:
        display.say(
            f"step {state.evaluated:,}: worker processes died or hung in the evaluation and were replaced;"
            f" {evaluation.replayed} episodes were begun again from their seeds."
        )
    folder.record(rows)
    display.evaluated(state.evaluated, evaluation)


def _numbers(returns: NDArray[np.float64]) -> list[float | None]:
    return [_finite(value) for value in returns.tolist()]


def policy_of(
    state: State,
    k: int,
    pending_eval: PolicySnapshot,
    config: Config,
    folder: Run,
    step: int,
    returns: Sequence[float | None] = (),
    lengths: Sequence[int] = (),
) -> Policy:
    """The k-th seed's actor as it plays at a step, with its card."""
    actions = state.envs.actions
    card = Card(
        env=state.envs.name,
        seed=state.seeds[k],
        step=step,
        returns=list(returns),
        lengths=list(lengths),
        layout=state.envs.layout,
        action_low=actions.low.tolist(),
        action_high=actions.high.tolist(),
        action_dtype=str(actions.low.dtype),
        hidden=list(config.hidden),
        network=getattr(state.network, "name", None),
        stack=config.frame_stack if state.envs.frame_stack else 1,
        run=folder.identity,
    )
    actor, normalizer = (
        {name: part[k : k + 1] for name, part in parts.items()}
        for parts in (pending_eval.actor, pending_eval.normalizer)
    )
    return Policy(actor, card, Normalizer(**normalizer) if normalizer else None)


def describe(factory: EnvFactory, preset: str, seeds: Sequence[int], config: Config, network: Any) -> dict[str, Any]:
    """What config.json says."""
    own = getattr(network, "name", None)
    env = {"env": factory.name, "env_args": factory.args, "callable": factory.from_python}
    return {**env, "seeds": list(seeds), "preset": preset, **asdict(config), "network": own, "versions": versions()}


def about(config: Config) -> dict[str, Any]:
    """What bits depend on beside the run itself: written with every checkpoint."""
    device = torch.cuda.get_device_name() if config.device == "cuda" else config.device
    return {"versions": versions(), "device": device, "threads": config.threads, "processor": platform.machine()}


def versions() -> dict[str, str]:
    """Of what results depend on."""
    found = {"python": platform.python_version()}
    for package in ("t3d", "torch", "triton", "numpy", "gymnasium", "mujoco"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
