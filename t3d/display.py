"""The progress display: a live table in a terminal, plain lines elsewhere."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from t3d.errors import plain
from t3d.evaluate.evaluator import Evaluation


class Output:
    """Standard output for the console. If a write fails, later output is dropped and training continues.

    A write fails after `| head` or on a full disk. One message goes to standard error, except after `| head`.
    """

    def __init__(self) -> None:
        self._failed = False

    @property
    def _stream(self) -> Any:
        return getattr(
            sys.stdout, "rich_proxied_file", sys.stdout
        )  # Rich replaces sys.stdout while a live table is shown

    def __getattr__(self, name: str) -> Any:  # encoding, isatty, fileno
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(lambda: self._stream.flush())

    def _try(self, call: Callable[[], Any]) -> None:
        if self._failed:
            return
        try:
            call()
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self._failed = True
            with suppress(OSError, ValueError):  # the flush of buffered output at exit must not fail again
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)
            if not isinstance(error, BrokenPipeError):
                complain(f"cannot write to standard output ({error}): no more output follows.")


class PlainConsole(Console):
    """A console that prints untrusted text safely: no markup, no control codes."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(plain(part) if isinstance(part, str) else part for part in objects), **options)


def open_console(quiet: bool = False) -> Console:
    """Make a console for standard output without highlighting and without line wrapping."""
    output: Any = Output()
    return PlainConsole(
        file=output if sys.stdout is not None else None,
        highlight=False,
        soft_wrap=True,
        quiet=quiet,
        markup=False,
        emoji=False,
    )


def complain(sentence: str) -> None:
    """Write a sentence to standard error; ignore errors."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"t3d: {plain(sentence)}\n")
        sys.stderr.flush()


class Display:
    """Shows the progress of training."""

    def __init__(
        self,
        steps: int,
        seeds: Sequence[int],
        random_steps: int = 0,
        quiet: bool = False,
        console: Console | None = None,
        evaluated: bool = True,
    ) -> None:
        self.steps, self.seeds, self.random_steps = steps, list(seeds), random_steps
        self.console = console or open_console(quiet)
        self._step = self._marked_step = 0
        self._started = self._marked = time.perf_counter()
        self._rate = 0.0
        self._lost = 0
        self._evaluated = evaluated  # whether to show evaluations; otherwise show training episodes
        self._episodes: list[float] = []
        self._evaluation: tuple[int, Evaluation] | None = None
        self._best: dict[int, float] = {}
        self._training: dict[int, dict[str, Any]] = {}
        self._live: Live | None = None
        if self.console.is_terminal and not quiet:
            self._live = Live(console=self.console, get_renderable=self._table, refresh_per_second=4)

    def __enter__(self) -> "Display":
        self._started = self._marked = time.perf_counter()
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def begin_at(self, step: int, evaluations: list[dict[str, Any]]) -> None:
        """Set the step and the past evaluations of a resumed run."""
        self._step = self._marked_step = step
        for row in evaluations:
            self._best[row["seed"]] = max(_known(row["mean"]), self._best.get(row["seed"], -float("inf")))
        last = evaluations[-len(self.seeds) :]
        if last and len({len(row["returns"]) for row in last}) == 1 and [row["seed"] for row in last] == self.seeds:
            returns = np.array([row["returns"] for row in last], np.float64)  # null becomes nan
            self._evaluation = (last[0]["step"], Evaluation(returns, np.array([row["lengths"] for row in last])))

    def say(self, text: str) -> None:
        """Print a line above the live table."""
        self.console.print(text)

    def advance(self, step: int, lost: int = 0) -> None:
        """Update the step. This runs at every step, so it reads the clock only every 64 steps."""
        if lost > self._lost:
            self._lost = lost
            self.say(f"step {step:,}: a worker process died or hung and was replaced ({lost} so far)")
        before, self._step = self._step, step
        if step // 64 > before // 64:
            now = time.perf_counter()
            if before < self.random_steps <= step:  # steps with updates are slower: restart the measurement
                self._rate, self._marked, self._marked_step = 0.0, now, step
            elif now - self._marked > 2:
                rate = (step - self._marked_step) / (now - self._marked)
                self._rate = rate if self._rate == 0 else 0.7 * self._rate + 0.3 * rate
                self._marked, self._marked_step = now, step

    def training(self, rows: list[dict[str, Any]]) -> None:
        """Show the losses and values of the last interval."""
        self._training = {row["seed"]: row for row in rows}
        if not self._evaluated and self._live is None:
            episodes = f"   {self._episode_returns()}" if self._episodes else ""
            self._line(self._step, f"{episodes}   {self._losses()}")
            self._episodes.clear()

    def ended(self, rows: list[dict[str, Any]]) -> None:
        """Add finished training episodes."""
        if not self._evaluated:
            self._episodes += [row["return"] for row in rows]

    def _episode_returns(self) -> str:
        count = len(self._episodes)
        return f"mean return of {count} episode{'' if count == 1 else 's'} {sum(self._episodes) / count:.1f}"

    def _line(self, step: int, rest: str) -> None:
        self.say(f"step {step:>9,} of {self.steps:,}{rest}   {self._pace()}")

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Show an evaluation of all seeds; ignore one that was shown already."""
        if self._evaluation is not None and self._evaluation[0] == step:
            return
        self._evaluation = (step, evaluation)
        means = evaluation.means
        for seed, mean in zip(self.seeds, means, strict=True):
            self._best[seed] = max(_known(float(mean)), self._best.get(seed, -float("inf")))
        if self._live is None:
            each = "" if len(self.seeds) == 1 else "  (" + ", ".join(f"{mean:.1f}" for mean in means) + ")"
            self._line(step, f"   return {means.mean():9.1f}{each}   {self._losses()}")

    def _losses(self) -> str:
        parts = []
        for name, title in (
            ("critic_loss", "critic loss"),
            ("actor_loss", "actor loss"),
            ("q_mean", "mean Q"),
        ):
            values = [row[name] for row in self._training.values() if row[name] is not None]
            if values:
                parts.append(f"{title} {sum(values) / len(values):.3g}")
        return "   ".join(parts)

    def _pace(self) -> str:
        if not self._rate:
            return ""
        left = (self.steps - self._step) / self._rate
        told = left >= 1 and self._step >= self.random_steps
        return f"{self._rate:,.0f} steps/s" + (f"   {_clock(left)} left" if told else "")

    def _table(self) -> RenderableType:
        bar = ProgressBar(total=self.steps, completed=self._step, width=30)
        elapsed = _clock(time.perf_counter() - self._started)
        head = Table.grid(padding=(0, 2))
        head.add_row(bar, f"step {self._step:,} of {self.steps:,}", self._pace(), f"{elapsed} so far")
        if not self._evaluated:
            return Group(head, Text(f"{self._episode_returns() if self._episodes else ''}   {self._losses()}"))
        if self._evaluation is None:
            return Group(head, Text("the first evaluation is running …", style="dim"))
        step, evaluation = self._evaluation
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("seed")
        for title in (f"return at {step:,}", "best", "critic loss", "actor loss", "mean Q"):
            table.add_column(title, justify="right")
        for k, seed in enumerate(self.seeds):
            returns = evaluation.returns[k][~np.isnan(evaluation.returns[k])]
            row = self._training.get(seed, {})
            numbers = (row.get(name) for name in ("critic_loss", "actor_loss", "q_mean"))
            table.add_row(
                str(seed),
                f"{returns.mean():.1f} ± {returns.std():.1f}" if len(returns) else "–",
                f"{self._best[seed]:.1f}",
                *("–" if number is None else f"{number:.3g}" for number in numbers),
            )
        if len(self.seeds) > 1:
            best = sum(self._best.values()) / len(self._best)
            table.add_row("mean", f"{evaluation.means.mean():.1f}", f"{best:.1f}", style="bold")
        return Group(head, table)


def _known(mean: float | None) -> float:
    """A mean, or -inf if it is missing, so that it is never the best."""
    return -float("inf") if mean is None or np.isnan(mean) else mean


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"
