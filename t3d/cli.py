"""The command line: `t3d train`, `resume`, `evaluate`, `doctor`, `bench returns`, `bench table`.

The options are the fields of the dataclasses below and of `config.Config`. Wrong input ends with exit code 2 and one
sentence, without a traceback.
"""

import inspect
import io
import json
import os
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
import torch
from rich.table import Table

import t3d
from t3d import api
from t3d.bench.commands import Returns, Tables, returns, tables
from t3d.config import PRESETS, Config, Preset, check_ranges, from_values, refuse_too_many
from t3d.display import complain, open_console
from t3d.envs import EnvFactory, env_factory, refuse_paths
from t3d.envs.batch import MOST_LOSSES
from t3d.envs.exact import first_difference, mujoco_tasks
from t3d.errors import T3DError, T3DWarning, nearest
from t3d.errors import command as shell_command
from t3d.evaluate.evaluator import Evaluator, PolicySnapshot
from t3d.learners import hardware
from t3d.limits import cores
from t3d.normalizer import Scaling
from t3d.options import (
    HELP,
    POSITIONAL,
    SHOWN_ONLY,
    Group,
    Shown,
    command_list,
    fill,
    help_page,
    options_of,
)
from t3d.options import parse as parse_options
from t3d.policy import Policy
from t3d.recorder import versions
from t3d.run_state import RunSetup
from t3d.runs.folder import NOT_SETTINGS, Run, Which, read_config


@dataclass(frozen=True)
class Train:
    """Train TD3 on an environment.

    Examples:
      t3d train Pendulum-v1
      t3d train HalfCheetah-v5 --seeds 5 --steps 3e5

    [step N] is the step of the algorithm that uses an option, as in
    docs/fifteen-steps.md.
    """

    env: Annotated[str, Group.COMMON, POSITIONAL, Shown("ENV")] = ""
    """Id of a Gymnasium environment with continuous actions, or module:Id."""
    seeds: Annotated[tuple[int, ...], Group.COMMON, Shown("N | K K ...", default="1")] = ()
    """One number N trains the seeds 0 to N-1 in parallel. Two or more numbers are the seeds themselves."""
    settings: Annotated[Config, Group.ALGORITHM] = field(default_factory=Config)
    out: Annotated[Path | None, Group.COMMON, Shown("DIR", default="runs/ENV-TIME")] = None
    """Run folder. It must be new or empty."""
    preset: Annotated[Preset, Group.COMMON] = "td3"
    """Source of the defaults. td3: the authors' code since 2019. paper: the TD3 paper of 2018. documents: the
    T3D documents."""
    seed: Annotated[int | None, Group.RUN, Shown("K")] = None
    """Train the single seed K."""
    config: Annotated[Path | None, Group.RUN, Shown("FILE")] = None
    """Read the options from the config.json of a run. Options on the command line take precedence."""
    allow_env_args: Annotated[bool, Group.RUN] = False
    """With --config: accept arguments for the environment that look like a path or a module."""
    env_args: Annotated[dict[str, Any], Group.ENVIRONMENT, SHOWN_ONLY, Shown(invocation="--env.KEY VALUE")] = field(
        default_factory=dict
    )
    """Pass KEY to the environment. VALUE is JSON, else a string."""


@dataclass(frozen=True)
class Resume:
    """Continue a run that stopped, or extend a finished run.

    The run continues from its newest complete checkpoint. On the same machine
    and versions, the results are bit-identical to those of a run that never
    stopped.
    """

    run: Annotated[Path, POSITIONAL, Shown("RUN")]
    """The run folder."""
    steps: Annotated[int | None, Shown("INT", default="as before")] = None
    """Environment steps per seed in total. More steps than before extend the run."""
    on_env_error: Annotated[Literal["stop", "cut"] | None, Shown("{stop,cut}", default="as before")] = None
    """When an environment step fails: stop saves the run and exits; cut truncates the episode and continues."""
    max_env_errors: Annotated[int | None, Shown("INT", default="as before")] = None
    """Failed steps that --on-env-error cut tolerates. One more stops the run."""
    allow_module: Annotated[tuple[str, ...], Shown("NAME ...")] = ()
    """Modules that may be imported to create the environment."""
    allow_env_args: bool = False
    """Accept arguments for the environment in config.json that look like a path or a module."""


@dataclass(frozen=True)
class Evaluate:
    """Evaluate the policies of a run, without exploration noise.

    With as many episodes as in training, the returns are those recorded in
    training.
    """

    run: Annotated[Path, POSITIONAL, Shown("RUN")]
    """The run folder."""
    policy: Which = "best"
    """Each seed's policy at its best evaluation, or at its last one."""
    seed: Annotated[int | None, Shown("K", default="every seed")] = None
    """Evaluate the single seed K."""
    episodes: Annotated[int | None, Shown("INT", default="as in training")] = None
    """Episodes per seed."""
    allow_module: Annotated[tuple[str, ...], Shown("NAME ...")] = ()
    """Modules that may be imported to create the environment."""
    allow_env_args: bool = False
    """Accept arguments for the environment in config.json that look like a path or a module."""


@dataclass(frozen=True)
class Doctor:
    """Show how environments are stepped, and compare the steps with Gymnasium's.

    Without ENV, all MuJoCo tasks of Gymnasium are checked.
    """

    env: Annotated[tuple[str, ...], POSITIONAL, Shown("[ENV ...]")] = ()
    """Environment ids."""
    steps: int = 1_000
    """Steps with random actions that are compared bit for bit with gymnasium.make."""


Command = Train | Resume | Evaluate | Doctor | Returns | Tables
MOST_FILLED = 2**28  # bytes of copies that stand in for seeds that were not asked for
COMMANDS: dict[str, Any] = {
    "train": Train,
    "resume": Resume,
    "evaluate": Evaluate,
    "doctor": Doctor,
    "bench": {"returns": Returns, "table": Tables},
}
_ABOUT = {
    "t3d": "T3D: Twin Delayed DDPG (TD3) in fifteen steps.",
    "t3d bench": "Train benchmark suites over many seeds, and print tables of the returns.",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command. The exit code is 0, 2 for wrong input, and 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without "±" shows "?"
    if arguments == ["--version"]:
        open_console().print(f"t3d {t3d.__version__}")
        return
    warnings.showwarning = show_warning  # type: ignore[assignment]
    try:
        run_command(parse(arguments))
    except T3DError as error:
        complain(str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def run_command(command: Command) -> None:
    """Run a command with its options."""
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
    elif isinstance(command, Returns):
        returns(command)
    else:
        tables(command)


def show_warning(message: Warning | str, category: type[Warning], *where: Any) -> None:
    """Print a warning as one sentence. Warnings of other packages are printed with their line of code."""
    if issubclass(category, T3DWarning):
        complain(str(message))
    else:
        text = re.sub(r"\x1b\[[0-9;]*m", "", str(message))  # colours
        complain(f"{category.__name__}: {text} ({where[0]}:{where[1]})")


def parse(arguments: list[str]) -> Command:
    """The command with its options. A preset or a config file sets the defaults of `train`."""
    prog, command, words = _find(arguments)
    env_args: dict[str, Any] = {}
    if command is Train:
        words, env_args = _take_env_args(words)
    if any(word in HELP for word in words):
        values = _train_defaults(words) if command is Train else None
        _print_help(help_page(prog, command, options_of(command, values), _width()))
    given = parse_options(prog, options_of(command), words)
    if command is Train:
        given["env_args"] = env_args
    parsed: Command = fill(_train_defaults(words), given) if command is Train else command(**given)
    return parsed


def _find(arguments: list[str]) -> tuple[str, Any, list[str]]:
    """The command, as in "t3d bench returns", its dataclass, and the words after it."""
    prog, found, words = "t3d", COMMANDS, list(arguments)
    while isinstance(found, dict):
        word = words.pop(0) if words else ""
        if word in HELP:
            summaries = {name: _summary(f"{prog} {name}", command) for name, command in found.items()}
            _print_help(command_list(prog, _ABOUT[prog], summaries, _width()))
        if word not in found:
            *others, last = found
            known = f"{', '.join(others)} or {last}. Help: {prog} --help"
            if not word or word.startswith("-"):
                before = f" before {word}" if word else ""
                raise T3DError(f'"{prog}" needs a command{before}: {known}')
            raise T3DError(f'there is no command "{prog} {word}".{nearest(word, found, 1)} Commands: {known}')
        prog, found = f"{prog} {word}", found[word]
    return prog, found, words


def _summary(prog: str, command: Any) -> str:
    """The first line of a command's help."""
    return _ABOUT[prog] if isinstance(command, dict) else inspect.cleandoc(command.__doc__).splitlines()[0]


def _print_help(lines: Iterable[tuple[str, bool]]) -> NoReturn:
    console = open_console()
    for line, is_title in lines:
        console.print(line, style="bold" if is_title else None)
    sys.exit(0)


def _width() -> int:
    """Columns of the help: those of the terminal, 80 in a pipe, at most 100."""
    return min(shutil.get_terminal_size().columns, 100)


def _take_env_args(arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Split off `--env.KEY VALUE` and `--env.KEY=VALUE`. Only the environment knows which keys exist."""
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


def _train_defaults(arguments: list[str]) -> Train:
    """The defaults of `train`: those of --preset or of --config."""
    preset, file = _value_of("--preset", arguments), _value_of("--config", arguments)
    if file is None:
        return Train(settings=PRESETS.get(preset, Config()))  # `check` refuses other presets
    values = read_config(Path(file))
    if preset is not None:
        raise T3DError("--config includes a preset: give --preset or --config, not both.")
    return Train(preset=values["preset"], settings=_settings(values, file))


def _settings(values: dict[str, Any], where: str) -> Config:
    """The options in a config.json."""
    settings = from_values({k: v for k, v in values.items() if k not in NOT_SETTINGS}, Config(), where)
    check_ranges(settings)
    return settings


def _value_of(option: str, arguments: list[str]) -> Any:
    """The value of an option; the last one if it was given several times."""
    value = None
    for argument, following in zip(arguments, [*arguments, None][1:], strict=True):
        if argument == option:
            value = following
        elif argument.startswith(option + "="):
            value = argument.partition("=")[2]
    return value


def train(command: Train) -> None:
    """Start a training run."""
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
            # The file's random steps belong to a longer run. At most a tenth of the steps are random.
            settings = replace(settings, random_steps=min(file.random_steps, settings.steps // 10))
    factory, seeds = env_factory(env, env_args), _chosen_seeds(command)
    conclude(api.start(RunSetup(factory, seeds, settings, command.preset), command.out))


def conclude(run: Run) -> None:
    """Print the results of a run and the next commands."""
    console = open_console()
    console.print()
    evaluations = run.evaluations
    if not evaluations:
        console.print("No evaluations (--eval-every 0): the policies are those of the last step.", style="bold")
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
    # The commands can be pasted as they are, also where the virtual environment is not activated.
    active = Path(shutil.which("t3d") or "").parent == Path(sys.executable).parent
    python = "python" if active else shlex.quote(os.path.relpath(sys.executable))
    console.print(f"Learning curve: {run.path / 'report' / 'learning-curve.png'}")
    console.print("Next:")
    more = {} if run.config.get("real_env") else {"episodes": 100}
    console.print(f"  {run.command('evaluate', **more)}")
    code = f"import t3d; print(t3d.load({str(run.path)!r}))"
    console.print(f"  {python} -c {shlex.quote(code)}")


def _refuse_functions(values: dict[str, Any], where: Path) -> None:
    """Refuse networks and environments that were made by functions in Python."""
    if values.get("network"):
        raise T3DError(
            f"{where}: the network {values['network']} was made by functions in Python, which files do not contain;"
            " use t3d.load from Python."
        )
    if values.get("callable"):
        raise T3DError(
            f"{where}: the environment {values['env']} was made by a function in Python, which files do not contain;"
            " use t3d.load from Python."
        )


def _env_in(config: Path) -> str:
    """The environment in a config.json. A module to import is refused: it must be typed on the command line."""
    values = read_config(config)
    env = str(values["env"])
    _refuse_functions(values, config)
    if values.get("algorithm") is not None:
        raise T3DError(
            f"{config}: the algorithm {values['algorithm']} was made by functions in Python, which files do not"
            " contain; use t3d.train from Python."
        )
    if ":" in env:
        raise T3DError(
            f"{config} imports a module for {env}; if you trust that module, type it: "
            + shell_command("train", env, "--config", config)
        )
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
    """Run the evaluation episodes and print their returns beside the recorded ones."""
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
    each = f"{episodes} episode{'' if episodes == 1 else 's'}"
    console.print(f"{run.config['env']}, {each} for each seed, {which} policies, no noise")
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
    """Print how each environment is stepped, why, and whether the steps equal those of gymnasium.make."""
    console = open_console()
    if not command.env:
        console.print(", ".join(f"{name} {version}" for name, version in versions().items()))
    for name in command.env or mujoco_tasks():
        factory = env_factory(name)
        with closing(factory):
            real = factory.as_real(False).real
        if real:
            raise T3DError(f"{name} is a real environment: doctor would step seven of them with random actions.")
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
    """The mean of the numbers that are not None."""
    known = [number for number in numbers if number is not None]
    return f"{_mean(known):.{digits}f}" if known else "no return"
