"""The training loop: act, step the environments, store, learn. Between steps: log, evaluate, save.

    Trainer.step
     ├ Learner.act                    the actor with exploration noise, or random actions first
     ├ Collector.collect              the environments, n-step returns           [step 1]
     ├ Learner.store                  Replay.add                                 [step 1]
     └ Learner.update                 steps.update: sample and learn             [steps 4 to 15]

Shapes: S seeds, N environments a seed, A action.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from math import floor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from t3d.agent import random_action
from t3d.collector import Collected
from t3d.config import Config, parse_every
from t3d.display import Display
from t3d.envs.batch import EnvError
from t3d.envs.factory import differs
from t3d.errors import T3DError, shown
from t3d.evaluate.async_evaluator import make_evaluator, resolve_async_eval
from t3d.evaluate.evaluator import AnyEvaluator, Evaluator, PolicySnapshot
from t3d.learners import CannotCompile, Learner, hardware, make_learner
from t3d.recorder import Recorder, Row, about, describe, finite
from t3d.run_state import (
    RunSetup,
    RunState,
    create_state,
    make_state,
    most_state,
    relabel_counter,
    restore,
    take_snapshot,
)
from t3d.runs.checkpoints import Checkpoints
from t3d.runs.folder import CHANGEABLE, Run, claim

Floats = NDArray[np.float32]
MAX_STEPS_BETWEEN_CHECKS = 64  # of the clock, the display and the checkpoints


class Stop:
    """Whether the run is asked to stop, and by which signal."""

    requested = False
    signal: int | None = None

    def ask(self, number: int, _: Any) -> None:
        """A signal handler. Asked twice, the process ends at once; the last checkpoint is whole."""
        if self.requested:
            os._exit(128 + number)
        self.requested, self.signal = True, number


NEVER = Stop()


class Trainer:
    """A run in progress and everything that drives it. `run` is the loop; `step` is one step of every environment.

    `create` and `resume` open a run folder and close everything at the end:

        with Trainer.create(setup, out, display) as trainer:
            trainer.run()
    """

    def __init__(
        self,
        state: RunState,
        learner: Learner,
        config: Config,
        evaluator: AnyEvaluator | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.state, self.learner, self.config = state, learner, config
        self._evaluator = evaluator
        self._recorder, self.stop = recorder, Stop()
        self._schedule = Schedule(config.checkpoint_every, state.step)
        self._clock, self._clock_step = time.perf_counter(), state.step

    # ------------------------------------------------------------------------------------------ one step

    def step(self) -> list[Row]:
        """Act, step every environment, store, learn; returns a row for each episode that ended."""
        config, state = self.config, self.state
        wait_for_action = self.start_acting()
        if config.overlap == "on":
            self.update_owed(NEVER)  # the updates owed from the step before run while the environments step
        left = config.steps - state.step  # in the last steps only some of the environments are active
        active = None if left >= config.num_envs else np.tile(np.arange(config.num_envs) < left, len(state.seeds))
        collected = state.collector.collect(wait_for_action(), active)
        self.learner.store(collected.transitions)
        state.step += min(left, config.num_envs)
        if config.train_freq == "step":
            state.update_credit.fill(max(0, state.step - config.random_steps))
        rows = self._end_episodes(collected) if np.count_nonzero(collected.ended) else []
        if collected.failure is not None:
            collected.failure.rows = rows
            raise collected.failure
        if config.overlap != "on":
            self.update_owed(self.stop)
        return rows

    def start_acting(self) -> Callable[[], Floats]:
        """Random actions first, then the actor's with noise: a function that waits for them, (S, N, A) in [−1, 1]."""
        config, state = self.config, self.state
        random = config.random_steps - state.step
        if random <= 0:
            return self.learner.act(state.collector.obs, state.step)
        dim = state.collector.envs.actions.dim
        drawn = np.asarray(random_action(torch.tensor(state.seeds), state.step, config.num_envs, dim).numpy())
        if random >= config.num_envs:
            return lambda: drawn
        acted = self.learner.act(state.collector.obs, state.step)  # fewer random steps are left than environments
        return lambda: np.concatenate([drawn[:, :random], acted()[:, random:]], 1)

    def update_owed(self, stop: Stop) -> None:
        """Run the updates that are owed, until told to stop."""
        config, state = self.config, self.state
        together = config.train_freq == "step"  # all seeds owe the same number of updates
        for k in range(1 if together else len(state.seeds)):
            # From the whole count each time: 0.3 added up fifty times is not 15.
            done, due = int(state.updates[k]), floor(int(state.update_credit[k]) * config.updates_per_step + 1e-9)
            stored = state.learner.memory.stored
            if done == 0 and not (stored.all() if together else stored[k]):
                continue  # nothing to sample yet; the updates stay owed
            for update in range(done + 1, due + 1):
                if stop.requested:
                    return
                state.updates[slice(None) if together else k] = update
                self.learner.update(k, state.learner.algorithm.is_policy_step(update, config.policy_delay))

    def _end_episodes(self, collected: Collected) -> list[Row]:
        """A row for each episode that ended; hindsight stores its relabeled transitions."""
        state, collector = self.state, self.state.collector
        rows: list[Row] = []
        for k, i in np.argwhere(collected.ended):
            score, length = float(collector.episode_return[k, i]), int(collector.episode_length[k, i])
            row = {"kind": "episode", "step": state.step, "seed": state.seeds[k], "return": score, "length": length}
            rows.append(row | {"terminated": bool(collected.terminated[k, i]), "lost": not collected.valid[k, i]})
            if self.config.train_freq == "episode":
                state.update_credit[k] += length
            memory = state.learner.memory
            if (new := collector.relabeled(k, i, relabel_counter(state, i), memory.capacity)) is not None:
                self.learner.flush()  # the episode's own transitions come first
                memory.seed(k).add(new)
        collector.begin(collected.ended)
        return rows

    # ------------------------------------------------------------------------------------------ the loop

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return finished(self.state, self.config)

    @property
    def evaluator(self) -> AnyEvaluator:
        assert self._evaluator is not None, "a run without evaluations has no evaluator"
        return self._evaluator

    @property
    def recorder(self) -> Recorder:
        assert self._recorder is not None, "a trainer without a run folder has no recorder"
        return self._recorder

    def run(self, stop: Stop | None = None) -> None:
        """Train to the last step, or until told to stop.

        A run that was stopped anywhere goes on from the top of the loop: what is owed comes first, in the same order.
        """
        self.stop = stop or Stop()
        state, checkpoints = self.state, self.recorder.checkpoints
        if state.evaluated < 0:
            self.save()
            checkpoints.wait()  # before any row: `resume` takes rows without a checkpoint for removed checkpoints
            if not self.config.eval_every:
                state.evaluated = 0
        if state.pending_eval is not None:
            self.evaluator.submit(state.pending_eval)  # its result was not recorded when the run stopped
        try:
            while self._between_steps():
                self._steps()
        except EnvError as failure:
            self.learner.flush()
            raise self.recorder.failed(failure, state) from failure
        self.save()
        checkpoints.wait()

    def _steps(self) -> None:
        """Train to the next step at which something is due."""
        state, envs = self.state, self.state.collector.envs
        until, started = self._next_due(), time.perf_counter()
        while state.step < until and not self.stop.requested:
            before, rows = state.step, self.step()
            if rows:
                self.recorder.episodes(rows)
            if envs.failures:
                self.learner.flush()
                self.recorder.cut(envs.failures, state, before)
            if time.perf_counter() - started > 0.25:
                break
        self.recorder.display.advance(state.step, envs.lost)

    def _next_due(self) -> int:
        """The next step to look up at; a real environment is watched at each step for the end of its episode."""
        state, config = self.state, self.config
        every = [n for n in (config.log_every, config.eval_every, self._schedule.steps) if n]
        most = state.step + (1 if config.real_env else MAX_STEPS_BETWEEN_CHECKS)
        return min(config.steps, most, *((state.step // n + 1) * n for n in every))

    def _between_steps(self) -> bool:
        """Log, evaluate and save what is due; False at the end."""
        state, config = self.state, self.config
        last = state.step >= config.steps
        log = due(state.logged, state.step, config.log_every) or (last and state.logged < state.step)
        evaluate = self._evaluation_due(last)
        # With overlap the updates owed wait for the next step, unless they are in what is read here.
        if config.overlap != "on" or log or evaluate:
            self.update_owed(self.stop)
        if log and not self.stop.requested:
            self._log()
        paused = time.perf_counter()
        # A concurrent evaluation is recorded when the next one is due, or at the end: at a fixed step.
        if evaluate and state.pending_eval is not None:
            self._record_evaluation(state.pending_eval)
        if evaluate and not self.stop.requested:
            self.learner.flush()
            state.pending_eval, state.evaluated = take_snapshot(state, config), state.step
            self.evaluator.submit(state.pending_eval)
        if state.pending_eval is not None and (last or not self.evaluator.concurrent):
            self._record_evaluation(state.pending_eval)
        self._clock += time.perf_counter() - paused
        if self.stop.requested or last:
            return False
        # With --checkpoint-every in steps, training waits for the write, so a crash costs at most one interval.
        if not self.recorder.checkpoints.busy and self._schedule.due(state.step):
            self.save()
            if self._schedule.steps:
                self.recorder.checkpoints.wait()
        return True

    def save(self) -> None:
        """Start a checkpoint of the whole run."""
        self.learner.flush()
        self.recorder.save(self.state)

    def _evaluation_due(self, last: bool) -> bool:
        """Whether an evaluation is due. On a real environment it waits for the episode to end."""
        state, config = self.state, self.config
        if not config.eval_every or (not last and config.real_env and state.collector.episode_length.any()):
            return False
        return due(state.evaluated, state.step, config.eval_every) or (last and state.evaluated < state.step)

    def _record_evaluation(self, snapshot: PolicySnapshot) -> None:
        """Wait for the result of the pending evaluation and record it; told to stop, it stays pending."""
        if self.stop.requested:
            return
        result, state = self.evaluator.result(snapshot, lambda: self.stop.requested), self.state
        if result is None:
            return
        self.recorder.evaluation(state, snapshot, result)
        state.pending_eval = None
        if self.config.real_env and not self.stop.requested and state.step < self.config.steps:
            state.collector.reset(state.collector.envs.episodes)  # the evaluation ran in the same environment

    def _log(self) -> None:
        now, state = time.perf_counter(), self.state
        rows = self.training_rows((state.step - self._clock_step) / (now - self._clock))
        self._clock, self._clock_step, state.logged = now, state.step, state.step
        self.recorder.training(rows)
        if self._evaluator is not None and (early := self._evaluator.poll()):
            self.recorder.display.evaluated(state.evaluated, early)

    def training_rows(self, steps_per_second: float) -> list[Row]:
        """The means since the last rows, one row a seed; null where there was no update."""
        state = self.state
        sums = {name: tensor.cpu().tolist() for name, tensor in state.learner.sums.items()}
        algorithm, rows = state.learner.algorithm, list[Row]()
        for k, seed in enumerate(state.seeds):
            row: dict[str, Any] = {"kind": "training", "step": state.step, "seed": seed}
            updates = range(int(state.updates_logged[k]) + 1, int(state.updates[k]) + 1)
            policy_steps = sum(algorithm.is_policy_step(update, self.config.policy_delay) for update in updates)
            for name, values in sums.items():
                count = policy_steps if name in algorithm.POLICY_METRICS else len(updates)
                row[name] = finite(values[k] / count) if count else None
            rows.append(row | {"steps_per_second": round(steps_per_second, 1)})
        for total in state.learner.sums.values():
            total.zero_()
        state.updates_logged[:] = state.updates
        return rows

    # ------------------------------------------------------------------------------------------ opening a run

    @classmethod
    def in_memory(cls, setup: RunSetup) -> "Trainer":
        """A trainer without a run folder: its environments are ready, and `step` works."""
        state = create_state(setup)
        return cls(state, make_learner(state.learner, setup.config), setup.config)

    @classmethod
    @contextmanager
    def create(
        cls, setup: RunSetup, out: str | Path | None, display: Display, base: Path | None = None
    ) -> Iterator["Trainer"]:
        """A new run. Everything is checked before its folder is made: what is refused leaves nothing behind.

        A relative `out` is below `base`, by default the working directory.
        """
        config = setup.config
        with ExitStack() as stack:
            stack.enter_context(hardware(config.threads, config.precision))
            state = stack.enter_context(closing(create_state(setup)))
            config = resolve_async_eval(config, setup.factory, state.learner.agent.actor, state.collector.envs)
            evaluator = _open_evaluator(stack, setup, state, config)
            learner, config = _ready(state, config, display)
            run = claim(out, setup.factory.name, base or Path.cwd())
            stack.enter_context(run.lock())
            stack.enter_context(closing(run.log))
            run.begin(describe(replace(setup, config=config)))
            checkpoints = stack.enter_context(closing(Checkpoints(run, about(config), display.say)))
            yield cls(state, learner, config, evaluator, Recorder(run, checkpoints, display, config))

    @classmethod
    @contextmanager
    def resume(cls, setup: RunSetup, run: Run, display: Display) -> Iterator["Trainer"]:
        """A run from its newest whole checkpoint; its folder is locked."""
        config = setup.config
        with ExitStack() as stack:
            stack.enter_context(hardware(config.threads, config.precision))
            state = stack.enter_context(closing(make_state(setup)))
            evaluator = _open_evaluator(stack, setup, state, config)
            checkpoints = stack.enter_context(closing(Checkpoints(run, about(config), display.say)))
            recorder = Recorder(run, checkpoints, display, config)
            _restore_newest(state, recorder)
            run.update_config({name: getattr(config, name) for name in CHANGEABLE})
            done = finished(state, config)
            learner, used = _ready(state, replace(config, accelerate="eager") if done else config, display)
            if not done and used != config:
                display.say("The run was compiled until here: from here on it is not bit for bit the same.")
            yield cls(state, learner, config, evaluator, recorder)


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


def finished(state: RunState, config: Config) -> bool:
    """Whether a run has nothing left to do."""
    evaluated = not config.eval_every or (state.evaluated == state.step and state.pending_eval is None)
    return state.step >= config.steps and evaluated


def due(before: int, now: int, every: int) -> bool:
    """Whether a multiple of `every` was reached since `before`; the first time always."""
    return before < 0 or now // every > before // every


def _open_evaluator(stack: ExitStack, setup: RunSetup, state: RunState, config: Config) -> AnyEvaluator | None:
    """The evaluator of a run; its environments must have the observations and actions of training."""
    evaluator = make_evaluator(setup.factory, setup.seeds, config, state.learner.agent.networks)
    if evaluator is not None:
        stack.enter_context(closing(evaluator))
    envs = state.collector.envs
    if isinstance(evaluator, Evaluator) and differs(
        (envs.layout, envs.actions), (evaluator.envs.layout, evaluator.envs.actions)
    ):
        raise T3DError(
            f"evaluations in {evaluator.envs.name} would have other observations or actions than training in"
            f" {envs.name}."
        )
    return evaluator


def _ready(state: RunState, config: Config, display: Display) -> tuple[Learner, Config]:
    """The learner that the config asks for; where nothing can be compiled, the eager one, and the config says so."""
    if config.accelerate != "eager":
        display.say("Compiling the update: about a minute the first time, a few seconds after that.")
        try:
            return make_learner(state.learner, config), config
        except CannotCompile as error:
            display.say(f"The update cannot be compiled here ({error}). It runs uncompiled, which is slower.")
            config = replace(config, accelerate="eager")
    return make_learner(state.learner, config), config


def _restore_newest(state: RunState, recorder: Recorder) -> None:
    """Restore the newest whole checkpoint and say what was found."""
    run, checkpoints, config, say = recorder.run, recorder.checkpoints, recorder.config, recorder.display.say
    found = checkpoints.newest(state.learner.memory, most_state(state))
    if found is None and checkpoints.written():
        raise run.nothing_whole()
    if found is None:
        say(f"{run.path} holds no checkpoint yet: it starts again from its config.json.")
        checkpoints.discard_unfinished()
        run.log.begin()
        state.collector.reset()
        return
    behind, problem = run.log.after(found.metrics)
    if problem:
        say(f"{problem} It is behind the newest checkpoint, so the run makes it again.")
    reached = max((row["step"] for row in behind), default=0)
    for name, now in about(config).items():
        if found.about.get(name) != now:
            say(f"{name} was {shown(found.about.get(name))} and is {now!r}: the run goes on, but not bit for bit.")
    folder = run.path / "checkpoints" / f"step-{found.step}"
    redone = f"; the metrics reach step {reached:,}: the steps between are repeated" if reached > found.step else ""
    say(f"{run.path}: the newest complete checkpoint is of step {found.step:,}{redone}.")
    missed = restore(state, checkpoints.load(found, state.learner.memory), folder, config, say)
    if config.real_env:
        say(
            "The environment is real, so nothing is replayed: its episode is cut here, and the run goes on, but not bit"
            " for bit."
        )
    elif missed.any():
        say(
            f"{int(missed.sum())} of {missed.size} environments did not come back to where they were: their episodes"
            " are cut here, and the run goes on, but not bit for bit."
        )
