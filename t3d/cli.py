"""The command line: `t3d train`, `resume`, `evaluate`, `doctor`, `bench returns`, `bench table`.

Options are the fields of the dataclasses below and of `config.Config`. What is wrong with the input is said
in one sentence, with exit code 2 and no traceback.
"""

import json
import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from rich.table import Table
from tyro.conf import Positional, Suppress, arg, subcommand
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

import t3d
from t3d import api, bench
from t3d.config import PRESETS, Config, Preset, check_ranges, from_values, refuse_too_many
from t3d.display import complain, open_console
from t3d.envs import EnvFactory, env_factory, refuse_paths
from t3d.envs.batch import MOST_LOSSES
from t3d.envs.exact import first_difference, mujoco_tasks
from t3d.errors import T3DError, T3DWarning, nearest
from t3d.evaluate.evaluator import Evaluator, PolicySnapshot
from t3d.learners import hardware
from t3d.limits import cores
from t3d.normalizer import Scaling
from t3d.policy import Policy
from t3d.recorder import versions
from t3d.run_state import RunSetup
from t3d.runs.folder import NOT_SETTINGS, Run, Which, read_config


@dataclass(frozen=True)
class Train:
    """Train T3D on an environment.

    For example: t3d train Pendulum-v1
                 t3d train HalfCheetah-v5 --seeds 5 --steps 3e5

    --env.KEY VALUE hands KEY to the environment (as JSON, else as a string).
    """

    env: Positional[Annotated[str, arg(metavar="ENV", help_behavior_hint="")]] = ""
    """Id of a Gymnasium environment with continuous actions, or module:Id."""
    seeds: Annotated[tuple[int, ...], arg(metavar="N | K K ...", help_behavior_hint="(default: 1)")] = ()
    """One number N trains the seeds 0 to N-1 side by side; two or more are the seeds themselves."""
    seed: Annotated[int | None, arg(metavar="K", help_behavior_hint="")] = None
    """The one seed K."""
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: runs/ENV-TIME)")] = None
    """The run folder, new or empty."""
    preset: Preset = "td3"
    """Where defaults come from: td3, the authors' code since 2019; paper, that of 2018; documents."""
    config: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Take the settings from a run's config.json; what is typed beside it goes first."""
    allow_env_args: bool = False
    """Hand the environment what that file says, also where it looks like a path or a module."""
    settings: Annotated[Config, arg(name="")] = field(default_factory=Config)
    env_args: Suppress[dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Resume:
    """Go on with a run that was stopped, killed, or is to be longer.

    From its newest whole checkpoint, bit for bit as if nothing had happened.
    """

    run: Positional[Annotated[Path, arg(metavar="RUN")]]
    """The run folder."""
    steps: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: as it was)")] = None
    """Environment steps for each seed in all; more than before make the run longer."""
    on_env_error: Annotated[
        Literal["stop", "cut"] | None, arg(metavar="{stop,cut}", help_behavior_hint="(default: as it was)")
    ] = None
    """When a step of an environment fails: save and stop, or end its episode as truncated and go on."""
    max_env_errors: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: as it was)")] = None
    """Failed steps after which a run stops although they are cut."""
    allow_module: Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="")] = ()
    """Modules that may be imported to make the environment, if the run names one."""
    allow_env_args: bool = False
    """Hand the environment what the run's file says, also where it looks like a path or a module."""


@dataclass(frozen=True)
class Evaluate:
    """Play noise-free episodes with the policies of a run.

    Asked for the episodes of training, it gives the recorded scores again.
    """

    run: Positional[Annotated[Path, arg(metavar="RUN")]]
    """The run folder."""
    policy: Which = "best"
    """Each seed's policy at its best evaluation, or at the last one."""
    seed: Annotated[int | None, arg(metavar="K", help_behavior_hint="(default: every seed)")] = None
    """The one seed K."""
    episodes: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: as in training)")] = None
    """Episodes for each seed."""
    allow_module: Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="")] = ()
    """Modules that may be imported to make the environment, if the run names one."""
    allow_env_args: bool = False
    """Hand the environment what the run's file says, also where it looks like a path or a module."""


@dataclass(frozen=True)
class Doctor:
    """Say how environments are stepped here, why, and whether exactly.

    Without ENV it looks at all MuJoCo tasks of Gymnasium.
    """

    env: Positional[Annotated[tuple[str, ...], arg(metavar="ENV ...", help_behavior_hint="")]] = ()
    """Ids of environments."""
    steps: int = 1_000
    """Steps with random actions, compared with gymnasium.make bit for bit."""


Command = Train | Resume | Evaluate | Doctor | bench.Bench
MOST_FILLED = 2**28  # bytes of copies that stand in for seeds that were not asked for
COMMANDS = {"train": Train, "resume": Resume, "evaluate": Evaluate, "doctor": Doctor, "bench": bench.Bench}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; exit with 0, with 2 where the input was wrong, with 130 on Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no "±" shows "?" and goes on
    if arguments == ["--version"]:
        open_console().print(f"t3d {t3d.__version__}")
        return
    warnings.showwarning = show_warning  # type: ignore[assignment]
    try:
        command = parse(arguments)
        if isinstance(command, Train):
            train(command)
        elif isinstance(command, Resume):
            conclude(
                api.resume(
                    command.run,
                    command.steps,
                    on_env_error=command.on_env_error,
                    max_env_errors=command.max_env_errors,
                    allow_modules=command.allow_module,
                    allow_env_args=command.allow_env_args,
                )
            )
        elif isinstance(command, Evaluate):
            evaluate(command)
        elif isinstance(command, Doctor):
            doctor(command)
        else:
            bench.run(command)
    except T3DError as error:
        complain(str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def show_warning(message: Warning | str, category: type[Warning], *where: Any) -> None:
    """A warning as one sentence; only what is wrong in somebody's program names the line of it."""
    if issubclass(category, T3DWarning):
        complain(str(message))
    else:
        complain(f"{category.__name__}: {message} ({where[0]}:{where[1]})")


def parse(arguments: list[str]) -> Command:
    """The command and its options; a preset or a config file sets the defaults that the others are seen beside."""
    if not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        word, known = arguments[0], ", ".join(COMMANDS)
        raise T3DError(f"there is no command '{word}'; there are {known}.{nearest(word, COMMANDS)}")
    arguments, env_args = _take_env_args(arguments)
    default = _train_defaults(arguments) if arguments[0] == "train" else Train()
    choice: Any = Annotated[Train, subcommand("train", default=default)]
    choice |= Annotated[Resume, subcommand("resume")] | Annotated[Evaluate, subcommand("evaluate")]
    choice |= Annotated[Doctor, subcommand("doctor")] | Annotated[bench.Bench, subcommand("bench")]
    with _whole_numbers():
        command: Command = tyro.cli(choice, prog="t3d", description=_DESCRIPTION, args=arguments)
    return replace(command, env_args=env_args) if isinstance(command, Train) else command


def _take_env_args(arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Split off `--env.KEY VALUE` and `--env.KEY=VALUE`, whose keys only the environment knows."""
    rest: list[str] = []
    given: dict[str, Any] = {}
    words = iter(arguments)
    for word in words:
        if not word.startswith("--env."):
            rest.append(word)
            continue
        key, equals, value = word.removeprefix("--env.").partition("=")
        text = value if equals else next(words, None)
        if not key or text is None:
            raise T3DError(f"{word} needs a value, as in --env.forward_reward_weight 2")
        try:
            given[key.replace("-", "_")] = json.loads(text)
        except ValueError:
            given[key.replace("-", "_")] = text
    return rest, given


_DESCRIPTION = "T3D: Twin Delayed DDPG in fifteen steps. Each command has its own --help."


def _train_defaults(arguments: list[str]) -> Train:
    """What `train` starts from, once --preset and --config are known."""
    preset, file = _value_of("--preset", arguments), _value_of("--config", arguments)
    if file is None:
        # A preset that does not exist is left to the parser to complain of.
        return Train(settings=PRESETS.get(preset, Config()))
    values = read_config(Path(file))
    if preset is not None:
        raise T3DError("--config brings its preset with it: give --preset or --config, not both.")
    return Train(preset=values["preset"], settings=_settings(values, file))


def _settings(values: dict[str, Any], where: str) -> Config:
    """The options in a config.json."""
    settings = from_values({k: v for k, v in values.items() if k not in NOT_SETTINGS}, Config(), where)
    check_ranges(settings)
    return settings


def _value_of(option: str, arguments: list[str]) -> Any:
    """What an option was given, the last time if it was several."""
    value = None
    for argument, following in zip(arguments, [*arguments[1:], None], strict=True):
        if argument == option:
            value = following
        elif argument.startswith(option + "="):
            value = argument.partition("=")[2]
    return value


def _whole_numbers() -> ConstructorRegistry:
    """Let every whole number be typed as 1e6 or 1_000_000 too."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
        if info.type is not int:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="INT",
            instance_from_str=lambda words: _whole_number(words[0]),
            is_instance=lambda value: isinstance(value, int),
            str_from_instance=lambda value: [str(value)],
        )

    return registry


def _whole_number(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        raise ValueError(f"'{word}' is not a whole number") from None
    if not number.is_integer():
        raise ValueError(f"{word} is not a whole number")
    return int(number)


def train(command: Train) -> None:
    """Train from the start."""
    env, env_args = command.env, command.env_args
    if command.config and not env:
        from_file = {k: v for k, v in read_config(command.config)["env_args"].items() if k not in env_args}
        if not command.allow_env_args:
            refuse_paths(from_file, str(command.config))
        env, env_args = _env_in(command.config), {**from_file, **env_args}
    if not env:
        raise T3DError("train needs an environment, for example: t3d train Pendulum-v1")
    settings = command.settings
    if command.config:
        file = _settings(read_config(command.config), str(command.config))
        if settings.steps < file.steps and settings.random_steps == file.random_steps:
            # They were chosen for a longer run; a shorter one keeps the rule of a tenth.
            settings = replace(settings, random_steps=min(file.random_steps, settings.steps // 10))
    factory, seeds = env_factory(env, env_args), _chosen_seeds(command)
    conclude(api.start(RunSetup(factory, seeds, settings, command.preset), command.out))


def conclude(run: Run) -> None:
    """Say what came of a run and what to type next."""
    console = open_console()
    console.print()
    evaluations = run.evaluations
    if not evaluations:
        console.print("There were no evaluations (--eval-every 0): the policies are those at the end.", style="bold")
    else:
        last = max(row["step"] for row in evaluations)
        finals = {row["seed"]: row["mean"] for row in evaluations if row["step"] == last}
        known = [mean for mean in finals.values() if mean is not None]
        console.print(f"Mean return at step {last:,}: {_shown_mean(known)}", style="bold")
        for seed, final in finals.items():
            at_end = "no return" if final is None else f"{final:.1f}"
            try:
                card = run.policy(seed).card
            except T3DError as problem:
                console.print(f"  seed {seed}: {at_end} at the end; {problem}")
                continue
            console.print(
                f"  seed {seed}: {at_end} at the end, {_shown_mean(card.returns)} at its best (step {card.step:,})"
            )
    # What to type next can be typed as it stands, also where the environment is not activated.
    active = Path(shutil.which("t3d") or "").parent == Path(sys.executable).parent
    python = "python" if active else shlex.quote(os.path.relpath(sys.executable))
    console.print(f"Learning curve: {run.path / 'report' / 'learning-curve.png'}")
    console.print("Next:")
    more = {} if run.config.get("real_env") else {"episodes": 100}
    console.print(f"  {run.command('evaluate', **more)}")
    console.print(f'  {python} -c "import t3d; print(t3d.load({str(run.path)!r}))"')


def _refuse_functions(values: dict[str, Any], where: Path) -> None:
    """What was made by functions in Python is for Python."""
    if values.get("network"):
        raise T3DError(
            f"{where}: the network {values['network']} was made by functions in Python, which no file can bring back;"
            " use t3d.train or t3d.load from Python."
        )
    if values.get("callable"):
        raise T3DError(
            f"{where}: the environment {values['env']} was made by a function in Python, which no file can bring back;"
            " use t3d.train or t3d.load from Python."
        )


def _env_in(config: Path) -> str:
    """The environment that a config.json names; what it would import must be typed, not read from a file."""
    values = read_config(config)
    env = str(values["env"])
    _refuse_functions(values, config)
    if ":" in env:
        raise T3DError(f"{config} asks for {env}; if you trust that module, type it: t3d train {env} --config {config}")
    return env


def _chosen_seeds(command: Train) -> list[int]:
    if command.seed is not None:
        if command.seeds:
            raise T3DError("give --seed or --seeds, not both.")
        return api.as_seeds([command.seed])
    if not command.seeds:
        return api.as_seeds(read_config(command.config)["seeds"] if command.config else 1)
    return api.as_seeds(command.seeds if len(command.seeds) > 1 else command.seeds[0])


def evaluate(command: Evaluate) -> None:
    """Play the episodes and show them beside what was recorded."""
    run = Run.open(command.run)
    settings = _settings(run.config, str(run.path / "config.json"))
    _refuse_functions(run.config, run.path)
    if not command.allow_env_args:
        refuse_paths(run.config["env_args"], str(run.path / "config.json"))
    refuse_too_many(settings, len(run.seeds))
    factory = env_factory(run.config["env"], run.config["env_args"], command.allow_module)
    wanted = run.seeds if command.seed is None else [command.seed]
    policies = {seed: run.policy(seed, command.policy) for seed in wanted}
    episodes = settings.eval_episodes if command.episodes is None else command.episodes
    if episodes < 1:
        raise T3DError(f"--episodes must be at least 1; it is {episodes}.")
    returns = evaluate_again(run, factory, settings, policies, episodes)

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("seed", "step", "mean return", "deviation", "lowest", "highest", "as recorded"):
        table.add_column(title, justify="right", no_wrap=True)
    for seed, policy in policies.items():
        scores, recorded = returns[seed], policy.card.returns
        both = min(len(scores), len(recorded))
        same = "yes" if scores[:both] == recorded[:both] else f"no: {_shown_mean(recorded)}"
        known = [score for score in scores if score is not None]
        numbers = (_mean(known), float(np.std(known)), min(known), max(known)) if known else ()
        cells = [f"{x:.2f}" for x in numbers] or ["–"] * 4
        table.add_row(str(seed), f"{policy.card.step:,}", *cells, same if both else "–")
    console = open_console()
    which = command.policy if run.has_evaluations else "last"
    console.print(f"{run.config['env']}, {episodes} episodes for each seed, {which} policies, no noise")
    console.print(table)
    if lost := sum(score is None for scores in returns.values() for score in scores):
        console.print(f"{lost} episodes have no return: their worker processes died or hung {MOST_LOSSES} times each.")
    if len(returns) > 1:
        known = [score for scores in returns.values() for score in scores if score is not None]
        console.print(f"mean over seeds: {_shown_mean(known, 2)}", style="bold")


def evaluate_again(
    run: Run, factory: EnvFactory, settings: Config, policies: dict[int, Policy], episodes: int
) -> dict[int, list[float | None]]:
    """The returns of each seed's policy, in a batch of the shape that training had; None where an episode is lost."""
    factory = factory.seen(settings.pixels, settings.frame_stack).as_real(settings.real_env)
    refuse_misfits(run, policies)
    stand_in = next(iter(policies.values()))  # fills the rows of seeds that were not asked for
    device = "cuda" if settings.eval_device == "cuda" and torch.cuda.is_available() else "cpu"
    snapshot = snapshot_of([policies.get(seed, stand_in) for seed in run.seeds]).copied(device)
    settings = replace(settings, workers=min(settings.workers, cores()))
    returns: dict[int, list[float | None]] = {seed: [] for seed in policies}
    with (
        closing(factory),
        hardware(settings.threads, settings.precision),
        closing(Evaluator(factory, run.seeds, settings)) as evaluator,
    ):
        layout, actions = evaluator.envs.layout, evaluator.envs.actions
        if json.dumps(layout) != json.dumps(stand_in.card.layout) or actions.dim != stand_in.actions.dim:
            raise T3DError(f"{factory.name} has other observations or actions now than when {run.path} was trained.")
        for first in range(0, episodes, evaluator.at_once):
            evaluation = evaluator.run(snapshot, first)
            for k, seed in enumerate(run.seeds):
                if seed in policies:
                    returns[seed] += [None if np.isnan(score) else score for score in evaluation.returns[k].tolist()]
    return {seed: scores[:episodes] for seed, scores in returns.items()}


def snapshot_of(policies: list[Policy]) -> PolicySnapshot:
    """Policies of one shape, side by side."""
    actor = {name: torch.cat([policy.parameters[name] for policy in policies]) for name in policies[0].parameters}
    parts = [policy.scaling for policy in policies if policy.scaling is not None]
    scaling = Scaling(torch.cat([p.shift for p in parts]), torch.cat([p.scale for p in parts])) if parts else None
    return PolicySnapshot(policies[0].networks, actor, scaling=scaling)


def refuse_misfits(run: Run, policies: dict[int, Policy]) -> None:
    """Refuse policies that do not fit side by side: files of several runs were mixed, or made by hand."""
    stand_in = next(iter(policies.values()))
    shapes = {name: tensor.shape for name, tensor in stand_in.parameters.items()}
    for seed, policy in policies.items():
        fits = {name: tensor.shape for name, tensor in policy.parameters.items()} == shapes
        fits &= policy.card.layout == stand_in.card.layout
        fits &= (policy.scaling is None) == (stand_in.scaling is None)
        if not fits or policy.card.action_low != stand_in.card.action_low:
            raise T3DError(
                f"{run.policy_path(seed, 'best').parent}: the policy of seed {seed} does not fit the others."
            )
    # The batch has the shape that it had in training, so places of other seeds are filled with copies.
    size = sum(tensor.nbytes for tensor in stand_in.parameters.values())
    if (len(run.seeds) - len(policies)) * size > MOST_FILLED:
        raise T3DError(f"{run.path} has {len(run.seeds):,} seeds, too many to play one of them in the shape of all.")


def doctor(command: Doctor) -> None:
    """A line for each environment: the path it takes, why, and whether it is Gymnasium's bit for bit."""
    console = open_console()
    if not command.env:
        console.print(", ".join(f"{name} {version}" for name, version in versions().items()))
    for name in command.env or mujoco_tasks():
        factory = env_factory(name)
        with closing(factory):
            real = factory.as_real(False).real
        if real:
            raise T3DError(f"{name} says that it is real: doctor would make seven of it and step them at random.")
        envs = factory.batch(1, lambda env, episode: episode)
        envs.close()
        path, why = factory.path()
        difference, ends = first_difference(factory, command.steps)
        exact = f"differs from gymnasium.make in {difference}" if difference else "bit-identical to gymnasium.make"
        console.print(f"{name}: {path}, because {why}")
        console.print(f"  {exact} in {command.steps:,} steps of 3 environments, {ends} ends of episodes among them")
        if command.env:
            low, high = envs.actions.low.reshape(-1), envs.actions.high.reshape(-1)
            bounds = ", ".join(sorted({f"{a:g} to {b:g}" for a, b in zip(low, high, strict=True)}))
            console.print(f"  observations: {envs.obs_dim} numbers; actions: {envs.actions.dim}, from {bounds}")


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _shown_mean(numbers: Sequence[float | None], digits: int = 1) -> str:
    """Of the numbers that are there."""
    known = [number for number in numbers if number is not None]
    return f"{_mean(known):.{digits}f}" if known else "no return"
