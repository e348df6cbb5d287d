"""The Python surface: `t3d.train` and `t3d.load`. The command line calls the same two."""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import closing, contextmanager
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import Any, Literal, get_args

from gymnasium import Env
from gymnasium.vector import VectorEnv

from t3d import files, networks, run_state, trainer
from t3d.agent import Diverged
from t3d.config import (
    PRESETS,
    Config,
    Preset,
    check_ranges,
    from_values,
    refuse_hardware,
    refuse_more_than_one,
    refuse_too_many,
    resolve,
)
from t3d.custom_network import Network, as_network, own_network
from t3d.display import Display
from t3d.envs import EnvFactory, Maker, env_factory, refuse_paths
from t3d.envs.factory import differs
from t3d.errors import T3DError, command, nearest, shown
from t3d.evaluate.async_evaluator import AsyncEvaluator, make_evaluator, resolve_async_eval
from t3d.evaluate.evaluator import Evaluator, NoEvaluator
from t3d.learners import CannotCompile, Learner, accelerate, hardware
from t3d.limits import short_of_cores, short_of_disk
from t3d.policy import Policy, read_policy
from t3d.runs.checkpoints import Checkpoints
from t3d.runs.folder import LARGEST_SEED, MOST_SEEDS, NOT_SETTINGS, Run, Which, claim, refuse_used
from t3d.runs.manifest import newest_shapes
from t3d.runs.report import learning_curve

MODES = {"eager": "eager", "compile": "compiled", "graph": "compiled and recorded"}


def train(
    env: "str | Maker | Env[Any, Any] | VectorEnv[Any, Any, Any]",
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
    Gymnasium VectorEnv, for which `eval_env` makes the environments of the evaluations. It may be an environment
    itself, which counts as a real one (`real_env`): it is not copied. `seeds` is a number of seeds (0, 1, …) or the
    seeds themselves; `out` the run folder; `network` a network of your own (`t3d.custom_network`); `config` any option
    of `t3d train --help`.
    """
    if preset not in get_args(Preset):
        raise T3DError(f"there is no preset '{preset}'.{nearest(str(preset), get_args(Preset))}")
    if steps is not None:
        config["steps"] = steps
    factory = env_factory(env, env_args, eval_env=eval_env)
    if isinstance(env, VectorEnv):
        config.setdefault("num_envs", env.num_envs // max(len(as_seeds(seeds)), 1))
    settings = from_values(config, PRESETS[preset], "train()")
    return start(factory, as_seeds(seeds), settings, preset, out, progress, as_network(network))


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
    if not all(0 <= seed <= LARGEST_SEED for seed in listed):
        raise T3DError(f"a seed is a whole number from 0 to 2^62 - 1; seeds are {listed}.")
    return listed


def start(
    factory: EnvFactory,
    seeds: list[int],
    config: Config,
    preset: Preset,
    out: str | Path | None,
    progress: bool,
    network: Network | None = None,
) -> Run:
    """Check everything, then make the folder, then train: what is refused leaves nothing behind."""
    if out is not None:
        refuse_used(Path(out))  # now, not after a minute of compiling
    factory = factory.seen(config.pixels, config.frame_stack)
    if config.real_env or factory.real:
        refuse_more_than_one(config, len(seeds))  # before it is made
    with closing(factory):
        factory = factory.as_real(config.real_env)
        config = resolve(replace(config, real_env=factory.real), preset, factory.name, len(seeds))
        return _start(factory, seeds, config, preset, out, progress, network)


def _start(
    factory: EnvFactory,
    seeds: list[int],
    config: Config,
    preset: Preset,
    out: str | Path | None,
    progress: bool,
    network: Network | None,
) -> Run:
    if network is not None and config.critic_norm != "none":
        raise T3DError("--critic-norm is for the networks of the package; a network of your own can have its own.")
    if network is not None and config.precision == "bf16":
        raise T3DError("--precision bf16 would round the values of a network of your own; use fp32 or tf32.")
    display = Display(config.steps, seeds, config.random_steps, quiet=not progress, evaluated=bool(config.eval_every))
    with hardware(config.threads, config.precision):
        state = run_state.begin(factory, seeds, config, network)
        config = resolve_async_eval(config, factory, state.agent.actor, state.envs)
        with (
            closing(state),
            networks.using(state.network),
            closing(make_evaluator(factory, state.seeds, config, state.network)) as evaluator,
        ):
            refuse_other_spaces(state, evaluator)
            learner, config = ready(state, config, display)
            run = Run(claim(out, factory.name))
            with run.lock(), closing(run.log):
                run.begin(trainer.describe(factory, preset, seeds, config, network))
                for line in headline(state, preset, config, run):
                    display.say(line)
                for sentence in files.promises_off():
                    display.say(sentence)
                if warning := short_of_disk(run.path, run_state.disk_needed(state)):
                    display.say(warning)
                with closing(Checkpoints(run, trainer.about(config), display.say)) as checkpoints:
                    go_on(state, learner, evaluator, config, run, display, checkpoints)
    return run


def resume(
    run: str | Path | Run,
    steps: float | None = None,
    *,
    env: "Maker | Env[Any, Any] | VectorEnv[Any, Any, Any] | None" = None,
    eval_env: str | Maker | None = None,
    network: Any = None,
    on_env_error: Literal["stop", "cut"] | None = None,
    max_env_errors: int | None = None,
    allow_modules: Sequence[str] = (),
    allow_env_args: bool = False,
    progress: bool = True,
) -> Run:
    """Go on with a run where its newest whole checkpoint was made, to `steps` if more are given.

    `env` makes the environments of a run whose environment was made by a function in Python, or is it itself where it
    is real, or the vector environment, and `eval_env` as for `train`; `network` is what it was trained with, if that
    was a network of your own. `on_env_error` and
    `max_env_errors` take the place of what the run had. What the run's file asks to import (`allow_modules`), and the
    paths and modules that it would hand to the environment (`allow_env_args`), must be allowed by name.
    """
    run = Run.open(run)
    where = str(run.path / "config.json")
    with run.lock(), closing(run.log):
        config = from_values({k: v for k, v in run.config.items() if k not in NOT_SETTINGS}, Config(), where)
        given = {"steps": steps, "on_env_error": on_env_error, "max_env_errors": max_env_errors}
        changed = from_values({k: v for k, v in given.items() if v is not None}, config, "resume()")
        check_ranges(config)
        check_ranges(changed)
        if changed.steps < config.steps:
            raise T3DError(f"{run.path} has {config.steps:,} steps; it can be made longer, not shorter.")
        config = changed
        refuse_hardware(config)
        refuse_too_many(config, len(run.seeds))
        quiet = not progress
        display = Display(config.steps, run.seeds, config.random_steps, quiet=quiet, evaluated=bool(config.eval_every))
        refuse_other_sizes(run, config, display.say)
        if run.config.get("callable") and env is None:
            raise T3DError(
                f"{run.path}: the environment {run.config['env']} was made by a function in Python, which no file can"
                " bring back; use t3d.resume(run, env=...) from Python."
            )
        own = own_network(run.config.get("network"), network, f"{run.path}")
        if not allow_env_args:
            refuse_paths(run.config["env_args"], where)
        given_env = run.config["env"] if env is None else env
        factory = env_factory(given_env, run.config["env_args"], tuple(allow_modules), eval_env)
        if factory.real and not config.real_env:
            raise T3DError(f"{run.path} was not begun on a real environment; give resume() a function that makes one.")
        factory = factory.seen(config.pixels, config.frame_stack)
        with closing(factory), hardware(config.threads, config.precision):
            factory = factory.as_real(config.real_env)
            if factory.real and not config.real_env:
                raise T3DError(f"{run.path} was not begun on a real environment, and this one says that it is real.")
            state = run_state.make(factory, run.seeds, config, own)
            with (
                closing(state),
                networks.using(state.network),
                closing(make_evaluator(factory, state.seeds, config, state.network)) as evaluator,
                closing(Checkpoints(run, trainer.about(config), display.say)) as checkpoints,
            ):
                refuse_other_spaces(state, evaluator)
                take_up(state, config, run, display, checkpoints)
                run.update_config({name: getattr(config, name) for name in given})
                if trainer.finished(state, config):
                    display.say(f"{run.path} is finished: all {config.steps:,} steps are done. --steps N adds to them.")
                    draw(run, display.say)
                    return run
                learner, ready_config = ready(state, config, display)
                if ready_config != config:
                    raise T3DError(f"{run.path} was compiled, and here nothing can be: it would not be the same run.")
                go_on(state, learner, evaluator, config, run, display, checkpoints)
    return run


def refuse_other_spaces(state: run_state.State, evaluator: Evaluator | AsyncEvaluator | NoEvaluator) -> None:
    """Refuse to evaluate in environments that are not those of training."""
    if isinstance(evaluator, Evaluator):
        ours, theirs = ((envs.layout, envs.actions) for envs in (state.envs, evaluator.envs))
        if differs(ours, theirs):
            raise T3DError(
                f"evaluations in {evaluator.envs.name} would have other observations or actions than training in"
                f" {state.envs.name}."
            )


def nothing_whole(run: Run) -> T3DError:
    return T3DError(
        f"no checkpoint of {run.path} is whole: there is nothing to go on from. Its policies can still be used:"
        f" {run.command('evaluate')}"
    )


def refuse_other_sizes(run: Run, config: Config, say: Callable[[str], None]) -> None:
    """Refuse settings that do not fit the newest checkpoint before anything of their size is made."""
    with run.folder() as folder:
        shapes, passed = newest_shapes(folder, len(run.seeds), run.identity)
    if shapes is None and passed:
        for sentence in passed:
            say(sentence)
        raise nothing_whole(run)
    shapes = shapes or {}
    asked: dict[str, Any] = {"num_envs": config.num_envs, "critics": config.critics, "seeds": len(run.seeds)}
    found: dict[str, Any] = dict(zip(("seeds", "num_envs"), shapes.get("episode_length", ()), strict=False))
    layers = [shapes[f"agent.actor.w{i}"][-1] for i in range(1, 99) if shapes.get(f"agent.actor.w{i}")]
    if layers:
        asked |= {"hidden": list(config.hidden)}
        found |= {"hidden": layers[:-1]}
    for name, value in found.items():
        if value != asked[name]:
            raise T3DError(
                f"{run.path}: config.json has {name} {asked[name]}, and the newest checkpoint {shown(value)}."
            )


def take_up(state: run_state.State, config: Config, run: Run, display: Display, checkpoints: Checkpoints) -> None:
    """Bring a fresh state to where the newest whole checkpoint was made, and say what was found."""
    found = checkpoints.newest(state.memory, run_state.most_state(state))
    if found is None and checkpoints.written():
        raise nothing_whole(run)
    if found is None:
        display.say(f"{run.path} holds no checkpoint yet: it starts again from its config.json.")
        checkpoints.discard_unfinished()
        run.log.begin()
        run_state.first_reset(state)
        return
    behind, problem = run.log.after(found.metrics)
    if problem:
        display.say(f"{problem} It is behind the newest checkpoint, so the run makes it again.")
    reached = max((row["step"] for row in behind), default=0)
    for name, now in trainer.about(config).items():
        if found.about.get(name) != now:
            before = shown(found.about.get(name))
            display.say(f"{name} was {before} and is {now!r}: the run goes on, but not bit for bit.")
    folder = run.path / "checkpoints" / f"step-{found.step}"
    missed = run_state.restore(state, checkpoints.load(found, state.memory), folder, config, display.say)
    redone = f"; the metrics reach step {reached:,}, what is between is done again" if reached > state.step else ""
    display.say(f"{run.path}: the newest whole checkpoint is of step {state.step:,}{redone}.")
    if config.real_env:
        display.say(
            "The environment is real, so nothing is replayed: the episode under way is cut here, and the run goes on,"
            " but not bit for bit."
        )
    elif missed.any():
        display.say(
            f"{int(missed.sum())} of {missed.size} environments did not come back to where they were: their episodes"
            " are cut here, and the run goes on, but not bit for bit."
        )


def go_on(
    state: run_state.State,
    learner: Learner,
    evaluator: Evaluator | AsyncEvaluator | NoEvaluator,
    config: Config,
    run: Run,
    display: Display,
    checkpoints: Checkpoints,
) -> None:
    """Train to the end, or until a signal says to stop."""
    run.log.say = display.say
    if warning := short_of_cores(config.threads):
        display.say(warning)
    display.begin_at(state.step, [row for row in run.evaluations if row["step"] <= state.evaluated])
    with stopping() as stop:
        try:
            with display:
                trainer.run(state, learner, evaluator, config, run, display, checkpoints, stop)
        except Diverged as problem:
            raise diverged(problem, state, config, run, checkpoints) from problem
        finally:
            draw(run, display.say)
    if stop.signal is not None and not trainer.finished(state, config):
        display.say(f"Stopped and saved at step {state.step:,}. To go on: {run.command('resume')}")
        if stop.signal == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + stop.signal)
    if state.envs.lost or state.envs.cut:
        display.say(
            f"{state.envs.lost} worker processes died or hung and were replaced;"
            f" {state.envs.cut} episodes were cut because a simulation broke down."
        )
    if state.env_errors:
        display.say(
            f"{state.env_errors} steps of environments failed, and their episodes were cut: {run.path / 'errors'}"
        )
    if not state.updates.any():
        display.say("No update was run: no episode ended. Give more --steps, or --train-freq step.")


def diverged(problem: Diverged, state: run_state.State, config: Config, run: Run, checkpoints: Checkpoints) -> T3DError:
    """What is left of such a run, and how to begin another one."""
    newest = max(checkpoints.written(), default=0)
    how = f"t3d.train(…, critic_lr={config.critic_lr / 10:g}, actor_lr={config.actor_lr / 10:g})"
    if not (run.config.get("callable") or run.config.get("network")):
        rates = ("--critic-lr", f"{config.critic_lr / 10:g}", "--actor-lr", f"{config.actor_lr / 10:g}")
        how = command("train", "--config", run.path / "config.json", *rates)
    return T3DError(
        f"{problem} The run stopped at step {state.step:,}. Its newest checkpoint, of step {newest:,}, and its policies"
        f" are from before; resumed, it would do the same again. To begin another one: {how}"
    )


def draw(run: Run, say: Callable[[str], None]) -> None:
    """The learning curve; where it cannot be drawn, that is said and nothing is lost."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of numbers that an axis hardly has
            learning_curve(run)
    except (T3DError, ValueError, OverflowError, RuntimeError) as problem:  # numbers that no axis has
        say(f"The learning curve was not drawn: {problem}")


class Stop:
    """Whether a signal has asked to stop, and which."""

    signal: int | None = None

    def __call__(self) -> bool:
        return self.signal is not None

    def submit(self, number: int, _: Any) -> None:
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
    before = {number: signal.signal(number, stop.submit) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ready(state: run_state.State, config: Config, display: Display) -> tuple[Learner, Config]:
    """The verbs of the loop, and the config with the mode they are in: where nothing can be compiled, `eager`."""
    if config.accelerate != "eager":
        display.say("Compiling the update: about a minute the first time, a few seconds after that.")
        try:
            return accelerate(state.agent, state.memory, state.sums, config), config
        except CannotCompile as error:
            display.say(f"It cannot be compiled here ({error}). It runs uncompiled: slower, and otherwise the same.")
            config = replace(config, accelerate="eager")
    return accelerate(state.agent, state.memory, state.sums, config), config


def headline(state: run_state.State, preset: str, config: Config, run: Run) -> list[str]:
    """The first lines: what is about to happen, with the numbers that were decided by rule."""
    name, seeds, memory = state.envs.name, state.seeds, run_state.peak_memory(state)
    network = f"networks {'-'.join(map(str, config.hidden))}"
    if own := getattr(state.network, "name", None):
        network = f"network {own}"
    elif frame_stack := state.envs.frame_stack:
        plural = "s" if frame_stack.stack > 1 else ""
        seen = f"{frame_stack.stack} frame{plural} of {frame_stack.height} x {frame_stack.width}"
        network = f"convolutions over {seen}, then {network}"
    one = len(seeds) == 1
    many = f"seed {seeds[0]}" if one else f"{len(seeds)} seeds ({', '.join(map(str, seeds))})"
    where = f"{config.device}, {config.threads} thread{'s' if config.threads > 1 else ''}"
    where += f", {config.precision}, {MODES[config.accelerate]}"
    rate = f"{config.updates_per_step:g} update{'' if config.updates_per_step == 1 else 's'} per step"
    when = f"{rate}, after each episode" if config.train_freq == "episode" else f"then {rate}"
    beside = ", evaluations beside training" if config.async_eval == "on" else ""
    real = ", a real environment" if config.real_env else ""
    return [
        f"T3D on {name}{real}: {many}, {config.steps:,} steps{'' if one else ' each'}, on {where}",
        f"preset {preset}: the first {config.random_steps:,} actions random, {when},"
        f" batch {config.batch_size}, {network}{beside}",
        f"memory: {memory / 2**30:.2f} GiB when the replay is full",
        f"run folder: {run.path}",
    ]


def load(run: str | Path | Run, seed: int | None = None, which: Which = "best", network: Any = None) -> Policy:
    """A trained policy from a run folder (by default the best one of the best seed) or from a policy file.

    `network` is what it was trained with, if that was a network of your own.
    """
    if not isinstance(run, Run) and Path(run).suffix == ".safetensors":
        return read_policy(Path(run), as_network(network))
    return Run.open(run).policy(seed, which, as_network(network))
