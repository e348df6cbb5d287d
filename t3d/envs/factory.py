"""Makes batches of environments from what the user passed, and chooses the adapter."""

import json
import os
import re
import shlex
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
from t3d.envs.gym import GymBatch, obs_layout
from t3d.envs.mujoco_tasks import TASKS
from t3d.envs.slots import LocalSlot, Raised, RealEnv, Slot, calling, close_env
from t3d.envs.vector import VectorBatch
from t3d.envs.worker import make, said
from t3d.envs.workers import Worker, WorkerSlot
from t3d.errors import T3DError, nearest, shown
from t3d.layout import Layout
from t3d.limits import cores
from t3d.pixels.frame_stack import FrameStack
from t3d.torch_private import import_compiler

Maker = Callable[..., "gymnasium.Env[Any, Any]"]
MAX_ARG = 1e6  # the largest number in environment arguments from a file
_WORD = re.compile(r"[\w -]{0,100}")
Adapter = Literal["mujoco.batch", "gymnasium", "envpool"]

# Suites that need an import before `gymnasium.make`: the pattern of their ids, and the module that registers them.
SUITES = {r"dm_control/.*": "shimmy", r"\w+BulletEnv-v0": "pybullet_envs_gymnasium"}
# The extra of T3D that installs a module.
EXTRAS = {
    "shimmy": "dmc",
    "dm_control": "dmc",
    "pybullet_envs_gymnasium": "bullet",
    "pybullet": "bullet",
    "envpool": "envpool",
}


@dataclass(frozen=True)
class EnvFactory:
    """Makes environments from an id or a callable and its arguments.

    With `vector`, training uses that vector environment, and evaluations make environments of their own.
    """

    env: "str | Maker | gymnasium.Env[Any, Any]"
    args: dict[str, Any] = field(default_factory=dict)
    pixels: int = 0  # if not 0, observations are rendered images of this height and width
    stack: int = 1  # frames in an observation, if observations have images
    vector: "VectorEnv[Any, Any, Any] | None" = None
    threads: int = 0  # for batches that step in threads; 0 means one per core
    real: bool = False  # physical hardware: training and evaluations share one environment
    _made: "list[ref[gymnasium.Env[Any, Any]]]" = field(default_factory=list)
    _spare: "list[gymnasium.Env[Any, Any]]" = field(default_factory=list)  # made but not handed out; or the real one

    def seen(self, pixels: int, stack: int) -> "EnvFactory":
        """Return a copy with these observations: rendered images of `pixels`, and `stack` frames."""
        if pixels and self.vector is not None:
            raise T3DError(
                "--pixels is not for a vector environment: wrap its environments so that they observe images."
            )
        if self.args.get("render_mode") == "human" and not _has_display():
            raise T3DError(f"{self.name}: render_mode human opens a window, and there is no display. Leave it out.")
        if pixels or self.args.get("render_mode"):
            import_compiler()
        return replace(self, pixels=pixels, stack=stack)

    @property
    def name(self) -> str:
        if isinstance(self.env, gymnasium.Env):
            return self.env.spec.id if self.env.spec else type(self.env.unwrapped).__name__
        return self.env if isinstance(self.env, str) else str(getattr(self.env, "__name__", type(self.env).__name__))

    def as_real(self, asked: bool) -> "EnvFactory":
        """Return a copy for a real environment if `asked` or if its metadata says so; makes the environment."""
        if not asked and (self.vector is not None or self._is_envpool):
            return self
        if self.vector is not None or self._is_envpool:
            raise T3DError(f"--real-env is for a single environment; {self.name} is a batch.")
        env = replace(self, real=asked).one()
        self._spare.append(env)  # now, so that `close` closes it
        real = asked or is_real(env) or isinstance(self.env, gymnasium.Env)
        if real:
            self._spare[-1] = RealEnv(env)
        return replace(self, real=real)

    def close(self) -> None:
        """Close environments that were not handed out, and a real environment that this factory made."""
        while self._spare:
            env = self._spare.pop()
            if not isinstance(self.env, gymnasium.Env):  # the caller owns an environment object
                close_env(env)

    @property
    def from_python(self) -> bool:
        """Whether it is a Python object, so config.json cannot restore it."""
        return not isinstance(self.env, str)

    @property
    def _is_envpool(self) -> bool:
        return isinstance(self.env, str) and self.env.startswith(PREFIX)

    @property
    def _full_env(self) -> "str | Maker | gymnasium.Env[Any, Any]":
        """The environment; an id of a known suite gets the module that registers it."""
        for pattern, module in SUITES.items():
            if isinstance(self.env, str) and re.fullmatch(pattern, self.env) and self.env not in gymnasium.registry:
                return f"{module}:{self.env}"
        return self.env

    @property
    def _worker_env(self) -> Any:
        """The environment for a worker process, where an id may not be registered: its EnvSpec if there is one."""
        registered = isinstance(self._full_env, str) and gymnasium.registry.get(self._full_env.rpartition(":")[2])
        return registered or self._full_env

    def one(self) -> "gymnasium.Env[Any, Any]":
        """Make an environment; a real environment is always the same one."""
        if self._spare:
            return self._spare[-1] if self.real else self._spare.pop()
        if self._is_envpool:
            raise T3DError(f"{self.name}: EnvPool makes batches only; --her and --pixels need single environments.")
        env = self._make()
        if not isinstance(env, gymnasium.Env):
            raise T3DError(f"{self.name}() returned a {type(env).__name__}, not a gymnasium.Env.")
        with self._describe_errors():
            if any(other() is env.unwrapped for other in self._made):
                raise T3DError(f"{self.name}() returned the same environment twice; it must make a new one each time.")
            self._made.append(ref(env.unwrapped))
            for name in ("observation_space", "action_space"):
                if not isinstance(getattr(env, name, None), spaces.Space):
                    raise T3DError(f"{self.name} has no {name}.")
        if self.pixels and not (self.real or is_real(env)):
            self._check_rendering(env)
        return env

    def _check_rendering(self, env: "gymnasium.Env[Any, Any]") -> None:
        """Raise T3DError if the environment cannot be rendered."""
        try:
            calling(lambda: env.reset(seed=0))
        except Raised as problem:
            close_env(env)
            if isinstance(problem.__cause__, error.DependencyNotInstalled):
                raise self._not_installed(problem.__cause__) from problem
            hint = "MuJoCo needs a GL library, for example Debian's libegl1"
            raise T3DError(f"{self.name} cannot be rendered ({hint}): {problem}") from problem

    @contextmanager
    def _describe_errors(self) -> Iterator[None]:
        """Turn an exception from the attributes of an environment into a T3DError."""
        try:
            yield
        except (T3DError, KeyboardInterrupt):
            raise
        except BaseException as problem:
            raise T3DError(f"{self.name} cannot be used: {said(problem)}") from problem

    def _spaces(self, env: "gymnasium.Env[Any, Any]") -> tuple[Layout, ActionRange, int | None]:
        """Return the observation layout, the action range and the declared time limit of an environment."""
        with self._describe_errors():
            limit = None if env.spec is None else env.spec.max_episode_steps
            if not (limit is None or (isinstance(limit, int) and limit > 0)):
                raise T3DError(
                    f"{self.name} has the time limit {shown(limit)}; it must be a whole number of at least 1."
                )
            return obs_layout(env.observation_space, self.name), ActionRange.of(env.action_space, self.name), limit

    def _make(self) -> "gymnasium.Env[Any, Any]":
        """Make one environment; raise T3DError with a hint if that fails."""
        try:
            return self._call_maker()
        except ModuleNotFoundError as problem:
            raise self._missing_module(problem.name or str(self._full_env).rpartition(":")[0]) from problem
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

    def _call_maker(self) -> "gymnasium.Env[Any, Any]":
        """Make one environment. Convert exceptions to `Raised`, except those of missing modules and unknown ids."""
        missing = ModuleNotFoundError | error.DependencyNotInstalled | error.UnregisteredEnv | error.NamespaceNotFound
        try:
            return calling(lambda: make(self._full_env, self.args, self.pixels))  # type: ignore[no-any-return]
        except Raised as problem:
            if isinstance(problem.__cause__, T3DError | missing):
                raise problem.__cause__ from None
            raise

    def _not_installed(self, problem: error.DependencyNotInstalled) -> T3DError:
        """The error for a missing package, with the extra that installs it."""
        extras, text = {"mujoco": "mujoco", "pygame": "pixels"}, said(problem)
        named = [extra for word, extra in extras.items() if word in text.lower()]
        how = f"pip install 't3d[{named[0]}]'" if named else text
        return T3DError(f"{self.name} needs a package that is not installed: {how}")

    def _missing_module(self, module: str) -> T3DError:
        """The error for a missing module, with the command that installs it."""
        how = f" Install it: pip install 't3d[{EXTRAS[module]}]'." if module in EXTRAS else ""
        first = module.partition(".")[0]
        if any(os.path.exists(name) for name in (first, f"{first}.py")):  # noqa: PTH110
            how += " It is in this folder, which is not on the module search path: put PYTHONPATH=. before the command."
        how += " PyBullet needs Python 3.11." if "bullet" in module and sys.version_info >= (3, 12) else ""
        return T3DError(f"{self.name}: there is no module {module}.{how}")

    def path(self) -> tuple[Adapter, str]:
        """Return the adapter for these environments without workers, and the reason."""
        if self.real:
            return "gymnasium", "it is a real environment"
        if self.from_python:
            return "gymnasium", "it is a Python object"
        if self._is_envpool:
            return "envpool", "its id starts with envpool/"
        plain = str(self.env).rpartition(":")[2]
        spec = gymnasium.registry.get(plain)
        ours = plain in TASKS and spec is not None and str(spec.entry_point).startswith("gymnasium.envs.mujoco")
        if not ours:
            return "gymnasium", "no faster adapter supports it"
        if self.args:
            return "gymnasium", "it has arguments"
        if self.pixels:
            return "gymnasium", "its observations are rendered"
        if find_spec("mujoco.batch") is None:
            return "gymnasium", "mujoco.batch needs mujoco 3.17 or newer"
        return "mujoco.batch", "it is faster and bit-identical to Gymnasium"

    def training_batch(
        self, count: int, episode_seed: EpisodeSeed, workers: int = 0, worker_timeout: float = 60.0
    ) -> EnvBatch:
        """Make the environments for training; uses the vector environment if there is one."""
        if self.vector is None:
            return self.batch(count, episode_seed, workers, worker_timeout)
        if self.vector.num_envs != count or workers:
            raise T3DError(
                f"the vector environment has {self.vector.num_envs} environments, but seeds times num_envs is {count};"
                " these must be equal, and workers must be 0."
            )
        with self._describe_errors():
            return self._stacked(VectorBatch(self.name, self.vector, episode_seed))

    def batch(self, count: int, episode_seed: EpisodeSeed, workers: int = 0, worker_timeout: float = 60.0) -> EnvBatch:
        """Make a batch of `count` environments."""
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
        if self._is_envpool:
            return self._pool(count, episode_seed, workers, threads)
        first = self.one()
        try:
            if is_real(first) and not self.real:
                raise T3DError(f"{self.name} is a real environment: train on it alone, without a vector environment.")
            layout, actions, limit = self._spaces(first)
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
            from t3d.envs.mujoco import MujocoBatch  # mujoco is an optional dependency

            return MujocoBatch(self.name, first, count, episode_seed, threads)
        else:
            make = None if self.real else self.one
            envs = [first, *(self.one() for _ in range(count - 1))]
            if any(differs((layout, actions), self._spaces(env)[:2]) for env in envs[1:]):
                raise T3DError(f"{self.name} made environments with different observation or action spaces.")
            slots = [LocalSlot(env, make) for env in envs]
        return GymBatch(self.name, slots, first.observation_space, actions, limit, episode_seed, processes)

    def _workers(self, count: int, workers: int, worker_timeout: float) -> list[Worker]:
        """Start worker processes and wait until their environments are made."""
        shares = [list(range(k, count, workers)) for k in range(min(workers, count))]
        processes = [
            Worker(self.name, self._worker_env, self.args, self.pixels, share, worker_timeout) for share in shares
        ]
        try:
            return [process.ready() for process in processes]  # all start at the same time
        except BaseException:
            for process in processes:
                process.close()
            raise

    def _pool(self, count: int, episode_seed: EpisodeSeed, workers: int, threads: int) -> EnvBatch:
        if workers or self.pixels:
            raise T3DError(f"{self.name}: EnvPool has its own threads and images; leave out --workers and --pixels.")
        try:
            pool = Pool(str(self.env).removeprefix(PREFIX), count, threads, self.args)
        except ModuleNotFoundError as problem:
            raise self._missing_module(problem.name or "envpool") from problem
        return VectorBatch(self.name, pool, episode_seed)


def is_real(env: Any) -> bool:
    """Whether the metadata of an environment declares it as real."""

    def declared() -> bool:
        metadata = getattr(env, "metadata", None)
        return isinstance(metadata, Mapping) and metadata.get("real") is True

    try:
        return bool(calling(declared))
    except Raised as problem:
        raise T3DError(f"the environment's metadata cannot be read: {problem}") from problem


def _has_display() -> bool:
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _from_vector(vector: "VectorEnv[Any, Any, Any]", eval_env: str | Maker | None) -> EnvFactory:
    """A factory that makes evaluation environments like those of the vector environment, if it knows how."""
    if not (isinstance(getattr(vector, "num_envs", None), int) and vector.num_envs > 0):
        raise T3DError(
            f"a vector environment needs a positive num_envs; it is {shown(getattr(vector, 'num_envs', None))}."
        )
    spec, makers = vector.spec, getattr(vector.unwrapped, "env_fns", None)
    if any(is_real(env) for env in (vector, *(getattr(vector.unwrapped, "envs", None) or ()))):
        raise T3DError("the vector environment holds real environments: train on one of them alone.")
    if eval_env is None and spec is not None and spec.id in gymnasium.registry:
        of_the_vector = ("num_envs", "vectorization_mode", "vector_kwargs", "wrappers")
        args = {k: v for k, v in spec.kwargs.items() if k not in of_the_vector}
        return EnvFactory(spec.id, args, vector=vector)
    return EnvFactory(eval_env or (makers[0] if makers else _no_eval_env(vector)), vector=vector)


def _no_eval_env(vector: "VectorEnv[Any, Any, Any]") -> Maker:
    """A maker that raises T3DError: a run without evaluations needs none."""

    def make() -> Any:
        raise T3DError("evaluations need their own environments: pass eval_env, or eval_every=0.")

    make.__name__ = type(vector.unwrapped).__name__
    return make


def differs(ours: tuple[Layout, ActionRange], theirs: tuple[Layout, ActionRange]) -> bool:
    """Whether two environments have different observations or actions."""
    same = json.dumps(ours[0]) == json.dumps(theirs[0])
    return not (same and np.array_equal(ours[1].low, theirs[1].low) and np.array_equal(ours[1].high, theirs[1].high))


def _with_version(env: str) -> str:
    """Complete an id without a version to the newest version."""
    if env in gymnasium.registry or ":" in env or "/" in env:
        return env
    versions = [spec.version for spec in gymnasium.registry.values() if spec.name == env and not spec.namespace]
    known = [version for version in versions if version is not None]
    return f"{env}-v{max(known)}" if known else env


def unsafe_arg(args: Any, key: str = "") -> tuple[str, Any] | None:
    """Return the name and value of the first argument that is neither a plain word nor a number up to MAX_ARG.

    An environment may open or import what a text names, also a key, and a huge number may keep it busy forever.
    """
    if isinstance(args, str):
        plain = _WORD.fullmatch(args) and not os.path.lexists(args)
        return None if plain else (key, args)
    if isinstance(args, int | float):
        return (key, args) if abs(args) > MAX_ARG else None
    if isinstance(args, list):
        return next(filter(None, (unsafe_arg(value, key) for value in args)), None)
    for name, value in args.items() if isinstance(args, dict) else ():
        # The outer keys are the names of parameters: a file of the same name does not matter.
        unsafe_key = unsafe_arg(name, key) if key else None if _WORD.fullmatch(name) else (name, value)
        opens_window = name == "render_mode" and value not in (None, "rgb_array")
        if found := unsafe_key or ((name, value) if opens_window else unsafe_arg(value, key or name)):
            return found
    return None


def refuse_paths(args: Any, where: str) -> None:
    """Raise T3DError unless the arguments, which come from a file, are plain words and numbers."""
    if found := unsafe_arg(args):
        raise T3DError(
            f"{where} passes {shown(found[0])} = {shown(found[1])} to the environment, which may open or import it,"
            " open a window, or compute with it for very long. If you trust it, add --allow-env-args (in Python:"
            " allow_env_args=True)."
        )


def env_factory(
    env: "str | Maker | gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any]",
    args: dict[str, Any] | None = None,
    allowed_modules: tuple[str, ...] | None = None,
    eval_env: str | Maker | None = None,
) -> EnvFactory:
    """Make the factory for `env`. `allowed_modules` restricts the modules that `module:Id` may import."""
    if isinstance(env, VectorEnv):
        return _from_vector(env, eval_env)
    if eval_env is not None:
        raise T3DError("eval_env is for vector environments only; for others T3D makes the evaluation environments.")
    if isinstance(env, gymnasium.Env):
        return EnvFactory(env, real=True)
    if isinstance(env, str):
        module = env.rpartition(":")[0]
        if module and allowed_modules is not None and module not in allowed_modules:
            raise T3DError(
                f"{env} imports the module {module}, and its name comes from a file."
                f" If you trust it, add --allow-module {shlex.quote(module)}."
            )
        env = _with_version(env)
    elif not callable(env):
        raise T3DError(f"env must be an id, a callable or an environment, not {env!r}.")
    return EnvFactory(env, dict(args or {}))
