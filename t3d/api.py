"""The Python surface: `t3d.train` and `t3d.load`. The command line calls the same two."""

from collections.abc import Sequence, Sized
from contextlib import closing
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import Any, get_args

from gymnasium.vector import VectorEnv

from t3d import training
from t3d.accelerate import CannotCompile, Verbs, accelerate, hardware
from t3d.config import PRESETS, Config, Preset, from_values, settle
from t3d.display import Display
from t3d.envs import Maker, Source, open_source
from t3d.errors import T3DError, nearest
from t3d.evaluation import Evaluator
from t3d.policy import Policy, read_policy
from t3d.runs.folder import Run, Which, claim, refuse_used
from t3d.runs.report import learning_curve

MOST_SEEDS = 10_000


def train(
    env: str | Maker | VectorEnv[Any, Any, Any],
    steps: float | None = None,
    seeds: int | Sequence[int] = 1,
    out: str | Path | None = None,
    *,
    env_args: dict[str, Any] | None = None,
    eval_env: str | Maker | None = None,
    preset: Preset = "td3",
    progress: bool = True,
    **config: Any,
) -> Run:
    """Train T3D and return the run.

    `env` is a Gymnasium id, anything that makes an environment when called, with `env_args` if given, or a
    Gymnasium VectorEnv, for which `eval_env` makes the environments of the evaluations; `seeds` a number of seeds
    (0, 1, …) or the seeds themselves; `out` the run folder; `config` any knob of `t3d train --help`.
    """
    if preset not in get_args(Preset):
        raise T3DError(f"there is no preset '{preset}'.{nearest(str(preset), get_args(Preset))}")
    if steps is not None:
        config["steps"] = steps
    if isinstance(env, VectorEnv):
        config.setdefault("num_envs", env.num_envs // max(len(as_seeds(seeds)), 1))
    knobs = from_values(config, PRESETS[preset], "train()")
    return start(open_source(env, env_args, eval_env=eval_env), as_seeds(seeds), knobs, preset, out, progress)


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
    source: Source, seeds: list[int], config: Config, preset: Preset, out: str | Path | None, progress: bool
) -> Run:
    """Check everything, then make the folder, then train: what is refused leaves nothing behind."""
    name = source.name
    if out is not None and Path(out).exists():
        refuse_used(Path(out))  # now, not after a minute of compiling
    config = settle(config, preset, name, len(seeds))
    with hardware(config.threads, config.precision):
        state = training.begin(source, seeds, config)
        with closing(state.envs), closing(Evaluator(source, seeds, config.eval_episodes)) as evaluator:
            display = Display(config.steps, seeds, quiet=not progress)
            verbs, config = ready(state, config, display)
            run = Run(claim(out, name))
            run.begin(training.describe(source, preset, seeds, config))
            display.say(headline(name, preset, seeds, config, run, training.peak_memory(state)))
            try:
                with display:
                    training.run(state, verbs, evaluator, config, run, display)
            except KeyboardInterrupt:
                display.say(f"stopped at step {state.step:,}; what was learned by the last evaluation is in {run.path}")
                raise
            finally:
                if run.evaluations:
                    learning_curve(run)
            if state.envs.lost or state.envs.cut:
                display.say(
                    f"{state.envs.lost} worker processes died or hung and were replaced;"
                    f" {state.envs.cut} episodes were cut because a simulation broke down."
                )
            if not state.updates.any():
                display.say("No update was run: no episode ended. Give more --steps, or --update-after step.")
    return run


def ready(state: training.State, config: Config, display: Display) -> tuple[Verbs, Config]:
    """The verbs of the loop, and the config with the mode they are in: where nothing can be compiled, `eager`."""
    if config.accelerate == "compile":
        display.say("Compiling the update: about a minute the first time, a few seconds after that.")
        try:
            return accelerate(state.agent, state.memory, state.sums, config), config
        except CannotCompile as error:
            display.say(f"It cannot be compiled here ({error}). It runs uncompiled: slower, and otherwise the same.")
            config = replace(config, accelerate="eager")
    return accelerate(state.agent, state.memory, state.sums, config), config


def headline(name: str, preset: str, seeds: list[int], config: Config, run: Run, memory: int) -> str:
    """The first lines: what is about to happen, with the numbers that were decided by rule."""
    one = len(seeds) == 1
    many = f"seed {seeds[0]}" if one else f"{len(seeds)} seeds ({', '.join(map(str, seeds))})"
    where = f"{config.device}, {config.threads} thread{'s' if config.threads > 1 else ''}"
    where += f", {config.precision}, {'compiled' if config.accelerate == 'compile' else config.accelerate}"
    rate = f"{config.updates_per_step:g} update{'' if config.updates_per_step == 1 else 's'} per step"
    when = f"{rate}, after each episode" if config.update_after == "episode" else f"then {rate}"
    return (
        f"T3D on {name}: {many}, {config.steps:,} steps{'' if one else ' each'}, on {where}\n"
        f"preset {preset}: the first {config.random_steps:,} actions random, {when},"
        f" batch {config.batch_size}, networks {'-'.join(map(str, config.hidden))}\n"
        f"memory: {memory / 2**30:.2f} GiB when the replay is full\n"
        f"run folder: {run.path}"
    )


def load(run: str | Path | Run, seed: int | None = None, which: Which = "best") -> Policy:
    """A trained policy from a run folder (by default the best one of the best seed) or from a policy file."""
    if not isinstance(run, Run) and Path(run).suffix == ".safetensors":
        return read_policy(Path(run))
    return Run.open(run).policy(seed, which)
