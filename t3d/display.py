"""What a run shows while it trains: a live table in a terminal, plain lines elsewhere."""

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from t3d.evaluation import Evaluation


class _Console(Console):
    """A console that falls silent when nobody reads it any more, as behind `| head`: the run goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def open_console(quiet: bool = False) -> Console:
    """Standard output, without colours for numbers and without breaking long lines."""
    return _Console(highlight=False, soft_wrap=True, quiet=quiet)


class Display:
    """Shows progress; it reads what it is given and changes nothing."""

    def __init__(
        self,
        steps: int,
        seeds: Sequence[int],
        random_steps: int = 0,
        quiet: bool = False,
        console: Console | None = None,
    ) -> None:
        self.steps, self.seeds, self.random_steps = steps, list(seeds), random_steps
        self.console = console or open_console(quiet)
        self._step = self._marked_step = 0
        self._started = self._marked = time.perf_counter()
        self._rate = 0.0
        self._lost = 0
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
        """A run that is taken up again: the step it is at, and the rows of its evaluations so far."""
        self._step = self._marked_step = step
        for row in evaluations:
            self._best[row["seed"]] = max(row["mean"], self._best.get(row["seed"], -float("inf")))
        last = evaluations[-len(self.seeds) :]
        if last:
            returns, lengths = (np.array([row[name] for row in last]) for name in ("returns", "lengths"))
            self._evaluation = (last[0]["step"], Evaluation(returns, lengths))

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False)

    def advance(self, step: int, lost: int = 0) -> None:
        """Called at every step, so it only looks at the clock now and then."""
        if lost > self._lost:
            self._lost = lost
            self.say(f"step {step:,}: a worker process died or hung and was replaced ({lost} so far)")
        before, self._step = self._step, step
        if step // 64 > before // 64:
            now = time.perf_counter()
            if before < self.random_steps <= step:  # what follows is slower: the pace so far tells nothing of it
                self._rate, self._marked, self._marked_step = 0.0, now, step
            elif now - self._marked > 2:
                rate = (step - self._marked_step) / (now - self._marked)
                self._rate = rate if self._rate == 0 else 0.7 * self._rate + 0.3 * rate
                self._marked, self._marked_step = now, step

    def training(self, rows: list[dict[str, Any]]) -> None:
        """The losses and values of the last interval."""
        self._training = {row["seed"]: row for row in rows}

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """An evaluation of every seed; what was shown already is not shown again."""
        if self._evaluation is not None and self._evaluation[0] == step:
            return
        self._evaluation = (step, evaluation)
        means = evaluation.returns.mean(1)
        for seed, mean in zip(self.seeds, means, strict=True):
            self._best[seed] = max(float(mean), self._best.get(seed, -float("inf")))
        if self._live is None:
            each = "" if len(self.seeds) == 1 else "  (" + ", ".join(f"{mean:.1f}" for mean in means) + ")"
            self.say(
                f"step {step:>9,} of {self.steps:,}   return {means.mean():9.1f}{each}"
                f"   {self._losses()}   {self._pace()}"
            )

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
        if self._evaluation is None:
            return Group(head, Text("the first evaluation is under way …", style="dim"))
        step, evaluation = self._evaluation
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("seed")
        for title in (f"return at {step:,}", "best", "critic loss", "actor loss", "mean Q"):
            table.add_column(title, justify="right")
        for seed, returns in zip(self.seeds, evaluation.returns, strict=True):
            row = self._training.get(seed, {})
            numbers = (row.get(name) for name in ("critic_loss", "actor_loss", "q_mean"))
            table.add_row(
                str(seed),
                f"{returns.mean():.1f} ± {returns.std():.1f}",
                f"{self._best[seed]:.1f}",
                *("–" if number is None else f"{number:.3g}" for number in numbers),
            )
        if len(self.seeds) > 1:
            best = sum(self._best.values()) / len(self._best)
            table.add_row("mean", f"{evaluation.returns.mean():.1f}", f"{best:.1f}", style="bold")
        return Group(head, table)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"
