"""The commands `t3d bench returns` and `t3d bench table`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.measure import Measurement
from rich.table import Table

from t3d.bench.returns import RESULTS, RUNS, train_suite
from t3d.bench.suites import SUITES, SuiteName, Version, tasks_of
from t3d.bench.tables import Result, read_results, show, write_docs
from t3d.display import open_console
from t3d.errors import T3DError, plain
from t3d.options import Shown


@dataclass(frozen=True)
class Returns:
    """Train a benchmark suite over many seeds and store all returns.

    Examples:
      t3d bench returns --suite quick
      t3d bench returns --suite paper --only Hopper Walker2d

    Finished tasks are skipped. Stopped tasks are continued.
    """

    suite: SuiteName = "quick"
    """quick: four small tasks, without a GPU. paper: Table 1 of the TD3 paper. ablation: TD3 without each of its parts.
    pixels: image observations. documents: PyBullet tasks."""
    only: Annotated[tuple[str, ...], Shown("TASK ...")] = ()
    """Train these tasks only, as in Hopper. For ablation also these variants, as in ddpg."""
    seeds: Annotated[int | None, Shown("N", default="10; quick: 5; pixels, documents: 2")] = None
    """Train the seeds 0 to N-1."""
    steps: Annotated[int | None, Shown("INT", default="the suite's")] = None
    """Environment steps per seed."""
    eval_every: Annotated[int | None, Shown("INT", default="the suite's")] = None
    """Environment steps between evaluations."""
    version: Version = "v5"
    """Version of Gymnasium's MuJoCo tasks."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device for training. auto uses a GPU if one is available."""
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"
    """Precision of matrix products. auto is tf32 on a GPU and fp32 on a CPU."""
    out: Annotated[Path, Shown("DIR")] = RESULTS
    """Folder of the results, one file per task."""
    runs: Annotated[Path, Shown("DIR")] = RUNS
    """Folder of the run folders."""


@dataclass(frozen=True)
class Tables:
    """Print the tables of stored returns, and update a page of the docs."""

    results: Annotated[Path, Shown("DIR")] = RESULTS
    """Folder of the results."""
    docs: Annotated[Path | None, Shown("FILE")] = None
    """Write the tables into this page, between its marks, and the figures beside it."""


def returns(command: Returns) -> None:
    """Train a suite and print its tables."""
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
    """Print the tables. With --docs, write them into a page too."""
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
