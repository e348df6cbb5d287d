"""Makes, writes and reads run folders."""

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
from t3d.envs.factory import unsafe_arg
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
}  # the entries of a run folder and their kinds
LARGEST_SEED = 2**62 - 1
CHANGEABLE = ("steps", "on_env_error", "max_env_errors")  # settings that `resume` can change
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
)  # entries of config.json that are not options
COPIES = range(2, 1000)  # of runs that begin in the same second
Which = Literal["best", "last"]


def claim(out: str | Path | None, env: str, base: Path) -> "Run":
    """Make a new run folder below `base`; refuse one that is in use."""
    stem = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', env)}-{time.strftime('%Y%m%d-%H%M%S')}"
    paths = [Path(out)] if out is not None else [Path("runs", stem + more) for more in ("", *map("-{}".format, COPIES))]
    for path in paths:
        try:
            (base / path).mkdir(parents=True)
            return Run(path, base)
        except FileExistsError:
            if out is not None:
                refuse_used(base / path)
                return Run(path, base)
        except (OSError, ValueError) as error:
            raise T3DError(f"cannot make the folder {path}: {getattr(error, 'strerror', error)}.") from error
    raise T3DError(f"cannot make the folder {paths[0]}: runs is no folder, or full of runs of this second; give --out.")


def refuse_used(path: Path) -> None:
    """Raise T3DError if `path` cannot become a run folder. Leftovers of a run that never started do not count."""
    try:
        if not path.exists():
            return
    except (OSError, ValueError):
        return  # making the folder reports the reason
    if not path.is_dir():
        raise T3DError(f"{path} is a file, not a folder: choose another name with --out.")
    try:
        with Folder.open(path) as folder:
            held = "a run" if folder.kind(CONFIG) else "" if _never_started(folder) else "files"
    except T3DError as error:
        raise T3DError(f"cannot use it for --out: {error}") from error
    if held:
        raise T3DError(f"{path} already holds {held}: choose a new or empty folder with --out.")
    if not os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        raise T3DError(f"cannot write to the folder {path}: Permission denied.")


def _never_started(folder: Folder) -> bool:
    """Whether it holds only the empty files and folders that `Run.begin` makes before config.json."""

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
    """A run folder, of a running or a finished run."""

    def __init__(self, path: str | Path, base: Path | None = None) -> None:
        self.path = Path(path)
        self._absolute = (base or Path.cwd()) / self.path  # an environment may change the working directory
        self._identity: Identity | None = None  # of the locked folder, to detect that it was replaced
        self.log = Metrics(self.path, self.folder)

    def __repr__(self) -> str:
        return plain(f"<Run {self.path}: {self.config['env']}, seeds {shown(self.seeds)}>")

    def folder(self) -> Folder:
        """Open the folder."""
        return Folder.open(self._absolute, same=self._identity, called=self.path)

    # ------------------------------------------------------------------------------------------ reading

    @staticmethod
    def open(path: "str | Path | Run") -> "Run":
        """Open an existing run."""
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
                    raise T3DError(f"{run.path / name} is a {found}, not a {kind}: T3D did not make it.")
        return run

    @cached_property
    def config(self) -> dict[str, Any]:
        """The settings in config.json."""
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
        strange = next((row["seed"] for row in rows if row["seed"] not in seeds), None)
        if strange is not None:
            raise T3DError(f"{self.log.path} has a row of seed {strange}, but the run has no such seed.")
        return rows

    @cached_property
    def identity(self) -> str:
        """A hash of the settings that cannot change; checkpoints and policies store it."""
        values = {name: value for name, value in self.config.items() if name not in CHANGEABLE}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl that are evaluations: step, seed, returns, lengths, mean."""
        return [row for row in self.metrics if row["kind"] == "evaluation"]

    @property
    def has_evaluations(self) -> bool:
        """Whether training evaluates policies; if not, each seed has a last policy but no best one."""
        return bool(self.config.get("eval_every", 1))

    def best_seed(self, network: Network | None = None) -> int:
        """The seed with the highest best evaluation; the first seed if there is none."""
        if not self.has_evaluations:
            return self.seeds[0]
        with self._policies() as policies:
            there = [seed for seed in self.seeds if policies.kind(self.policy_path(seed, "best").name)]
        if len(there) < len(self.seeds):  # a seed has no best policy if every evaluation lost an episode
            there += [row["seed"] for row in self.evaluations if None not in row["returns"]]
        scored = [seed for seed in self.seeds if seed in there] or self.seeds[:1]
        if len(scored) == 1:
            return scored[0]
        return max(scored, key=lambda seed: _mean(self.policy(seed, network=network).card.returns))

    def policy(self, seed: int | None = None, which: Which = "best", network: Network | None = None) -> Policy:
        """Load the best or the last policy of a seed; by default of the best seed.

        A run without evaluations has no best policies: its last one is loaded.
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
                    + (" Use its last policy: which='last', --policy last." if which == "best" else "")
                )
            policy = policy_of_bytes(policies.read(path.name, files.MOST_TENSORS, tensors=True), path, network)
        if policy.card.run != self.identity:
            raise T3DError(f"{path} is the policy of a different run than config.json: the settings differ.")
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

    def refuse_lost_checkpoints(self) -> None:
        """Refuse to start again over the rows of a run whose checkpoints are gone: the first is older than any row."""
        if rows := self.metrics:
            reached = max(row["step"] for row in rows)
            raise T3DError(
                f"{self.path} has rows of metrics up to step {reached:,} and no checkpoint: they were removed."
                f" There is nothing to continue from. Its policies can still be used: {self.command('evaluate')}"
            )

    def command(self, verb: Literal["resume", "evaluate"], **options: Any) -> str:
        """The command that resumes or evaluates this run; a Python call if it needs a Python object."""
        config = self.config
        env = config["env"] if config["env"].isidentifier() else "make_env"
        needed = {"env": env if config.get("callable") else None}
        needed |= {name: config.get(name) and f"your_{name}" for name in ("network", "algorithm")}
        by_hand = [f"{name}={given}" for name, given in needed.items() if given]
        if by_hand and verb == "resume":
            given = [repr(str(self.path)), *by_hand]
            return f"t3d.resume({', '.join([*given, *(f'{name}={value!r}' for name, value in options.items())])})"
        words = [word for name, value in options.items() for word in (flag(name), value)]
        module = config["env"].rpartition(":")[0]
        words += ["--allow-module", module] if module else []
        words += ["--allow-env-args"] if unsafe_arg(config["env_args"]) else []
        return command(verb, self.path, *words)

    # ------------------------------------------------------------------------------------------ writing

    def policy_path(self, seed: int, which: Which) -> Path:
        return self.path / "policies" / f"{which}-seed-{seed}.safetensors"

    def lock(self) -> IO[bytes]:
        """Lock the folder until the returned file is closed or this process ends."""
        sentence = f"{self.path} is locked by {{}}: only one process can write to a run folder."
        with self.folder() as folder:
            held = folder.lock(".lock", sentence)
            self._identity = folder.identity()
            return held

    def begin(self, config: dict[str, Any]) -> None:
        """Start a new run: make the folders, metrics.jsonl and config.json."""
        refuse_used(self._absolute)  # again, under the lock: another process may have been faster
        with self.folder() as folder:
            for name in ("policies", "report"):
                with folder.inside(name, make=True):
                    pass
        self.log.begin()
        self.write_config(config)  # last: a folder with config.json is a run

    def write_config(self, config: dict[str, Any]) -> None:
        """Write config.json with a checksum."""
        values = {**config, "format": FORMAT}
        with self.folder() as folder:
            folder.write_json(CONFIG, files.with_sum(values))
        self.__dict__["config"] = values  # the cached property
        self.__dict__.pop("identity", None)  # computed from it

    def update_config(self, changed: dict[str, Any]) -> None:
        """Write config.json again if one of these values differs."""
        if any(self.config.get(name) != value for name, value in changed.items()):
            self.write_config({**self.config, **changed})

    def write(self, folder: str, name: str, content: bytes) -> None:
        """Write a file in policies/, report/ or errors/; make the folder if it is missing."""
        with self.folder() as run, run.inside(folder, make=True) as inner:
            inner.write(name, content)

    def save_policy(self, policy: Policy, which: Which) -> None:
        """Write a policy atomically, then its card as JSON."""
        path = self.policy_path(policy.card.seed, which)
        self.write("policies", path.name, policy.to_bytes())
        self.write("policies", path.with_suffix(".json").name, policy.card_to_bytes())

    def record(self, rows: list[dict[str, Any]]) -> None:
        """Append rows to metrics.jsonl."""
        self.log.append(rows)


def read_config(path: Path) -> dict[str, Any]:
    """Read the settings from a config.json that the user may have edited; ignore its checksum."""
    values = files.parse_object(files.read_bytes(path, MOST_CONFIG), path)
    values.pop(files.SUM, None)
    return checked_config(values, path)


def checked_config(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Check the environment and the seeds in a config; other code checks the options."""
    files.refuse_format(path, values.get("format"), FORMAT)
    seeds = values.get("seeds")
    if not (isinstance(seeds, list) and seeds and all(type(seed) is int for seed in seeds)):
        raise T3DError(f"{path}: seeds cannot be {shown(seeds)}; it must be a list of whole numbers.")
    if len(seeds) > MOST_SEEDS or len(set(seeds)) < len(seeds) or not all(0 <= seed <= LARGEST_SEED for seed in seeds):
        raise T3DError(
            f"{path}: seeds cannot be {shown(seeds)}; they must be at most {MOST_SEEDS:,} different whole numbers"
            " from 0 to 2^62 - 1."
        )
    if values.get("preset") not in list(PRESETS):
        raise T3DError(
            f"{path}: preset cannot be {shown(values.get('preset'))}; it must be one of {', '.join(PRESETS)}."
        )
    if not isinstance(values.get("env_args"), dict):
        raise T3DError(f"{path}: env_args cannot be {shown(values.get('env_args'))}; it must be an object.")
    for name, kinds in (("network", str), ("algorithm", str), ("callable", bool)):
        if not isinstance(values.get(name), kinds | None):
            raise T3DError(f"{path}: {name} cannot be {shown(values[name])}.")
    if not isinstance(values.get("env"), str) or len(values["env"]) > LONGEST_NAME:
        raise T3DError(f"{path}: env cannot be {shown(values.get('env'))}; it must be the id of an environment.")
    return values


def _mean(numbers: list[float | None]) -> float:
    known = [number for number in numbers if number is not None]
    return sum(known) / len(known) if known else -float("inf")
