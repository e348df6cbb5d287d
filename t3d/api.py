"""The Python surface: `t3d.train`, `t3d.resume` and `t3d.load`. The command line calls the same functions."""

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

from t3d import files
from t3d.agent import Diverged
from t3d.algorithm import as_algorithm, saved_algorithm
from t3d.config import (
    PRESETS,
    Config,
    Preset,
    check_ranges,
    from_values,
    refuse_more_than_one,
    refuse_open,
    refuse_unusable,
    resolve,
)
from t3d.custom_network import as_network, own_network
from t3d.display import Display
from t3d.envs import EnvFactory, Maker, env_factory, refuse_paths
from t3d.errors import T3DError, command, nearest, shown
from t3d.limits import short_of_cores, short_of_disk
from t3d.policy import Policy, read_policy
from t3d.run_state import RunSetup, RunState, disk_needed, peak_memory
from t3d.runs.folder import LARGEST_SEED, MOST_SEEDS, NOT_SETTINGS, Run, Which, refuse_used
from t3d.runs.manifest import newest_shapes
from t3d.runs.report import learning_curve
from t3d.trainer import Stop, Trainer

MODES = {"eager": "eager", "compile": "compiled", "graph": "compiled, captured as CUDA graphs"}


def train(
    env: "str | Maker | Env[Any, Any] | VectorEnv[Any, Any, Any]",
    steps: float | None = None,
    seeds: int | Sequence[int] = 1,
    out: str | Path | None = None,
    *,
    env_args: dict[str, Any] | None = None,
    eval_env: str | Maker | None = None,
    network: Any = None,
    algorithm: Any = None,
    preset: Preset = "td3",
    progress: bool = True,
    **config: Any,
) -> Run:
    """Train T3D and return the run.

    `env` is a Gymnasium id, anything that makes an environment when called, with `env_args` if given, or a
    Gymnasium VectorEnv, for which `eval_env` makes the environments of the evaluations. An environment object counts as
    a real one (`real_env`): it is not copied. `seeds` is a number of seeds (0, 1, …) or the seeds themselves; `out` the
    run folder; `network` a network of your own (`t3d.custom_network`); `algorithm` a module with the functions of
    `t3d.steps`; `config` any option of `t3d train --help`.
    """
    if preset not in get_args(Preset):
        raise T3DError(f"there is no preset '{preset}'.{nearest(str(preset), get_args(Preset))}")
    if steps is not None:
        config["steps"] = steps
    factory, numbers = env_factory(env, env_args, eval_env=eval_env), as_seeds(seeds)
    if isinstance(env, VectorEnv):
        config.setdefault("num_envs", env.num_envs // max(len(numbers), 1))
    settings = from_values(config, PRESETS[preset], "train()")
    return start(
        RunSetup(factory, numbers, settings, preset, as_network(network), as_algorithm(algorithm)), out, progress
    )


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


def start(setup: RunSetup, out: str | Path | None = None, progress: bool = True) -> Run:
    """Train what is set up, in a new run folder."""
    if out is not None:
        refuse_used(Path(out))  # now, not after a minute of compiling
    here = Path.cwd()  # an environment may change the working directory
    config, count = setup.config, len(setup.seeds)
    factory = setup.factory.seen(config.pixels, config.frame_stack)
    if config.real_env or factory.real:
        refuse_more_than_one(config, count)  # before it is made
    with closing(factory):
        factory = factory.as_real(config.real_env)
        config = resolve(replace(config, real_env=factory.real), setup.preset, factory.name, count)
        refuse_misfits(setup, config)
        display = make_display(config, setup.seeds, progress)
        with Trainer.create(replace(setup, factory=factory, config=config), out, display, here) as trainer:
            for line in headline(trainer, setup.preset):
                display.say(line)
            for sentence in files.promises_off():
                display.say(sentence)
            if warning := short_of_disk(here / trainer.recorder.run.path, disk_needed(trainer.state)):
                display.say(warning)
            drive(trainer)
            return trainer.recorder.run


def refuse_misfits(setup: RunSetup, config: Config) -> None:
    """Refuse options that have no meaning with a user's own network."""
    if setup.network is not None and config.critic_norm != "none":
        raise T3DError("--critic-norm is for the networks of the package; a network of your own can have its own.")
    if setup.network is not None and config.precision == "bf16":
        raise T3DError("--precision bf16 would round the values of a network of your own; use fp32 or tf32.")


def make_display(config: Config, seeds: Sequence[int], progress: bool) -> Display:
    evaluated = bool(config.eval_every)
    return Display(config.steps, seeds, config.random_steps, quiet=not progress, evaluated=evaluated)


def resume(
    run: str | Path | Run,
    steps: float | None = None,
    *,
    env: "Maker | Env[Any, Any] | VectorEnv[Any, Any, Any] | None" = None,
    eval_env: str | Maker | None = None,
    network: Any = None,
    algorithm: Any = None,
    on_env_error: Literal["stop", "cut"] | None = None,
    max_env_errors: int | None = None,
    allow_modules: Sequence[str] = (),
    allow_env_args: bool = False,
    progress: bool = True,
) -> Run:
    """Continue a run from its newest whole checkpoint, to `steps` if more are given.

    `env` makes the environments of a run whose environment was made by a function in Python, or is the real environment
    or the vector environment itself; `eval_env`, `network` and `algorithm` are as for `train`. `on_env_error` and
    `max_env_errors` replace the run's own. What the run's file asks to import (`allow_modules`), and the paths and
    modules that it would hand to the environment (`allow_env_args`), must be allowed by name.
    """
    run = Run.open(run)
    with run.lock(), closing(run.log):
        given = {"steps": steps, "on_env_error": on_env_error, "max_env_errors": max_env_errors}
        config = changed_config(run, given)
        display = make_display(config, run.seeds, progress)
        refuse_other_sizes(run, config, display.say)
        own = own_network(run.config.get("network"), network, f"{run.path}")
        module = saved_algorithm(run.config.get("algorithm"), algorithm, f"{run.path}")
        factory = saved_factory(run, env, eval_env, tuple(allow_modules), allow_env_args)
        if factory.real and not config.real_env:
            raise T3DError(f"{run.path} was not begun on a real environment; give resume() a function that makes one.")
        factory = factory.seen(config.pixels, config.frame_stack)
        with closing(factory):
            factory = factory.as_real(config.real_env)
            if factory.real and not config.real_env:
                raise T3DError(f"{run.path} was not begun on a real environment, and this one says that it is real.")
            continue_run(RunSetup(factory, run.seeds, config, run.config["preset"], own, module), run, display)
    return run


def continue_run(setup: RunSetup, run: Run, display: Display) -> None:
    """Train the rest of a run; a finished one is only reported."""
    with Trainer.resume(setup, run, display) as trainer:
        if trainer.finished:
            steps = setup.config.steps
            display.say(f"{run.path} is finished: all {steps:,} steps are done. More --steps than that continue it.")
            draw(run, display.say)
        else:
            drive(trainer)


def saved_factory(
    run: Run,
    env: Any,
    eval_env: str | Maker | None,
    allowed_modules: tuple[str, ...],
    allow_env_args: bool,
) -> EnvFactory:
    """The environments of a run: those that config.json names, or `env`, which only Python can give."""
    config = run.config
    if config.get("callable") and env is None:
        raise T3DError(
            f"{run.path}: the environment {config['env']} was made by a function in Python, which no file can bring"
            " back; use t3d.resume(run, env=...) from Python."
        )
    if not allow_env_args:
        refuse_paths(config["env_args"], str(run.path / "config.json"))
    return env_factory(config["env"] if env is None else env, config["env_args"], allowed_modules, eval_env)


def changed_config(run: Run, given: dict[str, Any]) -> Config:
    """The options of a run, some of them changed by `resume`."""
    where = str(run.path / "config.json")
    config = from_values({k: v for k, v in run.config.items() if k not in NOT_SETTINGS}, Config(), where)
    changed = from_values({k: v for k, v in given.items() if v is not None}, config, "resume()")
    check_ranges(config)
    refuse_open(config, where)
    if changed.steps < config.steps:
        raise T3DError(f"{run.path} has {config.steps:,} steps; it can be made longer, not shorter.")
    refuse_unusable(changed, len(run.seeds))
    return changed


def refuse_other_sizes(run: Run, config: Config, say: Callable[[str], None]) -> None:
    """Refuse settings that do not fit the newest checkpoint before anything of their size is made."""
    with run.folder() as folder:
        shapes, passed = newest_shapes(folder, len(run.seeds), run.identity)
    if shapes is None and passed:
        for sentence in passed:
            say(sentence)
        raise run.nothing_whole()
    if shapes is None:
        run.refuse_lost_checkpoints()
    shapes = shapes or {}
    asked: dict[str, Any] = {"num_envs": config.num_envs, "critics": config.critics, "seeds": len(run.seeds)}
    found: dict[str, Any] = dict(zip(("seeds", "num_envs"), shapes.get("collector.episode_length", ()), strict=False))
    layers = [shapes[name][-1] for i in range(1, 99) if shapes.get(name := f"learner.agent.actor.w{i}")]
    if layers:
        asked |= {"hidden": list(config.hidden)}
        found |= {"hidden": layers[:-1]}
    for name, value in found.items():
        if value != asked[name]:
            raise T3DError(
                f"{run.path}: config.json has {name} {asked[name]}, and the newest checkpoint {shown(value)}."
            )


def drive(trainer: Trainer) -> None:
    """Train to the end, or until a signal says to stop, and report how it ended."""
    state, config, run = trainer.state, trainer.config, trainer.recorder.run
    display, envs = trainer.recorder.display, state.collector.envs
    run.log.say = display.say
    if warning := short_of_cores(config.threads):
        display.say(warning)
    display.begin_at(state.step, [row for row in run.evaluations if row["step"] <= state.evaluated])
    with stopping() as stop:
        try:
            with display:
                trainer.run(stop)
        except Diverged as problem:
            raise diverged(problem, trainer) from problem
        finally:
            draw(run, display.say)
    if stop.signal is not None and not trainer.finished:
        display.say(f"Stopped and saved at step {state.step:,}. To continue: {run.command('resume')}")
        if stop.signal == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + stop.signal)
    if envs.lost or envs.cut:
        display.say(
            f"{envs.lost} worker processes died or hung and were replaced;"
            f" {envs.cut} episodes were cut because a simulation broke down."
        )
    if errors := state.collector.env_errors:
        display.say(f"{errors} steps of environments failed, and their episodes were cut: {run.path / 'errors'}")
    if not state.updates.any():
        display.say("No update was run: no episode ended. Give more --steps, or --train-freq step.")


def diverged(problem: Diverged, trainer: Trainer) -> T3DError:
    """What is left of a run whose networks diverged, and how to begin another one."""
    run, config = trainer.recorder.run, trainer.config
    newest = max(trainer.recorder.checkpoints.written(), default=0)
    how = f"t3d.train(…, critic_lr={config.critic_lr / 10:g}, actor_lr={config.actor_lr / 10:g})"
    if not any(run.config.get(name) for name in ("callable", "network", "algorithm")):
        rates = ("--critic-lr", f"{config.critic_lr / 10:g}", "--actor-lr", f"{config.actor_lr / 10:g}")
        how = command("train", "--config", run.path / "config.json", *rates)
    return T3DError(
        f"{problem} The run stopped at step {trainer.state.step:,}. Its newest checkpoint, of step {newest:,}, and its"
        f" policies are from before; resumed, it would do the same again. To begin another one: {how}"
    )


def draw(run: Run, say: Callable[[str], None]) -> None:
    """The learning curve; if it cannot be drawn, one line reports why and nothing is lost."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of numbers that an axis hardly has
            learning_curve(run)
    except (T3DError, ValueError, OverflowError, RuntimeError) as problem:  # numbers that no axis has
        say(f"The learning curve was not drawn: {problem}")


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


def headline(trainer: Trainer, preset: str) -> list[str]:
    """The first lines: what is about to happen, with the values that were chosen automatically."""
    state, config = trainer.state, trainer.config
    name, seeds = state.collector.envs.name, state.seeds
    one = len(seeds) == 1
    many = f"seed {seeds[0]}" if one else f"{len(seeds)} seeds ({', '.join(map(str, seeds))})"
    where = f"{config.device}, {config.threads} thread{'s' if config.threads > 1 else ''}"
    where += f", {config.precision}, {MODES[config.accelerate]}"
    rate = f"{config.updates_per_step:g} update{'' if config.updates_per_step == 1 else 's'} per step"
    when = f"{rate}, after each episode" if config.train_freq == "episode" else f"then {rate}"
    asynchronous = ", asynchronous evaluation" if config.async_eval == "on" else ""
    real = ", a real environment" if config.real_env else ""
    return [
        f"T3D on {name}{real}: {many}, {config.steps:,} steps{'' if one else ' each'}, on {where}",
        f"preset {preset}: the first {config.random_steps:,} actions random, {when},"
        f" batch {config.batch_size}, {_architecture(state, config)}{asynchronous}",
        f"memory: {peak_memory(state) / 2**30:.2f} GiB when the replay buffer is full",
        f"run folder: {trainer.recorder.run.path}",
    ]


def _architecture(state: RunState, config: Config) -> str:
    """The networks in a few words."""
    if own := state.learner.agent.networks.name:
        return f"network {own}"
    layers = f"networks {'-'.join(map(str, config.hidden))}"
    if frame_stack := state.collector.envs.frame_stack:
        frames = f"{frame_stack.stack} frame{'s' if frame_stack.stack > 1 else ''}"
        return f"convolutions over {frames} of {frame_stack.height} x {frame_stack.width}, then {layers}"
    return layers


def load(
    run: str | Path | Run, seed: int | None = None, which: Which = "best", network: Any = None, algorithm: Any = None
) -> Policy:
    """A trained policy from a run folder (by default the best one of the best seed) or from a policy file.

    `network` is what it was trained with, if that was a network of your own. Acting needs no `algorithm`; one that is
    given is checked.
    """
    as_algorithm(algorithm)
    if not isinstance(run, Run) and Path(run).suffix == ".safetensors":
        return read_policy(Path(run), as_network(network))
    return Run.open(run).policy(seed, which, as_network(network))
