"""Making a run folder, writing to it, and reading it again."""

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal, get_args

from t3d import files
from t3d.config import PRESETS
from t3d.custom_network import Network
from t3d.envs.factory import unusual
from t3d.errors import T3DError, command, plain, shown
from t3d.files import Folder, Identity
from t3d.options import flag
from t3d.policy import Policy, policy_of_bytes
from t3d.runs.manifest import newest_manifest
from t3d.runs.metrics import Metrics

FORMAT = 3
CONFIG = "config.json"
MOST_CONFIG = 2**20  # bytes
MOST_SEEDS = 10_000
LONGEST_NAME = 1000
OURS = {
    CONFIG: "file",
    "metrics.jsonl": "file",
    ".lock": "file",
    **dict.fromkeys(("policies", "report", "errors", "checkpoints", "replay"), "folder"),
}  # what a run folder holds, and of what kind it is
LARGEST_SEED = 2**62 - 1
CHANGEABLE = ("steps", "on_env_error", "max_env_errors")  # settings that `resume` may change
NOT_SETTINGS = (
    "format",
    "env",
    "env_args",
    "callable",
    "network",
    "algorithm",
    "seeds",
    "preset",
    "versions",
)  # what config.json holds beside the options
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
    """Say so where a folder cannot become a new run's. One that was killed before it was a run is as good as empty."""
    try:
        if not path.exists():
            return
    except (OSError, ValueError):
        return  # it cannot be made either, and why is said then
    if not path.is_dir():
        raise T3DError(f"{path} is a file, not a folder; give --out another name.")
    try:
        with Folder.open(path) as folder:
            held = "a run" if folder.kind(CONFIG) else "" if _never_began(folder) else "files"
    except T3DError as error:
        raise T3DError(f"cannot use it for --out: {error}") from error
    if held:
        raise T3DError(f"{path} already holds {held}; give --out a new or empty folder.")
    if not os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        raise T3DError(f"cannot write in the folder {path}: Permission denied.")


def _never_began(folder: Folder) -> bool:
    """Whether it holds nothing but what `Run.begin` makes before config.json: empty files and folders of our names."""

    def empty(name: str) -> bool:
        with folder.inside(name) as inner:
            return not inner.names()

    for name in folder.names():
        kind = folder.kind(name)
        if name in ("policies", "report") and kind == "folder" and empty(name):
            continue
        if name == "metrics.jsonl" and kind == "file" and folder.size(name) == 0:
            continue
        if name in (".lock", f".{CONFIG}.part", ".metrics.jsonl.part") and kind == "file":
            continue
        return False
    return True


class Run:
    """A run folder, being written or long done."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._at = Path.cwd() / self.path  # an environment may change where this process is
        self._same: Identity | None = None  # while it is locked it may not be replaced by another one
        self.log = Metrics(self.path, self.folder)

    def __repr__(self) -> str:
        return plain(f"<Run {self.path}: {self.config['env']}, seeds {shown(self.seeds)}>")

    def folder(self) -> Folder:
        """It, open."""
        return Folder.open(self._at, same=self._same, called=self.path)

    # ------------------------------------------------------------------------------------------ reading

    @staticmethod
    def open(path: "str | Path | Run") -> "Run":
        """An existing run."""
        run = path if isinstance(path, Run) else Run(path)
        try:
            there = run.path.exists()
        except (OSError, ValueError) as error:
            raise T3DError(f"cannot look for the run {run.path}: {error}.") from error
        if not there:
            raise T3DError(f"there is no run {run.path}.")
        with run.folder() as folder:
            if folder.kind(CONFIG) is None:
                raise T3DError(f"{run.path} is not a run folder: it holds no config.json.")
            for name, kind in OURS.items():
                if (found := folder.kind(name)) not in (kind, None):
                    raise T3DError(f"{run.path / name} is a {found}, not a {kind}: it was not made by T3D.")
        return run

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json, as it was written when the run began."""
        with self.folder() as folder:
            values = files.parse_object(folder.read(CONFIG, MOST_CONFIG), self.path / CONFIG)
        return checked_config(files.without_sum(values, self.path / CONFIG), self.path / CONFIG)

    @property
    def seeds(self) -> list[int]:
        return list(self.config["seeds"])

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Every row of metrics.jsonl."""
        with self.folder() as folder:
            newest = newest_manifest(folder, len(self.seeds), self.identity)
        rows, seeds = self.log.rows(newest.metrics if newest else None), set(self.seeds)
        if strange := next((row["seed"] for row in rows if row["seed"] not in seeds), None):
            raise T3DError(f"{self.log.path} speaks of the seed {strange}, and the run has no such seed.")
        return rows

    @property
    def identity(self) -> str:
        """What ties checkpoints and policies to it: a hash of the settings that stay as they are."""
        values = {name: value for name, value in self.config.items() if name not in CHANGEABLE}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The rows of the evaluations: step, seed, returns, lengths, mean."""
        return [row for row in self.metrics if row["kind"] == "evaluation"]

    @property
    def has_evaluations(self) -> bool:
        """Whether policies are evaluated in training; without it there is only the last policy of each seed."""
        return bool(self.config.get("eval_every", 1))

    def best_seed(self, network: Network | None = None) -> int:
        """The seed whose best policy scored highest; the first one where no evaluation gave one."""
        if not self.has_evaluations:
            return self.seeds[0]
        with self._policies() as policies:
            there = [seed for seed in self.seeds if policies.kind(self.policy_path(seed, "best").name)]
        if len(there) < len(self.seeds):  # every evaluation of a seed may have lost an episode; then it has no best one
            there += [row["seed"] for row in self.evaluations if None not in row["returns"]]
        scored = [seed for seed in self.seeds if seed in there] or self.seeds[:1]
        if len(scored) == 1:
            return scored[0]
        return max(scored, key=lambda seed: _mean(self.policy(seed, network=network).card.returns))

    def policy(self, seed: int | None = None, which: Which = "best", network: Network | None = None) -> Policy:
        """The policy of a seed at its best evaluation or the last one; by default of the best seed.

        Without evaluations there is no best one, and the last one is taken.
        """
        if which not in get_args(Which):
            raise T3DError(f"there is no {shown(which)} policy; there are {', '.join(get_args(Which))}.")
        if not self.has_evaluations:
            which = "last"
        if seed is None:
            seed = self.best_seed(network)
        if seed not in self.seeds:
            raise T3DError(f"{self.path} has no seed {seed}; it has {', '.join(map(str, self.seeds))}.")
        path = self.policy_path(seed, which)
        with self._policies() as policies:
            if policies.kind(path.name) is None:
                raise T3DError(
                    f"{self.path} holds no {which} policy of seed {seed} yet ({path.name} is missing)."
                    + (" Its last one is there: which='last', --policy last." if which == "best" else "")
                )
            policy = policy_of_bytes(policies.read(path.name, files.MOST_TENSORS, tensors=True), path, network)
        if policy.card.run != self.identity:
            raise T3DError(f"{path} is the policy of another run than config.json, which has other settings.")
        if policy.card.seed != seed:
            raise T3DError(f"{path} holds the policy of seed {policy.card.seed}, not of seed {seed}.")
        return policy

    @contextmanager
    def _policies(self) -> Iterator[Folder]:
        with self.folder() as folder:
            if folder.kind("policies") is None:
                raise T3DError(f"{self.path} holds no policies yet.")
            with folder.inside("policies") as policies:
                yield policies

    def nothing_whole(self) -> T3DError:
        """That no checkpoint is left to continue from."""
        return T3DError(
            f"no checkpoint of {self.path} is whole: there is nothing to continue from. Its policies can still be used:"
            f" {self.command('evaluate')}"
        )

    def command(self, verb: Literal["resume", "evaluate"], **options: Any) -> str:
        """What to type to go on with this run, or in Python where no file brings its environment or network back."""
        config = self.config
        by_hand = [
            name for name in ("env", "network", "algorithm") if config.get("callable" if name == "env" else name)
        ]
        if by_hand and verb == "resume":
            given = [repr(str(self.path)), *(f"{name}=…" for name in by_hand)]
            return f"t3d.resume({', '.join([*given, *(f'{name}={value!r}' for name, value in options.items())])})"
        words = [word for name, value in options.items() for word in (flag(name), value)]
        module = config["env"].rpartition(":")[0]
        words += ["--allow-module", module] if module else []
        words += ["--allow-env-args"] if unusual(config["env_args"]) else []
        return command(verb, self.path, *words)

    # ------------------------------------------------------------------------------------------ writing

    def policy_path(self, seed: int, which: Which) -> Path:
        return self.path / "policies" / f"{which}-seed-{seed}.safetensors"

    def lock(self) -> IO[str]:
        """Be the only one who writes here, until the file that is returned is closed or this process ends."""
        sentence = f"{self.path} is being written by {{}}: one run folder has one writer."
        with self.folder() as folder:
            held = folder.lock(".lock", sentence)
            self._same = folder.identity()
            return held

    def begin(self, config: dict[str, Any]) -> None:
        """Write what is to be done."""
        refuse_used(self.path)  # now that it is locked: another process may have been faster
        with self.folder() as folder:
            for name in ("policies", "report"):
                with folder.inside(name, make=True):
                    pass
        self.log.begin()
        self.write_config(config)  # last: it makes the folder a run

    def write_config(self, config: dict[str, Any]) -> None:
        """config.json, with a checksum of it."""
        values = {**config, "format": FORMAT}
        with self.folder() as folder:
            folder.write_json(CONFIG, files.with_sum(values))
        self.__dict__["config"] = values  # what was read before

    def update_config(self, changed: dict[str, Any]) -> None:
        """Write config.json again, if one of these values is another one."""
        if any(self.config.get(name) != value for name, value in changed.items()):
            self.write_config({**self.config, **changed})

    def write(self, folder: str, name: str, content: bytes) -> None:
        """A file in policies/, report/ or errors/, which is made again if it is gone."""
        with self.folder() as run, run.inside(folder, make=True) as inner:
            inner.write(name, content)

    def save_policy(self, policy: Policy, which: Which) -> None:
        """Write a policy, whole or not at all, and then a copy of its card for people."""
        path = self.policy_path(policy.card.seed, which)
        self.write("policies", path.name, policy.to_bytes())
        self.write("policies", path.with_suffix(".json").name, policy.card_to_bytes())

    def record(self, rows: list[dict[str, Any]]) -> None:
        """Append rows to metrics.jsonl."""
        self.log.append(rows)


def read_config(path: Path) -> dict[str, Any]:
    """The settings in a config.json that somebody may have edited: its checksum does not matter."""
    values = files.parse_object(files.read_bytes(path, MOST_CONFIG), path)
    values.pop(files.SUM, None)
    return checked_config(values, path)


def checked_config(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """A config with an environment and seeds that make sense; the options are checked where they are used."""
    files.refuse_format(path, values.get("format"), FORMAT)
    seeds = values.get("seeds")
    if not (isinstance(seeds, list) and seeds and all(type(seed) is int for seed in seeds)):
        raise T3DError(f"{path}: seeds cannot be {shown(seeds)}; it is a list of whole numbers.")
    if len(seeds) > MOST_SEEDS or len(set(seeds)) < len(seeds) or not all(0 <= seed <= LARGEST_SEED for seed in seeds):
        raise T3DError(
            f"{path}: seeds cannot be {shown(seeds)}; they are at most {MOST_SEEDS:,} different whole numbers from 0 to"
            " 2^62 - 1."
        )
    if values.get("preset") not in list(PRESETS):
        raise T3DError(f"{path}: preset cannot be {shown(values.get('preset'))}; it is one of {', '.join(PRESETS)}.")
    if not isinstance(values.get("env_args"), dict):
        raise T3DError(f"{path}: env_args cannot be {shown(values.get('env_args'))}; it is an object.")
    for name, kinds in (("network", str), ("algorithm", str), ("callable", bool)):
        if not isinstance(values.get(name), kinds | None):
            raise T3DError(f"{path}: {name} cannot be {shown(values[name])}.")
    if not isinstance(values.get("env"), str) or len(values["env"]) > LONGEST_NAME:
        raise T3DError(f"{path}: env cannot be {shown(values.get('env'))}; it is the id of an environment.")
    return values


def _mean(numbers: list[float | None]) -> float:
    known = [number for number in numbers if number is not None]
    return sum(known) / len(known) if known else -float("inf")
