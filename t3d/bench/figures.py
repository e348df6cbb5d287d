"""Figures from the results of `t3d bench returns`."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from t3d import files
from t3d.bench.suites import PAPER, SuiteName

if TYPE_CHECKING:
    from t3d.bench.tables import Result

COLOURS = {
    "td3": "#1d3f72",
    "no-delay": "#2b8a6b",
    "no-smoothing": "#c98a1b",
    "one-critic": "#8a4fa3",
    "ddpg": "#b23a48",
}


def of_suite(suite: SuiteName, results: Sequence["Result"]) -> dict[str, Figure]:
    """The figures of a suite by name."""
    if not results:
        return {}
    if suite != "ablation":
        return {f"returns-{suite}": curves(results)}
    return {"returns-ablation": variants(results), "values-ablation": values(results)}


def curves(results: Sequence["Result"]) -> Figure:
    """Draw the curves of all seeds, their mean, and the result of the paper."""
    figure, axes = _grid(len(results))
    for ax, result in zip(axes, results, strict=True):
        for curve in result.curves:
            ax.plot(result.steps, curve, color="#3b6fb6", linewidth=0.6, alpha=0.6)
        ax.plot(result.steps, result.curves.mean(0), color="#1d3f72", linewidth=2)
        paper = PAPER.get(result.task)
        if paper is not None:
            ax.axhline(paper.best, color="#b23a48", linestyle="--", linewidth=1.2)
            ax.annotate("TD3 paper, 1M steps", (0.02, paper.best), xycoords=("axes fraction", "data"), color="#b23a48",
                        fontsize="x-small", va="bottom")  # fmt: skip
        _finish(ax, result.env)
    return figure


def variants(results: Sequence["Result"]) -> Figure:
    """Draw the mean over seeds of each variant, with a band of one standard error."""
    envs = list(dict.fromkeys(result.env for result in results))
    figure, axes = _grid(len(envs))
    for ax, env in zip(axes, envs, strict=True):
        for result in (result for result in results if result.env == env):
            colour, mean = COLOURS[result.variant], result.curves.mean(0)
            error = result.curves.std(0, ddof=1) / np.sqrt(len(result.curves))
            ax.plot(result.steps, mean, color=colour, linewidth=1.6, label=result.variant)
            ax.fill_between(result.steps, mean - error, mean + error, color=colour, alpha=0.15, linewidth=0)
        _finish(ax, env)
    axes[0].legend(frameon=False, fontsize="x-small")
    return figure


def values(results: Sequence["Result"]) -> Figure:
    """Draw the value predicted by the first critic and the discounted return in evaluations, for TD3 and DDPG."""
    shown = [result for result in results if result.values is not None and result.variant in ("td3", "ddpg")]
    envs = list(dict.fromkeys(result.env for result in shown))
    figure, axes = _grid(len(envs), "mean value of the states of an evaluation")
    for ax, env in zip(axes, envs, strict=True):
        for result in (result for result in shown if result.env == env):
            assert result.values is not None
            for numbers, style, word in zip(
                result.values, ("-", ":"), ("q_predicted", "discounted_return"), strict=True
            ):
                known = ~np.isnan(numbers).all(0)  # the first evaluations may have no value for any seed
                mean = np.nanmean(numbers[:, known], 0)
                steps = np.array(result.steps)[known]
                ax.plot(steps, mean, style, color=COLOURS[result.variant], label=f"{result.variant} {word}")
        _finish(ax, env)
    if envs:
        axes[0].legend(frameon=False, fontsize="x-small")
    return figure


def _grid(count: int, label: str = "mean return of an evaluation") -> tuple[Figure, list[Any]]:
    columns = min(4, max(count, 1))
    rows = -(-max(count, 1) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.6 * rows), layout="constrained")
    axes = list(np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel())
    for ax in axes[count:]:
        ax.set_visible(False)
    figure.supxlabel("environment steps per seed", fontsize="small")
    figure.supylabel(label, fontsize="small")
    return figure, axes[:count]


def _finish(ax: Any, title: str) -> None:
    ax.set_title(title, loc="left", fontsize="small", fontweight="bold")
    ax.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g}M" if x >= 1e6 else f"{x / 1e3:g}k" if x else "0")
    ax.tick_params(labelsize="x-small")
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path, source: str) -> Path:
    """Write a PNG with the hash of its source data in its metadata."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110, metadata={"Software": None, "Source": source})
    files.write_bytes(path, image.getvalue())
    return path
