"""The commands `t3d bench returns` and `t3d bench table`."""

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
    """Train a suite of tasks with many seeds each, and save every return.

    For example: t3d bench returns --suite quick
                 t3d bench returns --suite paper --only Hopper Walker2d

    Finished tasks are skipped; interrupted ones are resumed.
    """

    suite: SuiteName = "quick"
    """quick needs no GPU; paper is the paper's Table 1; pixels learns from images; documents uses PyBullet."""
    only: Annotated[tuple[str, ...], arg(metavar="TASK ...", help_behavior_hint="")] = ()
    """Only these tasks, for example Hopper; for ablation also variants, for example ddpg."""
    seeds: Annotated[
        int | None, arg(metavar="N", help_behavior_hint="(default: 10; quick: 5; pixels, documents: 2)")
    ] = None
    """Seeds 0 to N-1."""
    steps: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: the suite's)")] = None
    """Environment steps for each seed."""
    eval_every: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: the suite's)")] = None
    """Environment steps between evaluations."""
    version: Version = "v5"
    """The version of Gymnasium's MuJoCo tasks."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device for training; auto uses a GPU if there is one."""
    precision: Annotated[Literal["auto", "fp32", "tf32", "bf16"], arg(help_behavior_hint="(default: auto)")] = "auto"
    """The precision of matrix products; auto is tf32 on GPUs and fp32 elsewhere."""
    out: Annotated[Path, arg(metavar="DIR")] = RESULTS
    """The folder for the results, a file per task."""
    runs: Annotated[Path, arg(metavar="DIR")] = RUNS
    """The folder for the runs."""


@dataclass(frozen=True)
class Tables:
    """Make tables, and with --docs figures, from the results of `t3d bench returns`."""

    results: Annotated[Path, arg(metavar="DIR")] = RESULTS
    """The folder with the results."""
    docs: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Write the tables into this page, between its markers, and the figures into figures/ beside it."""


@dataclass(frozen=True)
class Bench:
    """Benchmark returns over many seeds, and make tables."""

    what: OmitSubcommandPrefixes[Annotated[Returns, subcommand("returns")] | Annotated[Tables, subcommand("table")]]


def run(command: Bench) -> None:
    """Run the command."""
    if isinstance(command.what, Returns):
        returns(command.what)
    else:
        tables(command.what)


def returns(command: Returns) -> None:
    """Train a suite and print its table."""
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
    """Print the tables; with --docs write them into the page."""
    results = read_results(command.results)
    if not results and command.docs is None:
        raise T3DError(f"{command.results} holds no results. Make some with: t3d bench returns --suite quick")
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
        # In a narrow terminal, wrap lines instead of cutting off numbers.
        console.width = max(
            console.width, Measurement.get(console, console.options.update(max_width=1000), table).maximum
        )
        console.print()
        console.print(table)
        for sentence in below:
            console.print(sentence)
