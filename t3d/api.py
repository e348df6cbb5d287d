"""The Python surface: `t3d.train` and `t3d.load`. The command line calls the same two."""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence, Sized
from contextlib import closing, contextmanager
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import Any, get_args

from gymnasium.vector import VectorEnv

from t3d import files, networks, states, training
from t3d.accelerate import CannotCompile, Verbs, accelerate, hardware
from t3d.beside import Beside, decide_eval_beside, evaluator_of
from t3d.config import PRESETS, Config, Preset, check_ranges, from_values, refuse_hardware, settle
from t3d.display import Display
from t3d.envs import Maker, Source, open_source
from t3d.errors import T3DError, nearest
from t3d.evaluation import Evaluator
from t3d.limits import short_of_cores, short_of_disk
from t3d.modules import Network, as_network, own_network
from t3d.policy import Policy, read_policy
from t3d.runs.checkpoints import Checkpoints
from t3d.runs.folder import NOT_KNOBS, Run, Which, claim, refuse_used
from t3d.runs.report import learning_curve

MOST_SEEDS = 10_000
MODES = {"eager": "eager", "compile": "compiled", "graph": "compiled and recorded"}


def train(
    env: str | Maker | VectorEnv[Any, Any, Any],
    steps: float | None = None,
    seeds: int | Sequence[int] = 1,
    out: str | Path | None = None,
    *,
    env_args: dict[str, Any] | None = None,
    eval_env: str | Maker | None = None,
    network: Any = None,
    preset: Preset = "td3",
    progress: bool = True,
    **config: Any,
) -> Run:
    """Train T3D and return the run.

    `env` is a Gymnasium id, anything that makes an environment when called, with `env_args` if given, or a
    Gymnasium VectorEnv, for which `eval_env` makes the environments of the evaluations; `seeds` a number of seeds
    (0, 1, …) or the seeds themselves; `out` the run folder; `network` a network of your own (`t3d.modules`);
    `config` any knob of `t3d train --help`.
    """
    if preset not in get_args(Preset):
        raise T3DError(f"there is no preset '{preset}'.{nearest(str(preset), get_args(Preset))}")
    if steps is not None:
        config["steps"] = steps
    if isinstance(env, VectorEnv):
        config.setdefault("num_envs", env.num_envs // max(len(as_seeds(seeds)), 1))
    knobs = from_values(config, PRESETS[preset], "train()")
    source = open_source(env, env_args, eval_env=eval_env)
    return start(source, as_seeds(seeds), knobs, preset, out, progress, as_network(network))


def as_seeds(seeds: int | Sequence[int]) -> list[int]:
    """5 means seeds 0 to 4; [3, 5] means seeds 3 and 5."""
    try:
        count, given = (len(seeds), seeds) if isinstance(seeds, Sized) else (index(seeds), None)
        if not 1 <= count <= MOST_SEEDS:
            raise T3DError(f"a run has between 1 and {MOST_SEEDS:,} seeds; this would be {count:,}.")
        listed = list(range(count)) if given is None else [index(seed) for seed in given]
    except TypeError as error:
        raise T3DError(f"seeds cannot be {seeds!r}: it is how many, or a list of whole numbers.") from error
    if len(set(listed)) < len(listed):
        raise T3DError(f"the same seed twice gives the same run twice; seeds are {listed}.")
    if not all(0 <= seed < 2**62 for seed in listed):
        raise T3DError(f"a seed is a whole number from 0 to 2^62 - 1; seeds are {listed}.")
    return listed


def start(
    source: Source,
    seeds: list[int],
    config: Config,
    preset: Preset,
    out: str | Path | None,
    progress: bool,
    network: Network | None = None,
) -> Run:
    """Check everything, then make the folder, then train: what is refused leaves nothing behind."""
    name = source.name
    if out is not None:
        refuse_used(Path(out))  # now, not after a minute of compiling
    config = settle(config, preset, name, len(seeds))
    if network is not None and config.critic_norm != "none":
        raise T3DError("--critic-norm is for the networks of the package; a network of your own can have its own.")
    if network is not None and config.precision == "bf16":
        raise T3DError("--precision bf16 would round the values of a network of your own; use fp32 or tf32.")
    display = Display(config.steps, seeds, config.random_steps, quiet=not progress)
    source = source.seen(config.pixels, config.frame_stack)
    with hardware(config.threads, config.precision):
        state = states.begin(source, seeds, config, network)
        config = decide_eval_beside(config, source, state.agent.actor, state.envs)
        with (
            closing(state),
            networks.using(state.network),
            closing(evaluator_of(source, state.seeds, config, state.network)) as evaluator,
        ):
            verbs, config = ready(state, config, display)
            run = Run(claim(out, name))
            with run.lock():
                run.begin(training.describe(source, preset, seeds, config, network))
                display.say(headline(state, preset, config, run))
                if warning := short_of_disk(run.path, states.disk_needed(state)):
                    display.say(warning)
                with closing(Checkpoints(run.path, training.about(config))) as checkpoints:
                    go_on(state, verbs, evaluator, config, run, display, checkpoints)
    return run


def resume(
    run: str | Path | Run,
    steps: float | None = None,
    *,
    env: Maker | None = None,
    network: Any = None,
    allow_modules: Sequence[str] = (),
    progress: bool = True,
) -> Run:
    """Go on with a run where its newest whole checkpoint was made, to `steps` if more are given.

    `env` makes the environments of a run whose environment was made by a function in Python; `network` is what it
    was trained with, if that was a network of your own.
    """
    run = Run.open(run)
    where = str(run.path / "config.json")
    with run.lock():
        config = from_values({k: v for k, v in run.config.items() if k not in NOT_KNOBS}, Config(), where)
        if steps is not None:
            config = longer(config, from_values({"steps": steps}, config, "resume()").steps, run)
        check_ranges(config)
        refuse_hardware(config)
        if run.config.get("callable") and env is None:
            raise T3DError(
                f"{run.path}: the environment {run.config['env']} was made by a function in Python, which no file can"
                " bring back; use t3d.resume(run, env=...) from Python."
            )
        own = own_network(run.config.get("network"), network, f"{run.path}")
        source = open_source(env or run.config["env"], run.config["env_args"], tuple(allow_modules))
        source = source.seen(config.pixels, config.frame_stack)
        display = Display(config.steps, run.seeds, config.random_steps, quiet=not progress)
        with hardware(config.threads, config.precision):
            state = states.begin(source, run.seeds, config, own)
            with (
                closing(state),
                networks.using(state.network),
                closing(evaluator_of(source, state.seeds, config, state.network)) as evaluator,
                closing(Checkpoints(run.path, training.about(config))) as checkpoints,
            ):
                take_up(state, config, run, display, checkpoints)
                if training.finished(state, config):
                    display.say(f"{run.path} is finished: all {config.steps:,} steps are done. --steps N adds to them.")
                    learning_curve(run)
                    return run
                verbs, ready_config = ready(state, config, display)
                if ready_config != config:
                    raise T3DError(f"{run.path} was compiled, and here nothing can be: it would not be the same run.")
                go_on(state, verbs, evaluator, config, run, display, checkpoints)
    return run


def longer(config: Config, steps: int, run: Run) -> Config:
    """The same run with more steps, and config.json with them."""
    if steps < config.steps:
        raise T3DError(f"{run.path} has {config.steps:,} steps; it can be made longer, not shorter.")
    if steps > config.steps:
        config = replace(config, steps=steps)
        files.write_json(run.path / "config.json", {**run.config, "steps": steps})
    return config


def take_up(state: states.State, config: Config, run: Run, display: Display, checkpoints: Checkpoints) -> None:
    """Bring a fresh state to where the newest whole checkpoint was made, and say what was found."""
    found, skipped = checkpoints.newest()
    for sentence in skipped:
        display.say(sentence)
    reached = max((row["step"] for row in run.metrics), default=0)
    if found is None and checkpoints.written():
        raise T3DError(f"no checkpoint of {run.path} is whole. " + " ".join(skipped))
    if found is None:
        display.say(f"{run.path} holds no checkpoint yet: it starts again from its config.json.")
        run.restart()
        return
    for name, now in training.about(config).items():
        if found.about.get(name) != now:
            display.say(f"{name} was {found.about.get(name)} and is {now}: the run goes on, but not bit for bit.")
    missed = states.restore(state, checkpoints.load(found, state.memory), found.folder, config)
    redone = f"; the metrics reach step {reached:,}, what is between is done again" if reached > state.step else ""
    display.say(f"{run.path}: the newest whole checkpoint is of step {state.step:,}{redone}.")
    if missed.any():
        display.say(
            f"{int(missed.sum())} of {missed.size} environments did not come back to where they were: their episodes"
            " are cut here, and the run goes on, but not bit for bit."
        )


def go_on(
    state: states.State,
    verbs: Verbs,
    evaluator: Evaluator | Beside,
    config: Config,
    run: Run,
    display: Display,
    checkpoints: Checkpoints,
) -> None:
    """Train to the end, or until a signal says to stop."""
    if warning := short_of_cores(config.threads):
        display.say(warning)
    display.begin_at(state.step, [row for row in run.evaluations if row["step"] <= state.evaluated])
    with stopping() as stop:
        try:
            with display:
                training.run(state, verbs, evaluator, config, run, display, checkpoints, stop)
        finally:
            if run.evaluations:
                learning_curve(run)
    if stop.signal is not None and not training.finished(state, config):
        display.say(f"Stopped and saved at step {state.step:,}. To go on: t3d resume {run.path}")
        if stop.signal == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + stop.signal)
    if state.envs.lost or state.envs.cut:
        display.say(
            f"{state.envs.lost} worker processes died or hung and were replaced;"
            f" {state.envs.cut} episodes were cut because a simulation broke down."
        )
    if not state.updates.any():
        display.say("No update was run: no episode ended. Give more --steps, or --update-after step.")


class Stop:
    """Whether a signal has asked to stop, and which."""

    signal: int | None = None

    def __call__(self) -> bool:
        return self.signal is not None

    def ask(self, number: int, _: Any) -> None:
        if self.signal is not None:
            os._exit(128 + number)  # asked twice: at once; the last checkpoint is whole
        self.signal = number


@contextmanager
def stopping() -> Iterator[Stop]:
    """Ctrl-C and SIGTERM ask to stop; the step is finished and everything saved."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ready(state: states.State, config: Config, display: Display) -> tuple[Verbs, Config]:
    """The verbs of the loop, and the config with the mode they are in: where nothing can be compiled, `eager`."""
    if config.accelerate != "eager":
        display.say("Compiling the update: about a minute the first time, a few seconds after that.")
        try:
            return accelerate(state.agent, state.memory, state.sums, config), config
        except CannotCompile as error:
            display.say(f"It cannot be compiled here ({error}). It runs uncompiled: slower, and otherwise the same.")
            config = replace(config, accelerate="eager")
    return accelerate(state.agent, state.memory, state.sums, config), config


def headline(state: states.State, preset: str, config: Config, run: Run) -> str:
    """The first lines: what is about to happen, with the numbers that were decided by rule."""
    name, seeds, memory = state.envs.name, state.seeds, states.peak_memory(state)
    network = f"networks {'-'.join(map(str, config.hidden))}"
    if own := getattr(state.network, "name", None):
        network = f"network {own}"
    elif sight := state.envs.sight:
        seen = f"{sight.stack} frame{'s' if sight.stack > 1 else ''} of {sight.height} x {sight.width}"
        network = f"convolutions over {seen}, then {network}"
    one = len(seeds) == 1
    many = f"seed {seeds[0]}" if one else f"{len(seeds)} seeds ({', '.join(map(str, seeds))})"
    where = f"{config.device}, {config.threads} thread{'s' if config.threads > 1 else ''}"
    where += f", {config.precision}, {MODES[config.accelerate]}"
    rate = f"{config.updates_per_step:g} update{'' if config.updates_per_step == 1 else 's'} per step"
    when = f"{rate}, after each episode" if config.update_after == "episode" else f"then {rate}"
    beside = ", evaluations beside training" if config.eval_beside == "on" else ""
    return (
        f"T3D on {name}: {many}, {config.steps:,} steps{'' if one else ' each'}, on {where}\n"
        f"preset {preset}: the first {config.random_steps:,} actions random, {when},"
        f" batch {config.batch_size}, {network}{beside}\n"
        f"memory: {memory / 2**30:.2f} GiB when the replay is full\n"
        f"run folder: {run.path}"
    )


def load(run: str | Path | Run, seed: int | None = None, which: Which = "best", network: Any = None) -> Policy:
    """A trained policy from a run folder (by default the best one of the best seed) or from a policy file.

    `network` is what it was trained with, if that was a network of your own.
    """
    if not isinstance(run, Run) and Path(run).suffix == ".safetensors":
        return read_policy(Path(run), as_network(network))
    return Run.open(run).policy(seed, which, as_network(network))
