"""Evaluations in a process of their own, on the CPU, while training goes on.

A place and nothing else: the same episodes would be played here with the same numbers, and are where that process
cannot be had or ends. What goes wrong in it is found again here, and said here.
"""

import os
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
from t3d.accelerate import hardware
from t3d.config import Config
from t3d.envs import EnvBatch, Source
from t3d.envs.workers import with_pipe
from t3d.evaluation import Evaluation, Evaluator, Players
from t3d.limits import cores
from t3d.networks import Network, Parameters

SCRIPT = "import sys; sys.path[:] = sys.argv[2:]; from t3d.beside import serve; serve(int(sys.argv[1]))"
LARGEST = 2e7  # multiplications for a step of all episodes, above which a processor would be too slow for a GPU


def decide(config: Config, source: Source, actor: Parameters, envs: EnvBatch) -> Config:
    """Where it is left open: on if a GPU learns, a quarter of the cores has nothing to do, and actors, who act on the
    CPU then, are small. Not with a vector environment: evaluations have others, and what is wrong with those is to be
    said before training begins."""
    if config.eval_beside != "auto":
        return config
    work = config.eval_episodes * sum(tensor.numel() for tensor in actor.values())
    room = 4 * free_cores(envs.count) >= cores()
    known = source.vector is None and envs.sight is None
    worth = config.device == "cuda" and room and known and work <= LARGEST
    return replace(config, eval_beside="on" if worth else "off")


def evaluator_of(source: Source, seeds: Sequence[int], config: Config, network: Network | None) -> "Evaluator | Beside":
    """Who plays the evaluations of a run."""
    if config.eval_beside == "on":
        return Beside(source, seeds, config, network)
    return Evaluator(source, seeds, config.eval_episodes, config.gamma)


class Beside:
    """An evaluator that lets the caller go on while it plays."""

    beside = True

    def __init__(self, source: Source, seeds: Sequence[int], config: Config, network: Network | None) -> None:
        self._here = partial(Evaluator, source, seeds, config.eval_episodes, config.gamma)
        self._instead: Evaluator | None = None
        self._asked: Players | None = None
        self._came: Evaluation | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        threads = max(1, free_cores(len(seeds) * config.num_envs))
        away = Source(source.env, source.args, source.pixels, source.stack, threads=threads)
        # Not every environment can be sent, and what is raised then has no common kind.
        with suppress(Exception):
            order = cloudpickle.dumps((os.getpid(), away, list(seeds), config, network))
            # Ctrl-C is for the one who asks; and a GPU is not for two.
            alone = {"start_new_session": True, "env": {**os.environ, "CUDA_VISIBLE_DEVICES": ""}}
            self._process, self._pipe = with_pipe(["-c", SCRIPT], **alone)
            self._pipe.send_bytes(order)

    def ask(self, players: Players) -> None:
        """These are to play; their tensors are on the CPU."""
        self._asked, self._came = players, None
        if self._pipe is not None:
            with suppress(OSError):  # it has ended: seen when the answer is called for
                self._pipe.send({part: {k: t.numpy() for k, t in own.items()} for part, own in vars(players).items()})

    def glance(self, seconds: float = 0.0) -> Evaluation | None:
        """What came of it, if it is there within so many seconds."""
        if self._came is None and self._pipe is not None:
            try:
                if self._pipe.poll(seconds):
                    self._came = self._pipe.recv()
            except (EOFError, OSError):
                self._pipe.close()
                self._pipe = None
        return self._came

    def answer(self, stop: Callable[[], bool]) -> Evaluation | None:
        """What came of it, when it is there; None if told to stop before."""
        assert self._asked is not None, "somebody has to be asked first"
        while (came := self.glance(0.1)) is None and self._pipe is not None:
            if stop():
                return None
        if came is not None:
            return came
        if self._instead is None:
            warnings.warn("there is no process for evaluations: they take turns with training.", stacklevel=2)
            self._instead = self._here()
        self._instead.ask(self._asked)
        return self._instead.answer(stop)

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._instead is not None:
            self._instead.close()


def free_cores(envs: int) -> int:
    """Those that so many environments leave alone."""
    return cores() - min(cores(), envs)


def serve(descriptor: int) -> None:
    """In the other process: play whoever comes, until the pipe closes."""
    warnings.simplefilter("ignore")
    pipe = Connection(descriptor)
    with suppress(Exception):
        parent, source, seeds, config, network = cloudpickle.loads(pipe.recv_bytes())
        with (
            hardware(config.threads, "fp32"),
            networks.using(network),
            closing(Evaluator(source, seeds, config.eval_episodes, config.gamma)) as evaluator,
        ):
            while True:
                arrays = pipe.recv()
                tensors = {part: {k: torch.tensor(a) for k, a in named.items()} for part, named in arrays.items()}
                pipe.send(evaluator.play(Players(**tensors), stop=lambda: os.getppid() != parent))
