"""Tables from the results of `t3d bench returns`, for the terminal and the docs."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from t3d import files
from t3d.bench import figures
from t3d.bench.suites import ABLATION, LATER, PAPER, SUITES, SuiteName, Task, Version, tasks_of
from t3d.errors import T3DError, plain, shown
from t3d.evaluate.statistics import best_mean, interquartile_mean, interval, last_mean
from t3d.files import Folder

MOST_SEEDS = 1_000  # per task: bootstrap intervals resample them ten thousand times
LARGEST = 1e100  # the square of a return is finite
TableRows = list[tuple[str, ...]]  # the first row is the header


@dataclass(frozen=True)
class Result:
    """The content of a result file."""

    name: str
    suite: str
    env: str
    variant: str
    steps: list[int]
    curves: NDArray[np.float64]  # (S, E) the mean of each evaluation's episodes
    values: tuple[NDArray[np.float64], NDArray[np.float64]] | None  # (S, E) predicted value, discounted return
    every: int
    episodes: int
    hardware: dict[str, Any]
    versions: dict[str, str]
    wall_seconds: float
    digest: str

    @property
    def task(self) -> str:
        """The environment without its version: HalfCheetah for HalfCheetah-v5."""
        return self.env.rsplit("-", 1)[0]


def read_results(folder: Path) -> dict[SuiteName, list[Result]]:
    """Read all result files in a folder, by suite, in the order of the suites."""
    found: dict[SuiteName, list[Result]] = {}
    if not folder.exists():
        return found
    with Folder.open(folder) as opened:
        for suite in SUITES:
            tasks = {task.name: task for version in get_args(Version) for task in tasks_of(suite, version=version)}
            there = [task for name, task in tasks.items() if opened.kind(f"{name}.json") is not None]
            if results := [read_result(opened, task) for task in there]:
                found[suite] = results
    return found


def read_result(folder: Folder, task: Task) -> Result:
    """Read and check the result file of a task."""
    path, content = folder.path / f"{task.name}.json", folder.read(f"{task.name}.json", files.MOST_JSON)
    values = files.parse_object(content, path)
    try:
        returns = np.array(values["returns"], float)
        if returns.ndim != 3 or not returns.size:
            raise ValueError("returns are not lists of seeds, evaluations and episodes")
        config = values["config"]
        pair = [np.array(values[key], float) for key in ("q_predicted", "discounted_return") if key in values]
        result = Result(
            name=path.stem,
            suite=values["suite"],
            env=values["env"],
            variant=values["variant"],
            steps=values["steps"],
            curves=returns.mean(2),
            values=(pair[0], pair[1]) if pair else None,
            every=config["eval_every"],
            episodes=config["eval_episodes"],
            hardware=values["hardware"],
            versions=values["versions"],
            wall_seconds=float(values["wall_seconds"]),
            digest=hashlib.sha256(content).hexdigest(),
        )
        _check(result, task)
    except (KeyError, ValueError, TypeError, IndexError, OverflowError) as error:
        if isinstance(error, T3DError):
            raise
        raise T3DError(f"{path} is not a file of t3d bench returns ({type(error).__name__}: {error}).") from error
    return result


def _check(result: Result, task: Task) -> None:
    """Refuse a result that `t3d bench returns` would not write."""
    if (result.suite, result.env, result.variant) != (task.suite, task.env, task.variant):
        raise ValueError(f"its task is {shown((result.suite, result.variant, result.env))}")
    if not (isinstance(result.hardware, dict) and isinstance(result.versions, dict)):
        raise ValueError("hardware and versions are not objects")
    machine = [result.hardware["processor"], result.hardware["gpu"] or ""]
    if not all(map(_is_plain_text, [*machine, *result.versions, *result.versions.values()])):
        raise ValueError("hardware and versions are not plain text")
    counts = {"steps": result.steps, "eval_every": [result.every], "eval_episodes": [result.episodes]}
    counts["cores"] = [result.hardware["cores"]]
    for name, numbers in counts.items():
        if not all(type(count) is int and 0 <= count < files.LARGEST_COUNT for count in numbers):
            raise ValueError(f"{name} are not whole numbers")
    if result.curves.shape[1] != len(result.steps):
        raise ValueError(f"{len(result.steps)} steps and {result.curves.shape[1]} evaluations")
    if len(result.curves) > MOST_SEEDS:
        raise ValueError(f"{len(result.curves):,} seeds; at most {MOST_SEEDS:,} are compared")
    if any(part.shape != result.curves.shape for part in result.values or ()):
        raise ValueError("q_predicted and discounted_return do not have a value for each evaluation of each seed")
    sizes = np.abs([*result.curves.flat, result.wall_seconds])
    if not (sizes < LARGEST).all() or any((np.abs(part) >= LARGEST).any() for part in result.values or ()):
        raise ValueError(f"numbers that are not finite, or beyond {LARGEST:g}")


def _is_plain_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 200 and plain(value) == value


# ------------------------------------------------------------------------------------------------------ tables


def returns_table(results: Sequence[Result]) -> TableRows:
    """One row per task: highest mean, final, last ten, IQM; for the paper suite also the paper's results."""
    with_paper = any(result.suite == "paper" for result in results)
    head = ("task", "seeds", "highest mean ± sd", "at the end", "last ten", "IQM of the last ten, 95 %")
    rows: TableRows = [head + (("TD3 paper", "authors' later, -v4", "reached") if with_paper else ()) + ("minutes",)]
    for result in results:
        curves = result.curves
        best, mean, deviation = best_mean(curves)
        last = last_mean(curves)
        low, high = interval([last], interquartile_mean)
        row: tuple[str, ...] = (
            result.env,
            str(len(curves)),
            f"{number(mean)} ± {number(deviation)}",
            f"{number(curves[:, -1].mean())} ± {number(curves[:, -1].std())}",
            f"{number(last.mean())} ± {number(last.std())}",
            f"{number(float(interquartile_mean(last)))} [{number(low)}, {number(high)}]",
        )
        if with_paper:
            row += _paper_columns(result, curves[:, best], mean)
        rows.append((*row, f"{result.wall_seconds / 60:.1f}"))
    return rows


def _paper_columns(result: Result, scores: NDArray[np.float64], mean: float) -> tuple[str, str, str]:
    paper, later = PAPER.get(result.task), LATER.get(result.task)
    if paper is None:
        return "–", "–", "–"
    _, high = interval([scores], lambda drawn: drawn.mean(1))
    if mean >= paper.best - paper.deviation:
        reached = "yes" if mean >= paper.best else "within one sd"
    else:
        reached = "as the later ones" if later is not None and high >= later else "no"
    return f"{number(paper.best)} ± {number(paper.deviation)}", "–" if later is None else number(later), reached


def overall(results: Sequence[Result]) -> str | None:
    """The interquartile mean over tasks and seeds, normalized: an untrained policy is 0, the paper's TD3 is 1."""
    groups = []
    for result in results:
        if result.suite == "paper" and result.task in PAPER:
            untrained = result.curves[:, 0].mean()
            groups.append((last_mean(result.curves) - untrained) / (PAPER[result.task].last - untrained))
    if len(groups) < 2:
        return None
    low, high = interval(groups, interquartile_mean)
    middle = float(interquartile_mean(np.concatenate(groups)))
    return (
        f"Over all {len(groups)} tasks, last ten evaluations, an untrained policy being 0 and the paper's TD3 being 1:"
        f" interquartile mean {middle:.2f}, 95 % interval {low:.2f} to {high:.2f}."
    )


def ablation_table(results: Sequence[Result]) -> TableRows:
    """Tasks by variants: the mean of the last ten evaluations with its interval, and the paper's result."""
    envs = {result.env: result.task for result in results}
    variants = list(dict.fromkeys(result.variant for result in results))
    rows: TableRows = [("task", *(title(variant) for variant in variants))]
    by = {(result.env, result.variant): result for result in results}
    for env, task in envs.items():
        cells, papers = [], []
        for variant in variants:
            result = by.get((env, variant))
            if result is None:
                cells.append("–")
            else:
                last = last_mean(result.curves)
                low, high = interval([last], lambda drawn: drawn.mean(1))
                cells.append(f"{number(last.mean())} [{number(low)}, {number(high)}]")
            paper = ABLATION.get(variant, {}).get(task)
            papers.append("–" if paper is None else number(paper))
        rows += [(env, *cells), ("the paper, 1M steps", *papers)]
    return rows


def ordering(results: Sequence[Result]) -> list[str]:
    """Sentences that compare TD3 with each variant, and say if the order is that of the paper."""
    sentences = []
    for env, task in {result.env: result.task for result in results}.items():
        last = {result.variant: last_mean(result.curves) for result in results if result.env == env}
        td3 = last.pop("td3", None)
        if td3 is None:
            continue
        low, high = interval([td3], lambda drawn: drawn.mean(1))
        for variant, scores in last.items():
            other_low, other_high = interval([scores], lambda drawn: drawn.mean(1))
            if other_high >= low and other_low <= high:
                sentences.append(f"{env}: TD3 and {title(variant)} cannot be told apart.")
                continue
            better = low > other_high
            paper = ABLATION[variant][task] < ABLATION["td3"][task]
            sentences.append(
                f"{env}: TD3 is {'above' if better else 'below'} {title(variant)},"
                f" {'as' if better == paper else 'NOT as'} in the paper."
            )
    return sentences


def overestimation(results: Sequence[Result]) -> list[str]:
    """Sentences that compare the predicted values with the discounted returns of the last ten evaluations."""
    sentences: dict[str, list[str]] = {}
    for result in results:
        if result.values is not None and result.variant in ("td3", "ddpg"):
            last = [part[:, -10:] for part in result.values]
            if any(np.isnan(part).all() for part in last):
                continue
            predicted, discounted = (float(np.nanmean(part)) for part in last)
            cell = f"{title(result.variant)} predicted {number(predicted)}, discounted return {number(discounted)}"
            share = f" ({(predicted - discounted) / abs(discounted):+.0%})" if discounted else ""
            sentences.setdefault(result.env, []).append(cell + share)
    return [f"{env}, value of a state: {'; '.join(cells)}." for env, cells in sentences.items()]


def title(variant: str) -> str:
    return {"td3": "TD3", "ddpg": "DDPG"}.get(variant, variant.replace("-", " "))


def number(x: float) -> str:
    """Format a number for a table."""
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.1f}" if abs(x) >= 10 else f"{x:.2f}"


# -------------------------------------------------------------------------------------------- terminal and docs


def show(results: dict[SuiteName, list[Result]]) -> list[tuple[str, TableRows, list[str]]]:
    """The title, the table and the sentences below it, for each suite."""
    parts = []
    for suite, found in results.items():
        rows = ablation_table(found) if suite == "ablation" else returns_table(found)
        below = (
            [*ordering(found), *overestimation(found)] if suite == "ablation" else [s for s in (overall(found),) if s]
        )
        parts.append((f"{suite}: {SUITES[suite].about}", rows, [*below, *_conditions(found)]))
    return parts


def _conditions(results: Sequence[Result]) -> list[str]:
    """Sentences on the evaluation settings, the hardware and the software."""
    by_every: dict[tuple[int, int, int], list[str]] = {}
    for result in results:
        key = result.steps[-1], result.every, result.episodes
        by_every.setdefault(key, []).append(f"{result.env}{' ' + title(result.variant) if result.variant else ''}")
    sentences = []
    for (steps, every, episodes), names in by_every.items():
        which = "" if len(by_every) == 1 else f" ({', '.join(names)})"
        sentences.append(f"{steps:,} steps, {episodes} noise-free episodes every {every:,}{which}.")
    places: dict[tuple[str, str, str], dict[int, None]] = {}  # the core counts of each
    for result in results:
        software = ", ".join(f"{name} {version}" for name, version in result.versions.items() if name != "t3d")
        place = result.hardware["gpu"] or "", result.hardware["processor"], software
        places.setdefault(place, {})[result.hardware["cores"]] = None
    where = [
        f"{gpu + ', ' if gpu else ''}{_listed(sorted(cores))} of {processor}; {software}."
        for (gpu, processor, software), cores in places.items()
    ]
    total = sum(result.wall_seconds for result in results)
    together = "" if len(results) == 1 else " if one comes after the other"
    return [*sentences, *where, f"{total / 60:.0f} minutes{together}, evaluations included."]


def _listed(cores: list[int]) -> str:
    """1 core; 2 cores; 1, 3 or 7 cores."""
    *others, last = map(str, cores)
    return f"{', '.join(others)}{' or ' if others else ''}{last} core{'' if cores == [1] else 's'}"


def write_docs(results: dict[SuiteName, list[Result]], page: Path) -> list[Path]:
    """Write the tables between their markers in a page, and the figures into the folder `figures` beside it."""
    text = files.read_text(page)
    drawn = {suite: figures.of_suite(suite, results.get(suite, [])) for suite in SUITES}
    for suite in SUITES:
        text = replaced(text, suite, section(suite, results.get(suite, []), list(drawn[suite])), page)
    files.make_folder(page.parent / "figures")
    written = [page]
    for suite, of_suite in drawn.items():
        for name, figure in of_suite.items():
            path = page.parent / "figures" / f"{name}.png"
            written.append(figures.save(figure, path, source_of(results[suite])))
    files.write_bytes(page, text.encode())
    return written


def source_of(results: Sequence[Result]) -> str:
    """The hash of the result files of a figure."""
    return hashlib.sha256("".join(result.digest for result in results).encode()).hexdigest()


def replaced(text: str, suite: str, new: str, page: Path) -> str:
    """Replace the text between the markers of a suite."""
    pattern = re.compile(rf"(<!-- {suite} -->\n).*?(<!-- /{suite} -->)", re.DOTALL)
    if not pattern.search(text):
        raise T3DError(f"{page} has no markers for the suite {suite}: <!-- {suite} --> and <!-- /{suite} -->.")
    return pattern.sub(lambda marks: f"{marks[1]}{new}{marks[2]}", text)


def section(suite: SuiteName, results: list[Result], pictures: list[str]) -> str:
    """The section of a suite in Markdown."""
    if not results:
        return f"Not trained yet: `t3d bench returns --suite {suite}`.\n"
    ((_, rows, below),) = show({suite: results})
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    shown = [f"![{name}](figures/{name}.png)" for name in pictures]
    return "\n".join([*lines, "", *(f"{sentence}  " for sentence in below), "", *shown, ""])
