"""The learning curve of a run."""

import io
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from t3d.errors import plain
from t3d.runs.folder import Run


def learning_curve(run: Run) -> Path:
    """Write report/learning-curve.png: the mean return of each evaluation, for every seed and their mean.

    Without evaluations it shows the returns of the training episodes.
    """
    rows, title = run.metrics, f"T3D on {plain(run.config['env'])}".replace("$", r"\$")
    kind = "evaluation" if run.has_evaluations else "episode"
    means = [
        {"seed": row["seed"], "step": row["step"], "mean": row["mean" if kind == "evaluation" else "return"]}
        for row in rows
        if row["kind"] == kind
    ]
    figure = draw_learning_curve([row for row in means if row["mean"] is not None], title, kind)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=144, metadata={"Software": None})
    run.write("report", "learning-curve.png", image.getvalue())
    return run.path / "report" / "learning-curve.png"


def draw_learning_curve(evaluations: list[dict[str, Any]], title: str, kind: str = "evaluation") -> Figure:
    """Draw a thin line per seed, a thick line for the mean, and a band from the minimum to the maximum."""
    curves: dict[int, dict[int, float]] = defaultdict(dict)
    for row in evaluations:
        curves[row["seed"]][row["step"]] = row["mean"]
    # Figure() instead of pyplot: no window, no global state, no leak.
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    common = sorted(set.intersection(*(set(curve) for curve in curves.values()))) if curves else []
    if len(curves) > 1 and common:
        columns = [[curve[step] for curve in curves.values()] for step in common]
        axes.fill_between(common, [min(c) for c in columns], [max(c) for c in columns], color="#3b6fb6", alpha=0.12)
        axes.plot(common, [sum(c) / len(c) for c in columns], color="#1d3f72", linewidth=2.6, label="mean", zorder=3)
    for seed, curve in sorted(curves.items()):
        width = 2.2 if len(curves) == 1 else 1.0
        axes.plot(list(curve), list(curve.values()), linewidth=width, alpha=0.85, label=f"seed {seed}")
    axes.set_xlabel("environment steps per seed")
    axes.set_ylabel("mean return of an evaluation" if kind == "evaluation" else "return of a training episode")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g}M" if x >= 1e6 else f"{x / 1e3:g}k" if x else "0")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if curves:
        axes.legend(frameon=False, ncols=1 + len(curves) // 6, fontsize="small")
    return figure
