"""From what a user names to a batch of environments: which adapter takes it, and why."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Literal
from weakref import ref

import gymnasium
import numpy as np
from gymnasium import error, spaces
from gymnasium.vector import VectorEnv

from t3d.envs.actions import ActionRange
from t3d.envs.batch import EnvBatch, EpisodeSeed
from t3d.envs.envpool import PREFIX, Pool
from t3d.envs.frame_stack import FrameStackBatch
from t3d.envs.gym import GymBatch, observable
from t3d.envs.mujoco_tasks import TASKS
from t3d.envs.slots import LocalSlot, Raised, RealEnv, Slot, calling, close_env
from t3d.envs.vector import VectorBatch
from t3d.envs.worker import make, said
from t3d.envs.workers import Worker, WorkerSlot
from t3d.errors import T3DError, nearest, shown
from t3d.layout import Layout
from t3d.limits import cores
from t3d.pixels.frame_stack import FrameStack

Maker = Callable[..., "gymnasium.Env[Any, Any]"]
MOST_NUMBER = 1e6  # in arguments that only a file gives
Path = Literal["mujoco.batch", "gymnasium", "envpool"]

# Suites whose ids are known without their module: what an id looks like, and the module that registers it.
SUITES = {r"dm_control/.*": "shimmy", r"\w+BulletEnv-v0": "pybullet_envs_gymnasium"}
# The extra that brings a module.
EXTRAS = {
    "shimmy": "dmc",
    "dm_control": "dmc",
    "pybullet_envs_gymnasium": "bullet",
    "pybullet": "bullet",
    "envpool": "envpool",
}


@dataclass(frozen=True)
class EnvFactory:
    """Where environments come from: an id or something that makes one when called, and arguments for it.

    A vector environment that somebody handed over is trained in as it is; evaluations have environments of their own.
    """

    env: "str | Maker | gymnasium.Env[Any, Any]"
    args: dict[str, Any] = field(default_factory=dict)
    pixels: int = 0  # if not 0, images of the environment, so high and wide, are its observations
    stack: int = 1  # frames that are seen at once, where observations have images
    vector: "VectorEnv[Any, Any, Any] | None" = None
    threads: int = 0  # that step them together, where they can; 0 is as many as there are cores
    real: bool = False  # a machine: there is one environment, and training and evaluations take turns on it
    _made: "list[ref[gymnasium.Env[Any, Any]]]" = field(default_factory=list)
    _waiting: "list[gymnasium.Env[Any, Any]]" = field(
        default_factory=list
    )  # made, and not asked for yet; or the real one

    def seen(self, pixels: int, stack: int) -> "EnvFactory":
        """The same, seen in another way."""
        if pixels and self.vector is not None:
            raise T3DError("--pixels is for environments that are made here; a vector environment shows what it shows.")
        if pixels:
            # What renders without a GPU (Mesa) and Triton each bring an LLVM: the process dies if Triton is the second.
            import torch._dynamo  # noqa: F401
        return replace(self, pixels=pixels, stack=stack)

    @property
    def name(self) -> str:
        if isinstance(self.env, gymnasium.Env):
            return self.env.spec.id if self.env.spec else type(self.env.unwrapped).__name__
        return self.env if isinstance(self.env, str) else str(getattr(self.env, "__name__", type(self.env).__name__))

    def as_real(self, asked: bool) -> "EnvFactory":
        """The same as a real environment, if that is `asked` for or its metadata says so. It is made for that."""
        if not asked and (self.vector is not None or self._pooled):
            return self
        if self.vector is not None or self._pooled:
            raise T3DError(f"--real-env is for one environment; {self.name} is several at once.")
        one = replace(self, real=asked).one()
        real = asked or declared(one) or isinstance(self.env, gymnasium.Env)
        self._waiting.append(RealEnv(one) if real else one)
        return replace(self, real=real)

    def close(self) -> None:
        """Close what was made and not handed out, and a real environment that was made here."""
        while self._waiting:
            env = self._waiting.pop()
            if not isinstance(self.env, gymnasium.Env):  # an object belongs to whoever made it
                close_env(env)

    @property
    def from_python(self) -> bool:
        """Whether no file can bring it back."""
        return not isinstance(self.env, str)

    @property
    def _pooled(self) -> bool:
        return isinstance(self.env, str) and self.env.startswith(PREFIX)

    @property
    def _full(self) -> "str | Maker | gymnasium.Env[Any, Any]":
        """With the module that registers it, where that goes without saying."""
        for pattern, module in SUITES.items():
            if isinstance(self.env, str) and re.fullmatch(pattern, self.env) and self.env not in gymnasium.registry:
                return f"{module}:{self.env}"
        return self.env

    @property
    def _elsewhere(self) -> Any:
        """What makes it in another process, where an id may not be registered."""
        registered = isinstance(self._full, str) and gymnasium.registry.get(self._full.rpartition(":")[2])
        return registered or self._full

    def one(self) -> "gymnasium.Env[Any, Any]":
        """One environment, new each time; a real one is always the same."""
        if self._waiting:
            return self._waiting[-1] if self.real else self._waiting.pop()
        if self._pooled:
            raise T3DError(f"{self.name}: EnvPool's environments come in pools; --her and --pixels need single ones.")
        made = self._one()
        if not isinstance(made, gymnasium.Env):
            raise T3DError(f"{self.name}() gave a {type(made).__name__}, not a gymnasium.Env.")
        with self._reading():
            if any(other() is made.unwrapped for other in self._made):
                raise T3DError(f"{self.name}() gave the same environment twice; it must make a new one each time.")
            self._made.append(ref(made.unwrapped))
            for name in ("observation_space", "action_space"):
                if not isinstance(getattr(made, name, None), spaces.Space):
                    raise T3DError(f"{self.name} has no {name}.")
        if self.pixels and not (self.real or declared(made)):
            self._refuse_unseen(made)
        return made

    def _refuse_unseen(self, env: "gymnasium.Env[Any, Any]") -> None:
        """If it cannot be shown in images, that is said now."""
        try:
            calling(lambda: env.reset(seed=0))
        except Raised as problem:
            close_env(env)
            if isinstance(problem.__cause__, error.DependencyNotInstalled):
                raise self._not_installed(problem.__cause__) from problem
            hint = "MuJoCo's need a GL library, as Debian's libegl1"
            raise T3DError(f"{self.name} cannot be shown in images ({hint}): {problem}") from problem

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """What an environment says of itself may be anything: an exception in it is a sentence."""
        try:
            yield
        except (T3DError, KeyboardInterrupt):
            raise
        except BaseException as problem:
            raise T3DError(f"{self.name} cannot be used: {said(problem)}") from problem

    def _measured(self, env: "gymnasium.Env[Any, Any]") -> tuple[Layout, ActionRange, int | None]:
        """Its observations, its actions, and its time limit if it declares one."""
        with self._reading():
            limit = None if env.spec is None else env.spec.max_episode_steps
            if not (limit is None or (isinstance(limit, int) and limit > 0)):
                raise T3DError(f"{self.name} has the time limit {shown(limit)}; it is a whole number from 1 up.")
            return observable(env.observation_space, self.name), ActionRange.of(env.action_space, self.name), limit

    def _one(self) -> "gymnasium.Env[Any, Any]":
        try:
            return self._called()
        except ModuleNotFoundError as problem:
            raise self._without(problem.name or str(self._full).rpartition(":")[0]) from problem
        except error.DependencyNotInstalled as problem:
            raise self._not_installed(problem) from problem
        except (error.UnregisteredEnv, error.NamespaceNotFound) as problem:
            plain = self.name.rpartition(":")[2]
            if plain.startswith("dm_control/") and find_spec("dm_control") is None:
                raise T3DError(
                    f"{self.name} needs a package that is not installed: pip install 't3d[dmc]'"
                ) from problem
            near = nearest(plain.split("/")[-1], gymnasium.registry) or nearest(plain, gymnasium.registry)
            raise T3DError(f"there is no environment {self.name}.{near}") from problem
        except Raised as problem:
            raise T3DError(f"{self.name} cannot be made: {problem}") from problem

    def _called(self) -> "gymnasium.Env[Any, Any]":
        """What it makes; whatever it raises, SystemExit too, is `Raised`, but for what is missing here."""
        missing = ModuleNotFoundError | error.DependencyNotInstalled | error.UnregisteredEnv | error.NamespaceNotFound
        try:
            return calling(lambda: make(self._full, self.args, self.pixels))  # type: ignore[no-any-return]
        except Raised as problem:
            if isinstance(problem.__cause__, T3DError | missing):
                raise problem.__cause__ from None
            raise

    def _not_installed(self, problem: error.DependencyNotInstalled) -> T3DError:
        """Name the extra that brings the package."""
        extras, text = {"mujoco": "mujoco", "pygame": "pixels"}, said(problem)
        named = [extra for word, extra in extras.items() if word in text.lower()]
        how = f"pip install 't3d[{named[0]}]'" if named else text
        return T3DError(f"{self.name} needs a package that is not installed: {how}")

    def _without(self, module: str) -> T3DError:
        """What to say where a module is missing."""
        how = f" It comes with pip install 't3d[{EXTRAS[module]}]'." if module in EXTRAS else ""
        first = module.partition(".")[0]
        if any(os.path.exists(name) for name in (first, f"{first}.py")):  # noqa: PTH110
            how += " It is in this folder, where Python does not look: set PYTHONPATH=. before the command."
        how += " PyBullet is for Python 3.11." if "bullet" in module and sys.version_info >= (3, 12) else ""
        return T3DError(f"{self.name}: there is no module {module} to import.{how}")

    def path(self) -> tuple[Path, str]:
        """How environments of this source are stepped without workers, and why so."""
        if self.real:
            return "gymnasium", "it is real"
        if self.from_python:
            return "gymnasium", "it is made by a function in Python"
        if self._pooled:
            return "envpool", "its id says so"
        plain = str(self.env).rpartition(":")[2]
        spec = gymnasium.registry.get(plain)
        ours = plain in TASKS and spec is not None and str(spec.entry_point).startswith("gymnasium.envs.mujoco")
        if not ours:
            return "gymnasium", "there is no faster path for it"
        if self.args:
            return "gymnasium", "it has arguments of its own"
        if self.pixels:
            return "gymnasium", "it is seen in images"
        if find_spec("mujoco.batch") is None:
            return "gymnasium", "mujoco.batch needs mujoco 3.17 or newer"
        return "mujoco.batch", "it is bit-identical to Gymnasium there"

    def training_batch(
        self, count: int, episode_seed: EpisodeSeed, workers: int = 0, worker_timeout: float = 60.0
    ) -> EnvBatch:
        """The environments to train in: the vector environment, if there is one."""
        if self.vector is None:
            return self.batch(count, episode_seed, workers, worker_timeout)
        if self.vector.num_envs != count or workers:
            raise T3DError(
                f"the vector environment has {self.vector.num_envs} environments, and seeds times num_envs is {count};"
                " they must be the same number, and workers must be 0."
            )
        with self._reading():
            return self._stacked(VectorBatch(self.name, self.vector, episode_seed))

    def batch(self, count: int, episode_seed: EpisodeSeed, workers: int = 0, worker_timeout: float = 60.0) -> EnvBatch:
        """`count` environments behind the contract."""
        return self._stacked(self._batch(count, episode_seed, workers, worker_timeout))

    def _stacked(self, batch: EnvBatch) -> EnvBatch:
        try:
            frame_stack = FrameStack.of(batch.layout, self.stack, self.name)
        except T3DError:
            batch.close()
            raise
        return batch if frame_stack is None else FrameStackBatch(batch, frame_stack)

    def _batch(self, count: int, episode_seed: EpisodeSeed, workers: int, worker_timeout: float) -> EnvBatch:
        threads = min(count, self.threads or cores())
        if self._pooled:
            return self._pool(count, episode_seed, workers, threads)
        first = self.one()
        try:
            if declared(first) and not self.real:
                raise T3DError(f"{self.name} says that it is real: train on it alone, without a vector environment.")
            layout, actions, limit = self._measured(first)
        except BaseException:
            if not self.real:
                close_env(first)
            raise
        processes: list[Worker] = []
        slots: list[Slot] = []
        if workers:
            close_env(first)
            processes = self._workers(count, workers, worker_timeout)
            slots = [WorkerSlot(processes[i % workers], i) for i in range(count)]
        elif self.path()[0] == "mujoco.batch":
            from t3d.envs.mujoco import MujocoBatch  # here, because mujoco is an extra

            return MujocoBatch(self.name, first, count, episode_seed, threads)
        else:
            make = None if self.real else self.one
            envs = [first, *(self.one() for _ in range(count - 1))]
            if any(differs((layout, actions), self._measured(env)[:2]) for env in envs[1:]):
                raise T3DError(f"{self.name} gave environments with different observations or actions.")
            slots = [LocalSlot(env, make) for env in envs]
        return GymBatch(self.name, slots, first.observation_space, actions, limit, episode_seed, processes)

    def _workers(self, count: int, workers: int, worker_timeout: float) -> list[Worker]:
        """Start worker processes and wait until their environments are made."""
        shares = [list(range(k, count, workers)) for k in range(min(workers, count))]
        processes = [
            Worker(self.name, self._elsewhere, self.args, self.pixels, share, worker_timeout) for share in shares
        ]
        try:
            return [process.ready() for process in processes]  # all start at the same time
        except BaseException:
            for process in processes:
                process.close()
            raise

    def _pool(self, count: int, episode_seed: EpisodeSeed, workers: int, threads: int) -> EnvBatch:
        if workers or self.pixels:
            raise T3DError(f"{self.name}: EnvPool has threads and images of its own; leave out --workers and --pixels.")
        try:
            pool = Pool(str(self.env).removeprefix(PREFIX), count, threads, self.args)
        except ModuleNotFoundError as problem:
            raise self._without(problem.name or "envpool") from problem
        return VectorBatch(self.name, pool, episode_seed)


def declared(env: Any) -> bool:
    """Whether an environment says that it is real."""
    metadata = getattr(env, "metadata", None)
    return isinstance(metadata, Mapping) and metadata.get("real") is True


def _from_vector(vector: "VectorEnv[Any, Any, Any]", eval_env: str | Maker | None) -> EnvFactory:
    """A source whose evaluation environments are made as the vector environment's own were, if that can be known."""
    if not (isinstance(getattr(vector, "num_envs", None), int) and vector.num_envs > 0):
        raise T3DError(
            f"a vector environment says how many it is; num_envs is {shown(getattr(vector, 'num_envs', None))}."
        )
    spec, makers = vector.spec, getattr(vector.unwrapped, "env_fns", None)
    if any(declared(env) for env in (vector, *(getattr(vector.unwrapped, "envs", None) or ()))):
        raise T3DError("a vector environment of real environments: train on one of them alone.")
    if eval_env is None and spec is not None and spec.id in gymnasium.registry:
        of_the_vector = ("num_envs", "vectorization_mode", "vector_kwargs", "wrappers")
        args = {k: v for k, v in spec.kwargs.items() if k not in of_the_vector}
        return EnvFactory(spec.id, args, vector=vector)
    return EnvFactory(eval_env or (makers[0] if makers else _nothing_to_evaluate_in(vector)), vector=vector)


def _nothing_to_evaluate_in(vector: "VectorEnv[Any, Any, Any]") -> Maker:
    """Stands in for what makes environments for evaluations, in a run that has none."""

    def make() -> Any:
        raise T3DError("evaluations need environments of their own: give an eval_env that makes them, or eval_every=0.")

    make.__name__ = type(vector.unwrapped).__name__
    return make


def differs(ours: tuple[Layout, ActionRange], theirs: tuple[Layout, ActionRange]) -> bool:
    """Whether observations or actions are others."""
    same = json.dumps(ours[0]) == json.dumps(theirs[0])
    return not (same and np.array_equal(ours[1].low, theirs[1].low) and np.array_equal(ours[1].high, theirs[1].high))


def _newest(env: str) -> str:
    """An id without its version is that of the newest one, by its whole name."""
    if env in gymnasium.registry or ":" in env or "/" in env:
        return env
    versions = [spec.version for spec in gymnasium.registry.values() if spec.name == env and not spec.namespace]
    known = [version for version in versions if version is not None]
    return f"{env}-v{max(known)}" if known else env


def unusual(args: Any, key: str = "") -> tuple[str, Any] | None:
    """The first argument that is neither a plain word nor a number of usual size, and its name.

    An environment may open or import what a text names, and a huge number may keep it busy for ever.
    """
    if isinstance(args, str):
        plain = re.fullmatch(r"[\w -]{0,100}", args) and not os.path.lexists(args)
        return None if plain else (key, args)
    if isinstance(args, int | float):
        return (key, args) if abs(args) > MOST_NUMBER else None
    parts = args.items() if isinstance(args, dict) else enumerate(args) if isinstance(args, list) else ()
    found = (unusual(value, key or str(name)) for name, value in parts)
    return next((one for one in found if one is not None), None)


def refuse_paths(args: Any, where: str) -> None:
    """Arguments that a file hands to an environment may be plain words and numbers, nothing else."""
    if found := unusual(args):
        raise T3DError(
            f"{where} would hand {shown(found[0])} = {shown(found[1])} to the environment, which may open or import it,"
            " or be kept busy by it; if you trust it, add --allow-env-args (in Python: allow_env_args=True)."
        )


def env_factory(
    env: "str | Maker | gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any]",
    args: dict[str, Any] | None = None,
    allowed_modules: tuple[str, ...] | None = None,
    eval_env: str | Maker | None = None,
) -> EnvFactory:
    """The source for what a user named; `allowed_modules`, if given, says which `module:Id` may import."""
    if isinstance(env, VectorEnv):
        return _from_vector(env, eval_env)
    if eval_env is not None:
        raise T3DError("eval_env is for vector environments; of others evaluations make their own.")
    if isinstance(env, gymnasium.Env):
        return EnvFactory(env, real=True)
    if isinstance(env, str):
        module = env.rpartition(":")[0]
        if module and allowed_modules is not None and module not in allowed_modules:
            raise T3DError(
                f"{env} would import the module {module}, which only a file asks for;"
                f" if you trust it, add --allow-module {module}."
            )
        env = _newest(env)
    elif not callable(env):
        raise T3DError(f"an environment is an id or something that makes one when called, not {env!r}.")
    return EnvFactory(env, dict(args or {}))
