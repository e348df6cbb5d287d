"""Gymnasium environments in worker processes that may die or hang: they are killed, replaced, and the run goes on."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
from numpy.typing import NDArray

from t3d.envs.batch import EnvError
from t3d.envs.slots import Lost, Raised, Stepped
from t3d.envs.worker import said
from t3d.errors import T3DError

START_SECONDS = 120.0
TRIES = 5  # a worker that dies this often without finishing a step is not worth another try
CLOSING_SECONDS = 2.0  # for the environments of all workers to close


def with_pipe(script: list[str], **options: Any) -> tuple["subprocess.Popen[bytes]", Connection]:
    """A Python process and this end of a pipe to it.

    Its arguments are the number of the other end, this process's id, and where modules are.
    """
    ours, theirs = Pipe()
    command = [sys.executable, *script, str(theirs.fileno()), str(os.getpid()), *sys.path]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, **options)
    theirs.close()
    return process, ours


class Worker:
    """A process with some of the environments."""

    def __init__(
        self, name: str, env: Any, args: dict[str, Any], pixels: int, indices: list[int], worker_timeout: float
    ) -> None:
        self.name, self.worker_timeout = name, worker_timeout
        self.replaced = 0
        self._deaths: Counter[int | None] = Counter()  # in a row, by the environment in whose call it was
        try:
            self._order = cloudpickle.dumps((env, args, pixels, indices))
        except Exception as problem:
            raise T3DError(f"{name} cannot be sent to a worker process; use --workers 0: {said(problem)}") from problem
        self._launch()

    def _launch(self) -> None:
        try:
            # In a session of its own, because Ctrl-C is for the one who asks.
            script = [str(Path(__file__).with_name("worker.py"))]
            self.process, self._pipe = with_pipe(script, start_new_session=True)
        except OSError as error:
            raise EnvError(f"{self.name}: no worker process can be started: {error.strerror}.", call="reset") from error
        self.waiting: list[int] = []  # whose answers are still to come, in order
        with suppress(OSError):
            self._pipe.send_bytes(self._order)

    def ready(self) -> "Worker":
        """Wait until the environments are made; a process that dies over it is replaced."""
        while True:
            try:
                self._receive(START_SECONDS)
                return self
            except Raised as problem:
                self.close()
                raise T3DError(f"{self.name} cannot be made in a worker process: {problem}") from problem
            except Lost:
                self._count_death(None)
                self._launch()

    def _count_death(self, index: int | None) -> None:
        self.process.kill()
        self.process.wait()
        self._pipe.close()
        self.replaced += 1
        self._deaths[index] += 1
        if self._deaths[index] >= TRIES:
            raise EnvError(
                f"{self.name}: a worker process died or hung {TRIES} times in a row without finishing a step"
                f" (exit code {self.process.returncode}); try it with --workers 0 to see why.",
                call="reset",
            )

    def send(self, call: str, index: int, argument: Any) -> None:
        with suppress(OSError):  # it died; whoever waits for the answer will notice
            self._pipe.send((call, index, argument))
        self.waiting.append(index)

    def answer(self) -> Any:
        """The answer to the oldest call; if it does not come the process is replaced, and all its calls are lost."""
        if not self.waiting:
            raise Lost
        try:
            answer = self._receive(self.worker_timeout)
        except Lost:
            self._count_death(self.waiting[0])
            self._launch()
            self.ready()
            raise
        except Raised:
            self._was_answered()
            raise
        self._was_answered()
        return answer

    def _was_answered(self) -> None:
        self.waiting.pop(0)
        self._deaths.clear()

    def _receive(self, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        try:
            # In slices, so that Ctrl-C is heard.
            while not self._pipe.poll(min(1.0, max(0.0, deadline - time.monotonic()))):
                ended = self.process.poll() is not None and not self._pipe.poll()
                if ended or time.monotonic() >= deadline:  # a program that it started may hold the pipe open
                    raise Lost
            kind, value = self._pipe.recv()
        except (EOFError, OSError):
            raise Lost from None
        except Lost:
            raise
        except KeyboardInterrupt:
            raise
        except BaseException as problem:  # of unpickling what the environment returned, which may do anything
            raise Raised(f"what cannot be sent from its process: {said(problem)}") from problem
        if kind == "raised":
            raise Raised(*value)
        return value

    def hang_up(self) -> None:
        """Let it close its environments and end."""
        self._pipe.close()

    def close(self, seconds: float = 0.0) -> None:
        """End it, after so many seconds at most."""
        self.hang_up()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.process.kill()
        self.process.wait()


def close_all(workers: Sequence[Worker]) -> None:
    """End them, with some time for their environments to close."""
    for worker in workers:
        worker.hang_up()
    deadline = time.monotonic() + CLOSING_SECONDS
    for worker in workers:
        worker.close(max(0.0, deadline - time.monotonic()))


class WorkerSlot:
    """One environment of a worker."""

    def __init__(self, worker: Worker, index: int) -> None:
        self._worker, self._index = worker, index
        self._generation = worker.replaced

    def reset(self, seed: int) -> Any:
        self._generation = self._worker.replaced
        self._worker.send("reset", self._index, seed)
        return self._worker.answer()

    def begin(self, action: NDArray[Any]) -> None:
        if self._generation == self._worker.replaced:
            self._worker.send("step", self._index, action)

    def end(self) -> Stepped:
        if self._generation != self._worker.replaced:
            raise Lost(here=False)  # the process was replaced since: this environment's episode went with it
        return Stepped(*self._worker.answer())

    def remake(self) -> None:
        self._generation = self._worker.replaced
        self._worker.send("remake", self._index, None)
        self._worker.answer()

    def close(self) -> None:
        pass  # the workers are closed as a whole
