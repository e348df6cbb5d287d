"""Trains a suite: one run per task with all seeds, and one result file with all returns."""

import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from t3d import api, files
from t3d.bench.suites import Task
from t3d.bench.tables import read_result
from t3d.errors import T3DError
from t3d.files import Folder
from t3d.limits import cores
from t3d.runs.folder import Run

RESULTS, RUNS = Path("benchmarks/results/returns"), Path("runs/bench")


def train_suite(
    tasks: Sequence[Task],
    seeds: int,
    settings: dict[str, Any],
    results: Path,
    runs: Path,
    say: Callable[[str], None],
    progress: bool = True,
) -> None:
    """Train the tasks without results and resume interrupted ones; `settings` override those of the suite."""
    files.make_folder(results)
    spent = 0.0
    for task in tasks:
        path = results / f"{task.name}.json"
        with Folder.open(results) as folder:
            there = read_result(folder, task) if folder.kind(path.name) else None
        if there is not None:
            size = f"{len(there.curves)} seeds and {there.steps[-1]:,} steps"
            say(f"{path} exists already, with {size}: it is left alone.")
            seconds = there.wall_seconds
        else:
            run, seconds = _trained(task, seeds, settings, runs, progress)
            files.write_bytes(path, _compact(_result(task, run, seconds)).encode())
            say(f"{task.name}: written to {path}")
        spent += seconds
    say(f"{len(tasks)} tasks, {spent / 60:.1f} minutes in all.")


def _trained(task: Task, seeds: int, settings: dict[str, Any], runs: Path, progress: bool) -> tuple[Run, float]:
    """Return the finished run and its training time in seconds, including earlier sessions."""
    folder = runs / task.name
    clock = Clock(runs / f"{task.name}.clock.json", folder / "metrics.jsonl")
    given = {**task.settings, **settings}
    if (folder / "config.json").exists():
        _refuse_other(Run.open(folder), seeds, given)
        run = api.resume(folder, progress=progress)
    else:
        fast = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
        given.setdefault("precision", "tf32" if fast and settings.get("device") != "cpu" else "fp32")
        run = api.train(task.env, seeds=seeds, out=folder, preset=task.preset, progress=progress, **given)
    return run, clock.seconds()


def _refuse_other(run: Run, seeds: int, given: dict[str, Any]) -> None:
    """Raise T3DError if the existing run has other settings."""
    requested = {"seeds": list(range(seeds)), **given}
    requested.pop("accelerate", None)  # it changes where nothing can be compiled
    for name, value in json.loads(json.dumps(requested)).items():  # as config.json has them: lists for tuples
        if value != "auto" and run.config.get(name) != value:
            raise T3DError(
                f"{run.path} was started with {name} {run.config.get(name)}, but now it is {value}."
                " Use the same settings, choose another folder with --runs, or remove the folder."
            )


class Clock:
    """The training time of a run over all sessions; a session ends at its last write to `last_write`."""

    def __init__(self, path: Path, last_write: Path) -> None:
        self._path = path
        # Without this file there is no run, or it was removed.
        known = path.exists() and last_write.exists()
        self._sessions = _sessions_in(path) if known else []
        if self._sessions:
            self._sessions[-1][1] = max(self._sessions[-1][0], last_write.stat().st_mtime)
        now = time.time()
        self._sessions.append([now, now])
        files.make_folder(path.parent)
        files.write_json(path, {"turns": self._sessions})

    def seconds(self) -> float:
        self._sessions[-1][1] = time.time()
        return round(sum(end - begin for begin, end in self._sessions), 1)


def _sessions_in(path: Path) -> list[list[float]]:
    """The sessions in the file of a clock: pairs of times."""
    turns = files.read_json(path).get("turns")
    pairs: list[Any] = turns if isinstance(turns, list) else [None]
    if not all(isinstance(pair, list) and list(map(type, pair)) == [float, float] for pair in pairs):
        raise T3DError(f"{path} does not hold the times of a run; without this file, they are counted from now.")
    return pairs


def _result(task: Task, run: Run, seconds: float) -> dict[str, Any]:
    rows = run.evaluations
    rows_by_seed = {seed: [row for row in rows if row["seed"] == seed] for seed in run.seeds}
    config = {name: value for name, value in run.config.items() if name not in ("format", "versions", "seeds")}
    result = {
        "env": task.env,
        "suite": task.suite,
        "variant": task.variant,
        "preset": task.preset,
        "config": config,
        "steps": [row["step"] for row in rows_by_seed[run.seeds[0]]],
        "seeds": run.seeds,
        "returns": [[_rounded(row["returns"]) for row in rows] for rows in rows_by_seed.values()],
        "versions": run.config["versions"],
        "hardware": this_machine(),
        "wall_seconds": seconds,
    }
    if "q_predicted" in rows[0]:
        for name in ("q_predicted", "discounted_return"):
            result[name] = [_rounded([row[name] for row in rows]) for rows in rows_by_seed.values()]
    return result


def _rounded(numbers: list[float | None]) -> list[float | None]:
    """Round to seven digits, which keeps the files small."""
    return [number if number is None else float(f"{number:.7g}") for number in numbers]


def this_machine() -> dict[str, Any]:
    """The hardware, without the host name."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"processor": processor(), "cores": cores(), "gpu": gpu}


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _compact(value: dict[str, Any]) -> str:
    """JSON with one line per field."""
    lines = (f"{json.dumps(name)}: {json.dumps(part, separators=(',', ':'))}" for name, part in value.items())
    return "{" + ",\n".join(lines) + "}\n"
