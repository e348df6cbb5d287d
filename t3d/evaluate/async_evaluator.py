"""Evaluations in a process of their own, on the CPU, while training goes on.

A place and nothing else: the same episodes would be played here on the CPU with the same numbers, and are where that
process cannot be had or ends. What goes wrong in it is found again here, and said here.
"""

import subprocess
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection

import cloudpickle
import torch

from t3d import networks
from t3d.config import Config
from t3d.envs import EnvBatch, EnvFactory
from t3d.envs.worker import end_only_with_parent, said
from t3d.envs.workers import with_pipe
from t3d.errors import warn
from t3d.evaluate.evaluator import Evaluation, Evaluator, NoEvaluator, PolicySnapshot
from t3d.learners import hardware
from t3d.limits import cores
from t3d.networks import Network, Parameters

SCRIPT = """import sys; sys.path[:] = sys.argv[3:]
from t3d.evaluate.async_evaluator import serve; serve(int(sys.argv[1]), int(sys.argv[2]))"""
LARGEST = 2e7  # multiplications for a step of all episodes, above which a processor would be too slow for a GPU


def resolve_async_eval(config: Config, factory: EnvFactory, actor: Parameters, envs: EnvBatch) -> Config:
    """Where it is left open: on if a GPU learns, a quarter of the cores has nothing to do, and actors, who act on the
    CPU then, are small; and only for environments that have an id, and so are the same in any process."""
    if config.async_eval != "auto":
        return config
    work = config.eval_episodes * sum(tensor.numel() for tensor in actor.values())
    room = 4 * free_cores(envs.count) >= cores()
    same_there = not (factory.from_python or factory.real) and factory.vector is None and bool(config.eval_every)
    worth = config.device == "cuda" and room and same_there and envs.frame_stack is None and work <= LARGEST
    return replace(config, async_eval="on" if worth else "off")


def free_cores(envs: int) -> int:
    """Those that so many environments leave alone."""
    return max(0, cores() - envs)


def make_evaluator(
    factory: EnvFactory, seeds: Sequence[int], config: Config, network: Network | None
) -> "Evaluator | AsyncEvaluator | NoEvaluator":
    """Who plays the evaluations of a run."""
    if not config.eval_every:
        return NoEvaluator()
    if config.async_eval == "on":
        return AsyncEvaluator(factory, seeds, config, network)
    return local_evaluator(factory, seeds, config)


def local_evaluator(factory: EnvFactory, seeds: Sequence[int], config: Config) -> Evaluator:
    """In this process, and the worker processes that the environments have in training."""
    return Evaluator(factory, seeds, config.eval_episodes, config.gamma, config.workers, config.worker_timeout)


class AsyncEvaluator:
    """An evaluator that lets the caller go on while it plays."""

    beside = True

    def __init__(self, factory: EnvFactory, seeds: Sequence[int], config: Config, network: Network | None) -> None:
        self._make_instead = partial(local_evaluator, factory, seeds, config)
        self._instead: Evaluator | None = None
        self._came: Evaluation | None = None
        self._unsent: PolicySnapshot | None = None  # until the process is ready for them: nobody waits for it to start
        self._ready = False
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        threads = max(1, free_cores(len(seeds) * config.num_envs))
        there = EnvFactory(factory.env, factory.args, factory.pixels, factory.stack, threads=threads)
        try:
            order = cloudpickle.dumps((there, list(seeds), config, network))
            # In a session of its own, because Ctrl-C is for the one who asks.
            self._process, self._pipe = with_pipe(["-c", SCRIPT], start_new_session=True)
            self._pipe.send_bytes(order)
        except Exception as problem:  # not every environment can be sent, and what is raised then has no common kind
            self._do_without(said(problem))

    def _do_without(self, why: str) -> None:
        if self._pipe is not None:
            self._pipe.close()
        self._pipe = None
        warn(f"there is no process for evaluations ({why}): they take turns with training.")

    def submit(self, policy_snapshot: PolicySnapshot) -> None:
        """These are to play; their tensors are on the CPU."""
        self._unsent, self._came = policy_snapshot, None
        self.poll()

    def poll(self, seconds: float = 0.0) -> Evaluation | None:
        """What came of it, if it is there within so many seconds."""
        if self._came is None and self._pipe is not None:
            try:
                if self._pipe.poll(seconds):
                    self._hear(*self._pipe.recv())
                if self._ready and self._unsent is not None and self._pipe is not None:
                    parts = vars(self._unsent).items()
                    self._pipe.send({part: {k: t.numpy() for k, t in tensors.items()} for part, tensors in parts})
                    self._unsent = None
            except (EOFError, OSError):
                self._do_without(f"it ended with exit code {self._exit_code()}")
        return self._came

    def _hear(self, kind: str, what: Evaluation | str | None) -> None:
        if isinstance(what, Evaluation):
            self._came = what
        elif kind == "ready":
            self._ready = True
        else:
            self._do_without(str(what))

    def result(self, policy_snapshot: PolicySnapshot, stop: Callable[[], bool]) -> Evaluation | None:
        """What came of those who were asked to play, when it is there; None if told to stop before."""
        while (came := self.poll(0.1)) is None:
            if stop():
                return None
            if self._pipe is None:
                self._instead = self._instead or self._make_instead()
                return self._instead.result(policy_snapshot, stop)
        return came

    def _exit_code(self) -> int | None:
        """Of a process that has nothing to do any more."""
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
        if self._instead is not None:
            self._instead.close()


def serve(descriptor: int, parent: int) -> None:
    """In the other process: play whoever comes, until the pipe closes."""
    end_only_with_parent(parent)
    warnings.simplefilter("ignore")
    pipe = Connection(descriptor)
    try:
        factory, seeds, config, network = cloudpickle.loads(pipe.recv_bytes())
        with (
            hardware(config.threads, config.precision),
            networks.using(network),
            closing(local_evaluator(factory, seeds, config)) as evaluator,
        ):
            pipe.send(("ready", None))
            while True:
                parts = pipe.recv().items()
                policy_snapshot = {part: {k: torch.tensor(a) for k, a in arrays.items()} for part, arrays in parts}
                # Nothing is sent meanwhile: if there is something to read, it is the end.
                evaluation = evaluator.result(PolicySnapshot(**policy_snapshot), stop=pipe.poll)
                if evaluation is None:
                    return
                pipe.send(("played", evaluation))
    except (EOFError, ConnectionError):
        return  # nobody is there any more
    except (Exception, SystemExit) as problem:
        with suppress(OSError):
            pipe.send(("failed", said(problem)))
