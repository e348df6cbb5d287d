"""Asynchronous evaluation: episodes run in a subprocess on the CPU while training goes on.

The subprocess runs `Evaluator`, so its results are those of an evaluation on the CPU in this process. If it fails in
any way, this process repeats the evaluation, and an error of an environment is raised here.
"""

import subprocess
import warnings
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch

from t3d.config import Config
from t3d.envs import EnvBatch, EnvFactory
from t3d.envs.worker import end_only_with_parent, said
from t3d.envs.workers import with_pipe
from t3d.errors import warn
from t3d.evaluate.evaluator import AnyEvaluator, Evaluation, Evaluator, PolicySnapshot, StopCheck
from t3d.learners import hardware
from t3d.limits import cores
from t3d.networks import Networks, Parameters
from t3d.normalizer import Scaling

SCRIPT = """import sys; sys.path[:] = sys.argv[3:]
from t3d.evaluate.async_evaluator import serve; serve(int(sys.argv[1]), int(sys.argv[2]))"""
MAX_CPU_WORK = 2e7  # multiplications for a step of all episodes, above which a CPU would be too slow for a GPU


def resolve_async_eval(config: Config, factory: EnvFactory, actor: Parameters, envs: EnvBatch) -> Config:
    """Decide `auto`: on if a GPU learns, a quarter of the cores is free, and actors are small enough for a CPU.

    The environment must have an id, so that it is the same in any process.
    """
    if config.async_eval != "auto":
        return config
    work = config.eval_episodes * sum(tensor.numel() for tensor in actor.values())
    room = 4 * free_cores(envs.count) >= cores()
    same_there = not (factory.from_python or factory.real) and factory.vector is None and bool(config.eval_every)
    worth = config.device == "cuda" and room and same_there and envs.frame_stack is None and work <= MAX_CPU_WORK
    return replace(config, async_eval="on" if worth else "off")


def free_cores(envs: int) -> int:
    """Cores that so many environments leave free."""
    return max(0, cores() - envs)


def make_evaluator(
    factory: EnvFactory, seeds: Sequence[int], config: Config, networks: Networks
) -> AnyEvaluator | None:
    """The evaluator of a run; None if it has no evaluations."""
    if not config.eval_every:
        return None
    if config.async_eval == "on":
        return AsyncEvaluator(factory, seeds, config, networks)
    return Evaluator(factory, seeds, config)


class AsyncEvaluator:
    """Evaluates in a subprocess; falls back to this process if it cannot start or dies."""

    concurrent = True

    def __init__(self, factory: EnvFactory, seeds: Sequence[int], config: Config, networks: Networks) -> None:
        self._setup = factory, seeds, config
        self._fallback: Evaluator | None = None
        self._result: Evaluation | None = None
        self._unsent: PolicySnapshot | None = None  # until the subprocess is ready: nobody waits for its start
        self._ready = False
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        threads = max(1, free_cores(len(seeds) * config.num_envs))
        there = EnvFactory(factory.env, factory.args, factory.pixels, factory.stack, threads=threads)
        try:
            order = cloudpickle.dumps((there, list(seeds), config, networks))
            # In a session of its own: Ctrl-C is for the parent.
            self._process, self._pipe = with_pipe(["-c", SCRIPT], start_new_session=True)
            self._pipe.send_bytes(order)
        except Exception as problem:  # not every environment can be sent, and the errors have no common class
            self._give_up(said(problem))

    def _give_up(self, why: str) -> None:
        if self._pipe is not None:
            self._pipe.close()
        self._pipe = None
        warn(f"the evaluation subprocess is not available ({why}): evaluations pause training from now on.")

    def submit(self, snapshot: PolicySnapshot) -> None:
        self._unsent, self._result = snapshot, None
        self.poll()

    def poll(self, seconds: float = 0.0) -> Evaluation | None:
        if self._result is None and self._pipe is not None:
            try:
                if self._pipe.poll(seconds):
                    self._receive(*self._pipe.recv())
                if self._ready and self._unsent is not None and self._pipe is not None:
                    self._pipe.send(to_arrays(self._unsent))
                    self._unsent = None
            except (EOFError, OSError):
                self._give_up(f"it ended with exit code {self._exit_code()}")
        return self._result

    def _receive(self, kind: str, what: Evaluation | str | None) -> None:
        if isinstance(what, Evaluation):
            self._result = what
        elif kind == "ready":
            self._ready = True
        else:
            self._give_up(str(what))

    def result(self, snapshot: PolicySnapshot, stop: StopCheck) -> Evaluation | None:
        while (result := self.poll(0.1)) is None:
            if stop():
                return None
            if self._pipe is None:
                self._fallback = self._fallback or Evaluator(*self._setup)
                return self._fallback.result(snapshot, stop)
        return result

    def _exit_code(self) -> int | None:
        """Of the subprocess, which has nothing left to do."""
        assert self._process is not None
        try:
            return self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            if not self._ready:
                self._process.kill()  # it has no environments to close
            self._exit_code()
        if self._fallback is not None:
            self._fallback.close()


def serve(descriptor: int, parent: int) -> None:
    """In the subprocess: evaluate every snapshot that comes, until the pipe closes."""
    end_only_with_parent(parent)
    warnings.simplefilter("ignore")
    pipe = Connection(descriptor)
    try:
        factory, seeds, config, networks = cloudpickle.loads(pipe.recv_bytes())
        with hardware(config.threads, config.precision), closing(Evaluator(factory, seeds, config)) as evaluator:
            pipe.send(("ready", None))
            while True:
                snapshot = from_arrays(networks, pipe.recv())
                # Nothing is sent meanwhile: something to read means that the parent is gone.
                evaluation = evaluator.result(snapshot, stop=pipe.poll)
                if evaluation is None:
                    return
                pipe.send(("evaluated", evaluation))
    except (EOFError, ConnectionError):
        return  # the parent is gone
    except (Exception, SystemExit) as problem:
        with suppress(OSError):
            pipe.send(("failed", said(problem)))


def to_arrays(snapshot: PolicySnapshot) -> dict[str, Any]:
    """A snapshot as NumPy arrays, which every process can unpickle; without its networks."""
    parts = {"actor": snapshot.actor, "critic": snapshot.critic}
    arrays: dict[str, Any] = {part: {k: t.numpy() for k, t in given.items()} for part, given in parts.items()}
    scaling = snapshot.scaling
    return arrays | {"scaling": None if scaling is None else (scaling.shift.numpy(), scaling.scale.numpy())}


def from_arrays(networks: Networks, arrays: dict[str, Any]) -> PolicySnapshot:
    """The inverse of `to_arrays`."""
    actor, critic = ({k: torch.tensor(a) for k, a in arrays[part].items()} for part in ("actor", "critic"))
    scaling = arrays["scaling"]
    return PolicySnapshot(networks, actor, critic, None if scaling is None else Scaling(*map(torch.tensor, scaling)))
