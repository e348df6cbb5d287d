"""Gymnasium environments in worker processes; a process that dies or hangs is killed and replaced."""

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
from t3d.envs.slots import Lost, Raised, SlotResult
from t3d.envs.worker import said
from t3d.errors import T3DError

START_SECONDS = 120.0
MAX_DEATHS = 5  # deaths of a worker in a row, without a finished call, before it is given up
CLOSE_SECONDS = 2.0  # for all workers together to close their environments


def with_pipe(script: list[str], **options: Any) -> tuple["subprocess.Popen[bytes]", Connection]:
    """Start a Python process; return it and this end of a pipe to it.

    Its arguments are the file descriptor of the other end, this process's id, and the module search path.
    """
    ours, theirs = Pipe()
    command = [sys.executable, *script, str(theirs.fileno()), str(os.getpid()), *sys.path]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, **options)
    theirs.close()
    return process, ours


class Worker:
    """A worker process with some of the environments."""

    def __init__(
        self, name: str, env: Any, args: dict[str, Any], pixels: int, indices: list[int], worker_timeout: float
    ) -> None:
        self.name, self.worker_timeout = name, worker_timeout
        self.replaced = 0
        self._deaths: Counter[int | None] = Counter()  # in a row, by the environment whose call was running
        try:
            self._setup = cloudpickle.dumps((env, args, pixels, indices))
        except Exception as problem:
            raise T3DError(f"{name} cannot be sent to a worker process: {said(problem)}. Use --workers 0.") from problem
        self._launch()

    def _launch(self) -> None:
        try:
            # A new session: only the parent gets Ctrl-C.
            script = [str(Path(__file__).with_name("worker.py"))]
            self.process, self._pipe = with_pipe(script, start_new_session=True)
        except OSError as error:
            raise EnvError(f"{self.name}: no worker process can be started: {error.strerror}.", call="reset") from error
        self.pending: list[int] = []  # the environments of the unfinished calls, in order
        with suppress(OSError):
            self._pipe.send_bytes(self._setup)

    def ready(self) -> "Worker":
        """Wait until the environments are made; replace the process if it dies."""
        while True:
            try:
                self._poll(START_SECONDS)
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
        if self._deaths[index] >= MAX_DEATHS:
            raise EnvError(
                f"{self.name}: a worker process died or hung {MAX_DEATHS} times in a row without finishing a step"
                f" (exit code {self.process.returncode}); try it with --workers 0 to see why.",
                call="reset",
            )

    def send(self, call: str, index: int, argument: Any) -> None:
        with suppress(OSError):  # the process died: `receive` reports it
            self._pipe.send((call, index, argument))
        self.pending.append(index)

    def receive(self) -> Any:
        """Return the result of the oldest call. If the process died or hung, replace it and raise Lost."""
        if not self.pending:
            raise Lost
        try:
            result = self._poll(self.worker_timeout)
        except Lost:
            self._count_death(self.pending[0])
            self._launch()
            self.ready()
            raise
        except Raised:
            self._finish_call()
            raise
        self._finish_call()
        return result

    def _finish_call(self) -> None:
        self.pending.pop(0)
        self._deaths.clear()

    def _poll(self, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        try:
            # In intervals of a second, so that Ctrl-C is handled.
            while not self._pipe.poll(min(1.0, max(0.0, deadline - time.monotonic()))):
                ended = self.process.poll() is not None and not self._pipe.poll()
                if ended or time.monotonic() >= deadline:  # its child processes may hold the pipe open
                    raise Lost
            kind, value = self._pipe.recv()
        except (EOFError, OSError):
            raise Lost from None
        except Lost:
            raise
        except KeyboardInterrupt:
            raise
        except BaseException as problem:  # unpickling the environment's result may raise anything
            raise Raised(f"a value that cannot be sent from its process: {said(problem)}") from problem
        if kind == "raised":
            raise Raised(*value)
        return value

    def close_pipe(self) -> None:
        """Close the pipe; the process then closes its environments and ends."""
        self._pipe.close()

    def close(self, seconds: float = 0.0) -> None:
        """End the process; kill it after `seconds`."""
        self.close_pipe()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.process.kill()
        self.process.wait()


def close_all(workers: Sequence[Worker]) -> None:
    """End all workers; give their environments CLOSE_SECONDS to close."""
    for worker in workers:
        worker.close_pipe()
    deadline = time.monotonic() + CLOSE_SECONDS
    for worker in workers:
        worker.close(max(0.0, deadline - time.monotonic()))


class WorkerSlot:
    """One environment in a worker process."""

    def __init__(self, worker: Worker, index: int) -> None:
        self._worker, self._index = worker, index
        self._generation = worker.replaced

    def reset(self, seed: int) -> Any:
        self._generation = self._worker.replaced
        self._worker.send("reset", self._index, seed)
        return self._worker.receive()

    def step_async(self, action: NDArray[Any]) -> None:
        if self._generation == self._worker.replaced:
            self._worker.send("step", self._index, action)

    def step_wait(self) -> SlotResult:
        if self._generation != self._worker.replaced:
            raise Lost(own_call=False)  # the process was replaced after the call: the episode is lost
        return SlotResult(*self._worker.receive())

    def remake(self) -> None:
        self._generation = self._worker.replaced
        self._worker.send("remake", self._index, None)
        self._worker.receive()

    def close(self) -> None:
        pass  # `close_all` closes the workers
