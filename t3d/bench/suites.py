"""The tasks of each suite with their settings, and published results on them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from t3d.config import Preset
from t3d.errors import T3DError, nearest

SuiteName = Literal["paper", "quick", "ablation", "pixels", "documents"]
Version = Literal["v5", "v4"]


@dataclass(frozen=True)
class Task:
    """An environment with settings."""

    suite: SuiteName
    env: str
    settings: dict[str, Any]
    variant: str = ""
    preset: Preset = "td3"

    @property
    def name(self) -> str:
        """The name of its files."""
        return "-".join(part for part in (self.suite, self.variant, self.env) if part)


@dataclass(frozen=True)
class Suite:
    """A set of tasks."""

    about: str
    tasks: tuple[Task, ...] = field(repr=False)
    seeds: int


# TD3 without each of its parts. Without all three it is DDPG with TD3's networks and exploration.
VARIANTS: dict[str, dict[str, Any]] = {
    "no-delay": {"policy_delay": 1},
    "no-smoothing": {"target_noise": 0.0},
    "one-critic": {"critics": 1},
    "ddpg": {"policy_delay": 1, "target_noise": 0.0, "critics": 1},
}

_PAPER = ("HalfCheetah", "Hopper", "Walker2d", "Ant", "Reacher", "InvertedPendulum", "InvertedDoublePendulum")
_QUICK = {
    "Pendulum-v1": 10_000,
    "InvertedPendulum-v5": 20_000,
    "Reacher-v5": 40_000,
    "InvertedDoublePendulum-v5": 30_000,
}
_ABLATION = {"steps": 500_000, "eval_every": 10_000, "eval_values": "on"}
_PIXELS = {
    "steps": 20_000,
    "eval_every": 2_000,
    "eval_episodes": 5,
    "pixels": 32,
    "batch_size": 64,
    "precision": "fp32",
}
_DOCUMENTS = {"steps": 500_000, "eval_every": 5_000}
_BULLET = ("AntBulletEnv-v0", "HalfCheetahBulletEnv-v0", "Walker2DBulletEnv-v0")

SUITES: dict[SuiteName, Suite] = {
    "paper": Suite(
        "The seven tasks of the TD3 paper's Table 1, a million steps each.",
        tuple(Task("paper", f"{name}-v5", {"steps": 1_000_000, "eval_every": 5_000}) for name in _PAPER),
        seeds=10,
    ),
    "quick": Suite(
        "Four small tasks, for two cores and less than forty minutes.",
        tuple(
            Task("quick", env, {"steps": steps, "eval_every": steps // 10, "accelerate": "compile"})
            for env, steps in _QUICK.items()
        ),
        seeds=5,
    ),
    "ablation": Suite(
        "TD3 without each of its three ideas, and without all of them.",
        tuple(
            Task("ablation", f"{name}-v5", {**_ABLATION, **settings}, variant)
            for name in ("Hopper", "Walker2d", "HalfCheetah", "Ant")
            for variant, settings in {"td3": {}, **VARIANTS}.items()
        ),
        seeds=10,
    ),
    "pixels": Suite(
        "Pendulum seen through three frames of 32 x 32 pixels.",
        (Task("pixels", "Pendulum-v1", _PIXELS),),
        seeds=2,
    ),
    "documents": Suite(
        "The documents' settings on PyBullet's tasks, which the course that they come from used.",
        tuple(
            Task("documents", name, _DOCUMENTS, preset="documents")
            for name in _BULLET
        ),
        seeds=2,
    ),
}  # fmt: skip


def tasks_of(suite: SuiteName, only: Sequence[str] = (), version: Version = "v5") -> list[Task]:
    """The tasks of a suite, or those that `only` names, with a version of Gymnasium's MuJoCo tasks."""
    tasks = [
        Task(t.suite, t.env.replace("-v5", f"-{version}"), t.settings, t.variant, t.preset) for t in SUITES[suite].tasks
    ]
    for word in only:
        if not any(_is_named(task, word) for task in tasks):
            known = sorted({task.env for task in tasks} | {task.variant for task in tasks if task.variant})
            raise T3DError(f"the suite {suite} has no task '{word}'; it has {', '.join(known)}.{nearest(word, known)}")
    return [task for task in tasks if not only or all(_matches(task, only))]


def _is_named(task: Task, word: str) -> bool:
    return word in (task.env, task.env.rsplit("-", 1)[0], task.variant)


def _matches(task: Task, only: Sequence[str]) -> list[bool]:
    """Whether the task matches the named variants and the named environments; unnamed groups are left out."""
    variants = [word for word in only if word in {"td3", *VARIANTS}]
    envs = [word for word in only if word not in variants]
    return [any(_is_named(task, word) for word in words) for words in (variants, envs) if words]


class Reached(NamedTuple):
    """The highest mean over seeds, its standard deviation, and the mean of the last ten evaluations."""

    best: float
    deviation: float
    last: float


# Fujimoto, van Hoof & Meger 2018: Table 1 on the -v1 tasks, and the last ten evaluations of the curves.
PAPER: dict[str, Reached] = {
    "HalfCheetah": Reached(9637, 859, 9533),
    "Hopper": Reached(3564, 115, 3305),
    "Walker2d": Reached(4683, 540, 4565),
    "Ant": Reached(4372, 1000, 4185),
    "Reacher": Reached(-3.60, 0.56, -4.10),
    "InvertedPendulum": Reached(1000, 0, 982),
    "InvertedDoublePendulum": Reached(9337, 15, 8745),
}

# Later runs by the same authors: ten seeds, a million steps, -v4.
LATER: dict[str, float] = {"HalfCheetah": 10574, "Hopper": 3226, "Walker2d": 3946, "Ant": 3942}

# The ablation in the paper, a million steps: the mean of the last ten evaluations.
ABLATION: dict[str, dict[str, float]] = {
    "td3": {"HalfCheetah": 9533, "Hopper": 3305, "Walker2d": 4565, "Ant": 4185},
    "no-delay": {"HalfCheetah": 9591, "Hopper": 2407, "Walker2d": 4696, "Ant": 3754},
    "no-smoothing": {"HalfCheetah": 8988, "Hopper": 2393, "Walker2d": 4034, "Ant": 4155},
    "one-critic": {"HalfCheetah": 9793, "Hopper": 1837, "Walker2d": 2579, "Ant": 850},
    "ddpg": {"HalfCheetah": 3163, "Hopper": 1732, "Walker2d": 1521, "Ant": 816},
}
