"""Making a run folder, writing to it, and reading it again."""

import json
import os
import re
import time
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal, get_args

from t3d import files
from t3d.config import PRESETS
from t3d.errors import T3DError
from t3d.modules import Network
from t3d.policy import Policy, read_policy

FORMAT = 1
NOT_KNOBS = (
    "format",
    "env",
    "env_args",
    "callable",
    "network",
    "seeds",
    "preset",
    "versions",
)  # what config.json holds beside the knobs
Which = Literal["best", "last"]


def claim(out: str | Path | None, env: str) -> Path:
    """A new, empty run folder; one that is already used is refused."""
    stem = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', env)}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, count = Path("runs", stem) if out is None else Path(out), 1
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if out is not None:
                refuse_used(path)
                return path
            count += 1
            path = Path("runs", f"{stem}-{count}")
        except (OSError, ValueError) as error:
            raise T3DError(f"cannot make the folder {path}: {getattr(error, 'strerror', error)}.") from error


def refuse_used(path: Path) -> None:
    """Say so where a folder cannot become a new run's."""
    try:
        if not path.exists():
            return
    except (OSError, ValueError):
        return  # it cannot be made either, and why is said then
    if not path.is_dir():
        raise T3DError(f"{path} is a file, not a folder; give --out another name.")
    try:
        held = "a run" if (path / "config.json").exists() else "files" if any(path.iterdir()) else ""
    except OSError as error:
        raise T3DError(f"cannot use the folder {path}: {error.strerror}.") from error
    if held:
        raise T3DError(f"{path} already holds {held}; give --out a new or empty folder.")
    if not os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        raise T3DError(f"cannot write in the folder {path}: Permission denied.")


class Run:
    """A run folder, being written or long done."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"<Run {self.path}: {self.config['env']}, seeds {self.seeds}>"

    # ------------------------------------------------------------------------------------------ reading

    @staticmethod
    def open(path: "str | Path | Run") -> "Run":
        """An existing run."""
        run = path if isinstance(path, Run) else Run(path)
        if not run.path.exists():
            raise T3DError(f"there is no run {run.path}.")
        if not (run.path / "config.json").is_file():
            raise T3DError(f"{run.path} is not a run folder: it holds no config.json.")
        return run

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json, as it was written when the run began."""
        return read_config(self.path / "config.json")

    @property
    def seeds(self) -> list[int]:
        return list(self.config["seeds"])

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Every row of metrics.jsonl."""
        path, rows = self.path / "metrics.jsonl", []
        whole, _, _ = files.read_text(path).rpartition("\n")  # a line without its end was cut off by a crash
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                row = json.loads(line)
                row["kind"]
            except (ValueError, TypeError, KeyError) as error:
                raise T3DError(f"{path}, line {number}, is not a row of metrics ({error}).") from error
            rows.append(row)
        return rows

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The rows of the evaluations: step, seed, returns, lengths, mean."""
        return [row for row in self.metrics if row["kind"] == "evaluation"]

    def best_seed(self, network: Network | None = None) -> int:
        """The seed whose best policy scored highest."""
        return max(self.seeds, key=lambda seed: _mean(self.policy(seed, network=network).card.returns))

    def policy(self, seed: int | None = None, which: Which = "best", network: Network | None = None) -> Policy:
        """The policy of a seed at its best evaluation or the last one; by default of the best seed."""
        if seed is None:
            seed = self.best_seed(network)
        if which not in get_args(Which):
            raise T3DError(f"there is no '{which}' policy; there are {', '.join(get_args(Which))}.")
        if seed not in self.seeds:
            raise T3DError(f"{self.path} has no seed {seed}; it has {', '.join(map(str, self.seeds))}.")
        path = self.policy_path(seed, which)
        if not path.exists():
            raise T3DError(f"{self.path} holds no {which} policy of seed {seed} yet ({path.name} is missing).")
        policy = read_policy(path, network)
        if policy.card.seed != seed:
            raise T3DError(f"{path} holds the policy of seed {policy.card.seed}, not of seed {seed}.")
        return policy

    # ------------------------------------------------------------------------------------------ writing

    def policy_path(self, seed: int, which: Which) -> Path:
        return self.path / "policies" / f"{which}-seed-{seed}.safetensors"

    def lock(self) -> IO[str]:
        """Be the only one who writes here, until the file that is returned is closed or this process ends."""
        sentence = f"{self.path} is being written by {{}}: one run folder has one writer."
        return files.lock(self.path / ".lock", sentence)

    def begin(self, config: dict[str, Any]) -> None:
        """Write what is to be done."""
        for folder in ("policies", "report"):
            files.make_folder(self.path / folder)
        files.append_lines(self.path / "metrics.jsonl", [])
        files.write_json(self.path / "config.json", {"format": FORMAT, **config})  # last: it makes the folder a run

    def restart(self) -> None:
        """Before the first checkpoint: forget what was recorded."""
        files.write_bytes(self.path / "metrics.jsonl", b"")

    def record(self, rows: list[dict[str, Any]]) -> None:
        """Append rows to metrics.jsonl."""
        files.append_lines(self.path / "metrics.jsonl", [json.dumps(row, allow_nan=False) for row in rows])


def read_config(path: Path) -> dict[str, Any]:
    """A config.json with an environment and seeds that make sense; the knobs are checked where they are used."""
    values = files.read_json(path)
    if values.get("format") != FORMAT:
        raise T3DError(f"{path} has the format {values.get('format')!r}; this version reads {FORMAT}.")
    seeds = values.get("seeds")
    if not (isinstance(seeds, list) and seeds and all(type(seed) is int for seed in seeds)):
        raise T3DError(f"{path}: seeds cannot be {seeds!r}; it is a list of whole numbers.")
    if values.get("preset") not in list(PRESETS):
        raise T3DError(f"{path}: preset cannot be {values.get('preset')!r}; it is one of {', '.join(PRESETS)}.")
    if not isinstance(values.get("env_args"), dict):
        raise T3DError(f"{path}: env_args cannot be {values.get('env_args')!r}; it is an object.")
    if not isinstance(values.get("env"), str):
        raise T3DError(f"{path}: env cannot be {values.get('env')!r}; it is the id of an environment.")
    return values


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)
