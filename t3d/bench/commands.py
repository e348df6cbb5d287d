"""`t3d bench returns` and `t3d bench table`: their options, and what they do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.measure import Measurement
from rich.table import Table
from tyro.conf import OmitSubcommandPrefixes, arg, subcommand

from t3d.bench.returns import RESULTS, RUNS, train_suite
from t3d.bench.suites import SUITES, SuiteName, Version, tasks_of
from t3d.bench.tables import Result, read_results, show, write_docs
from t3d.display import open_console
from t3d.errors import T3DError, plain


@dataclass(frozen=True)
class Returns:
    """Train a suite of tasks, many seeds each, and keep every return.

    For example: t3d bench returns --suite quick
                 t3d bench returns --suite paper --only Hopper Walker2d

    What is trained already is left alone, and what was stopped goes on.
    """

    suite: SuiteName = "quick"
    """quick needs no GPU; paper is Table 1; ablation takes TD3 apart; pixels are pictures; documents PyBullet's."""
    only: Annotated[tuple[str, ...], arg(metavar="TASK ...", help_behavior_hint="")] = ()
    """These tasks, as in Hopper, and for ablation these variants, as in ddpg."""
    seeds: Annotated[
        int | None, arg(metavar="N", help_behavior_hint="(default: 10; quick: 5; pixels, documents: 2)")
    ] = None
    """Seeds 0 to N-1."""
    steps: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: the suite's)")] = None
    """Environment steps for each seed."""
    eval_every: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: the suite's)")] = None
    """Environment steps between evaluations."""
    version: Version = "v5"
    """Of Gymnasium's MuJoCo tasks."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to learn; auto takes a GPU if there is one."""
    precision: Annotated[Literal["auto", "fp32", "tf32", "bf16"], arg(help_behavior_hint="(default: auto)")] = "auto"
    """Of matrix products; auto is tf32 on GPUs and fp32 elsewhere."""
    out: Annotated[Path, arg(metavar="DIR")] = RESULTS
    """Where the results go, a file for each task."""
    runs: Annotated[Path, arg(metavar="DIR")] = RUNS
    """Where the runs go."""


@dataclass(frozen=True)
class Tables:
    """Make the tables, and with --docs the figures, from what `t3d bench returns` has left."""

    results: Annotated[Path, arg(metavar="DIR")] = RESULTS
    """Where the results are."""
    docs: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Write them into this page, between its marks, and the figures beside it."""


@dataclass(frozen=True)
class Bench:
    """Returns over many seeds, and tables of them."""

    what: OmitSubcommandPrefixes[Annotated[Returns, subcommand("returns")] | Annotated[Tables, subcommand("table")]]


def run(command: Bench) -> None:
    """Do what was asked for."""
    if isinstance(command.what, Returns):
        returns(command.what)
    else:
        tables(command.what)


def returns(command: Returns) -> None:
    """Train a suite."""
    tasks = tasks_of(command.suite, command.only, command.version)
    given: dict[str, Any] = {"steps": command.steps, "eval_every": command.eval_every, "device": command.device}
    given["precision"] = None if command.precision == "auto" else command.precision
    settings = {name: value for name, value in given.items() if value is not None}
    seeds = SUITES[command.suite].seeds if command.seeds is None else command.seeds
    console = open_console()

    def say(sentence: str) -> None:
        console.print(sentence)

    train_suite(tasks, seeds, settings, command.out, command.runs, say)
    _print_tables({command.suite: read_results(command.out)[command.suite]})


def tables(command: Tables) -> None:
    """Show the tables, and write them into the docs if asked to."""
    results = read_results(command.results)
    if not results and command.docs is None:
        raise T3DError(f"{command.results} holds no results; `t3d bench returns --suite quick` makes some.")
    _print_tables(results)
    if command.docs is not None:
        for path in write_docs(results, command.docs):
            open_console().print(f"written: {path}")


def _print_tables(results: dict[SuiteName, list[Result]]) -> None:
    console = open_console()
    for headline, rows, below in show(results):
        table = Table(title=plain(headline), title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
        for column, name in enumerate(rows[0]):
            table.add_column(plain(name), justify="left" if column == 0 else "right", no_wrap=True)
        for row in rows[1:]:
            table.add_row(*map(plain, row))
        # A number that is cut off says nothing: a terminal that is too narrow breaks the line.
        console.width = max(
            console.width, Measurement.get(console, console.options.update(max_width=1000), table).maximum
        )
        console.print()
        console.print(table)
        for sentence in below:
            console.print(sentence)
