"""What a run writes and shows: rows of metrics, policies, checkpoints, reports of failures."""

import platform
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from t3d.agent import refuse_diverged
from t3d.algorithm import algorithm_name
from t3d.config import Config
from t3d.display import Display
from t3d.envs.batch import MOST_LOSSES, EnvError
from t3d.errors import T3DError, plain_lines, shown
from t3d.evaluate.evaluator import Evaluation, PolicySnapshot
from t3d.normalizer import Scaling
from t3d.policy import Card, Policy
from t3d.run_state import RunSetup, RunState, take_snapshot
from t3d.runs.checkpoints import Checkpoints
from t3d.runs.folder import Run, Which
from t3d.state_dict import tensors

Row = dict[str, Any]


class Recorder:
    """The run folder, its checkpoints and the display, of one run."""

    def __init__(self, run: Run, checkpoints: Checkpoints, display: Display, config: Config) -> None:
        self.run, self.checkpoints, self.display, self.config = run, checkpoints, display, config

    def save(self, state: RunState) -> None:
        """Start a checkpoint; without evaluations it comes with the last policies."""
        refuse_diverged(tensors(state.learner.agent), state.seeds)
        self.checkpoints.save(state.step, state.state_dict(), state.learner.memory)
        if not self.config.eval_every:
            snapshot = take_snapshot(state, self.config)
            for k in range(len(state.seeds)):
                self.run.save_policy(self._policy(state, k, snapshot, state.step), "last")

    def training(self, rows: list[Row]) -> None:
        """The means of the last interval."""
        self.display.training(rows)
        self.run.record(rows)

    def episodes(self, rows: list[Row]) -> None:
        """Episodes of training that ended."""
        self.run.record(rows)
        self.display.ended(rows)

    # ------------------------------------------------------------------------------------------ evaluations

    def evaluation(self, state: RunState, snapshot: PolicySnapshot, evaluation: Evaluation) -> None:
        """The rows of an evaluation, and each seed's last policy; also its best one, if it is."""
        refuse_diverged(snapshot.actor, state.seeds)
        step, rows = state.evaluated, []
        for k, seed in enumerate(state.seeds):
            rows.append(self._evaluation_row(step, seed, k, evaluation))
            mean, given_up = float(evaluation.means[k]), np.flatnonzero(np.isnan(evaluation.returns[k]))
            names: list[Which] = ["last"]
            for episode in given_up:
                self.display.say(
                    f"step {step:,}: episode {episode} of the evaluation of seed {seed} has no return: its worker"
                    f" process died or hung {MOST_LOSSES} times. This evaluation cannot be the best."
                )
            if not len(given_up) and mean > state.best[k]:
                state.best[k] = mean
                names.append("best")
            policy = self._policy(state, k, snapshot, step, rows[-1])
            for which in names:
                self.run.save_policy(policy, which)
        if evaluation.replayed:
            self.display.say(
                f"step {step:,}: worker processes died or hung in the evaluation and were replaced;"
                f" {evaluation.replayed} episodes were restarted from their seeds."
            )
        self.run.record(rows)
        self.display.evaluated(step, evaluation)

    def _evaluation_row(self, step: int, seed: int, k: int, evaluation: Evaluation) -> Row:
        row = {"kind": "evaluation", "step": step, "seed": seed, "returns": _numbers(evaluation.returns[k])}
        row |= {"lengths": evaluation.lengths[k].tolist(), "mean": finite(float(evaluation.means[k]))}
        if evaluation.values is not None:
            row["q_predicted"] = finite(float(evaluation.values.predicted[k]) / self.config.reward_scale)
            row["discounted_return"] = finite(float(evaluation.values.discounted_returns[k]))
        return row

    def _policy(self, state: RunState, k: int, snapshot: PolicySnapshot, step: int, row: Row | None = None) -> Policy:
        """The k-th seed's actor in a snapshot, with its card; `row` is its evaluation."""
        envs, networks = state.collector.envs, snapshot.networks
        card = Card(
            env=envs.name,
            seed=state.seeds[k],
            step=step,
            returns=row["returns"] if row else [],
            lengths=row["lengths"] if row else [],
            layout=envs.layout,
            action_low=envs.actions.low.tolist(),
            action_high=envs.actions.high.tolist(),
            action_dtype=str(envs.actions.low.dtype),
            hidden=list(self.config.hidden),
            network=networks.name,
            stack=self.config.frame_stack if envs.frame_stack else 1,
            run=self.run.identity,
        )
        actor = {name: part[k : k + 1] for name, part in snapshot.actor.items()}
        every = snapshot.scaling
        scaling = None if every is None else Scaling(every.shift[k : k + 1], every.scale[k : k + 1])
        return Policy(actor, card, scaling, networks)

    # ------------------------------------------------------------------------------------------ failures

    def failed(self, failure: EnvError, state: RunState) -> T3DError:
        """Save the run after a failure that stops it; the error says what happened and how to go on."""
        self.run.record(failure.rows)
        try:
            self.save(state)
            self.checkpoints.wait()
            kept = "The run up to the failed step is saved."
        except T3DError as problem:  # it must not hide what happened
            kept = f"What came since the last checkpoint could not be saved: {problem}"
        report = self._report(failure, state, state.step)
        can_be_cut = failure.call == "step" and not state.collector.envs.together and not failure.in_evaluation
        how = {"on_env_error": "cut"} if can_be_cut else {}
        return T3DError(
            f"{failure} {report} {kept} To go on"
            f"{' without this episode' if how else ''}: {self.run.command('resume', **how)}"
        )

    def cut(self, failures: list[EnvError], state: RunState, step: int) -> None:
        """Report steps that failed after step `step`, whose episodes were cut; too many of them stop the run."""
        collector = state.collector
        for failure in failures:
            collector.env_errors += 1
            report = self._report(failure, state, step)
            self.display.say(f"{failure} {report} Its episode is cut. Errors so far: {collector.env_errors}.")
        if collector.env_errors > self.config.max_env_errors:
            self.save(state)
            self.checkpoints.wait()
            more = self.run.command("resume", max_env_errors=2 * collector.env_errors)
            raise T3DError(
                f"{collector.env_errors} steps of {collector.envs.name} failed, and --max-env-errors is"
                f" {self.config.max_env_errors}: the run is saved and stopped at step {state.step:,}. To go on: {more}"
            )

    def _report(self, failure: EnvError, state: RunState, step: int) -> str:
        """Write all that is known of a failure into a file of the run folder; a sentence with the most important."""
        place = failure.place
        if not place and failure.index is not None:
            k, i = divmod(failure.index, state.collector.obs.shape[1])
            place = f"environment {i} of seed {state.seeds[k]}"
        copy = "all" if failure.index is None else failure.index
        name = f"{'evaluation-' if failure.in_evaluation else ''}step-{step}-{copy}.txt"
        try:
            self.run.write("errors", name, _details(failure, place, step).encode(errors="replace"))
            written = f"The full report is {self.run.path / 'errors' / name}."
        except T3DError as problem:
            written = f"The full report could not be written: {problem}"
        last = "".join(
            f", the last {what} {shown(value.tolist())}"
            for what, value in (("action", failure.action), ("observation", failure.obs))
            if value is not None
        )
        where = f"It is {place}, after step {step:,} of the run{last}." if place else f"After step {step:,}."
        return f"{where} {written}"


def _details(failure: EnvError, place: str, step: int) -> str:
    """All that is known of a failure, line by line."""
    about = {
        "what": str(failure),
        "environment": place or "the vector environment",
        "global step": f"{step:,}",
        "episode": f"{failure.episode:,}",
        "step of the episode": f"{failure.length:,}",
        "last action": None if failure.action is None else np.array2string(failure.action, threshold=10_000),
        "last observation": None if failure.obs is None else np.array2string(failure.obs, threshold=10_000),
    }
    lines = [f"{name}: {value}" for name, value in about.items() if value is not None]
    return "\n".join(map(plain_lines, [*lines, "", failure.whole]))


def finite(number: float) -> float | None:
    """The number as JSON has it: null where it is not finite."""
    return number if np.isfinite(number) else None


def _numbers(returns: NDArray[np.float64]) -> list[float | None]:
    return [finite(value) for value in returns.tolist()]


def describe(setup: RunSetup) -> dict[str, Any]:
    """The content of config.json."""
    factory, config = setup.factory, asdict(setup.config)
    env = {"env": factory.name, "env_args": factory.args, "callable": factory.from_python}
    own = {"network": setup.network and setup.network.name, "algorithm": algorithm_name(setup.algorithm)}
    return {**env, "seeds": list(setup.seeds), "preset": setup.preset, **config, **own, "versions": versions()}


def about(config: Config) -> dict[str, Any]:
    """Versions and hardware that bit-exact results depend on; every checkpoint keeps them."""
    device = torch.cuda.get_device_name() if config.device == "cuda" else config.device
    return {"versions": versions(), "device": device, "threads": config.threads, "processor": platform.machine()}


def versions() -> dict[str, str]:
    """The versions that results depend on."""
    found = {"python": platform.python_version()}
    for package in ("t3d", "torch", "triton", "numpy", "gymnasium", "mujoco"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
