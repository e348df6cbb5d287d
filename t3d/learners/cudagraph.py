"""The same functions, compiled and recorded by a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from t3d import agent as agents
from t3d.config import Config
from t3d.learners.compiled import (
    ActBuffers,
    Mlp,
    acting_precision,
    best_first,
    compiled,
    first_working,
    set_compile_cache,
    with_mlp,
)
from t3d.learners.eager import Floats, LearnerState, update
from t3d.replay import Replay, Transitions


class CudaGraphLearner:
    """The same functions, compiled, and recorded by the GPU: a call is one word, and the GPU does the rest by itself.

    What goes to the GPU at a step, observations and new transitions, goes in one copy, and is taken from memory that
    the GPU can reach by itself; transitions wait for the next observations. The host waits for nothing but the actions,
    so environments move while the GPU learns.
    """

    def __init__(self, whole: LearnerState, learners: list[LearnerState], config: Config) -> None:
        set_compile_cache()
        self._memory, agent, device = whole.memory, whole.agent, whole.agent.seeds.device
        shape = (len(agent.seeds), config.num_envs)
        self._in = Transfer(
            device,
            step=((), np.int64),
            obs=((*shape, self._memory.input_dim), np.float32),
            **self._memory.incoming(config.num_envs * config.n_step, self._memory.frames_per_step),
        )
        self._out = Transfer(device, action=((*shape, self._memory.action_dim), np.float32))
        self._memory.nothing(self._in.here)
        there = self._in.there
        player = ActBuffers(agent, self._memory, there["obs"], there["step"], self._out.there["action"])

        def translate(mlp: Callable[[str], Mlp]) -> tuple[list[Callable[[], None]], ...]:
            with with_mlp(mlp(acting_precision(config))):
                play = compiled(lambda to: to.play(config.exploration_noise), [player], ON_GPU)
            with with_mlp(mlp(config.precision)):
                critics = compiled(lambda to: update(to, config, policy_step=False), learners, ON_GPU)
                everything = compiled(lambda to: update(to, config, policy_step=True), learners, ON_GPU)
            with _undone(whole):  # once for real: the first time is done in another way than ever after
                for work in (*play, *critics, *everything):
                    work()
            return play, critics, everything

        (play,), critics, everything = first_working(translate, mlps(whole.memory, config))

        def store() -> None:
            self._in.to_device()
            self._memory.write(there)

        def explore() -> None:
            store()
            play()
            self._out.to_host()

        with _undone(whole):
            explore()
        self._explore, self._store = recorded(explore), recorded(store)
        self._critics, self._everything = [recorded(one) for one in critics], [recorded(one) for one in everything]
        self._mark = Mark()  # behind the last thing that reads `_in` or writes `_out`
        self._pending = False  # whether there are transitions in `_in` that were not asked to be stored

    def explore(self, obs: Floats, step: int) -> Callable[[], Floats]:
        self._mark.wait()
        if not self._pending:  # what went with the last copy is stored
            self._memory.nothing(self._in.here)
        self._in.here["obs"][:] = obs
        self._in.here["step"][...] = step
        self._explore.replay()
        self._mark.set()
        self._pending = False
        return self._explored

    def _explored(self) -> Floats:
        self._mark.wait()
        return np.array(self._out.here["action"])

    def store(self, rows: Transitions) -> None:
        self.flush()
        self._mark.wait()
        self._memory.lay_out(self._in.here, rows)
        self._pending = True

    def update(self, k: int, policy_step: bool) -> None:
        self.flush()
        (self._everything if policy_step else self._critics)[k].replay()

    def flush(self) -> None:
        if self._pending:
            self._store.replay()
            self._mark.set()
            self._pending = False


class Mark:
    """A place in what the GPU was asked for, to wait for."""

    def __init__(self) -> None:
        self._stream = torch.cuda.current_stream()
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._reached = True

    def set(self) -> None:
        self._event.record(self._stream)
        self._reached = False

    def wait(self) -> None:
        if not self._reached:
            self._event.synchronize()
            self._reached = True


ON_GPU = {
    "combo_kernels": True,  # one for many tensors
    "deterministic": True,  # no choice that is left to timing
    "realize_opcount_threshold": 8,  # Adam's factors are computed once, not for each weight
}


class Transfer:
    """Arrays on the host and tensors of the same names on the device, which move from here to there in one copy."""

    def __init__(self, device: torch.device, **parts: tuple[tuple[int, ...], type]) -> None:
        # The widest first: each begins at a multiple of its own width.
        parts = dict(sorted(parts.items(), key=lambda item: -np.dtype(item[1][1]).itemsize))
        sizes = {name: int(np.prod(shape)) * np.dtype(dtype).itemsize for name, (shape, dtype) in parts.items()}
        self._here = torch.zeros(sum(sizes.values()), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._there = torch.zeros_like(self._here, device=device)
        self.here: dict[str, NDArray[Any]] = {}
        self.there: dict[str, Tensor] = {}
        end = 0
        for name, (shape, dtype) in parts.items():
            begin, end = end, end + sizes[name]
            self.here[name] = self._here[begin:end].numpy().view(dtype).reshape(shape)
            self.there[name] = self._there[begin:end].view(torch.from_numpy(self.here[name]).dtype).view(shape)

    def to_device(self) -> None:
        self._there.copy_(self._here, non_blocking=True)

    def to_host(self) -> None:
        self._here.copy_(self._there, non_blocking=True)


def recorded(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """What the GPU is asked to do, kept to be asked for again; it is not done yet."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


@contextmanager
def _undone(to: LearnerState) -> Iterator[None]:
    """Whatever happens to an agent and its metrics inside is as it was afterwards."""
    memory = {name: tensor for name, tensor in to.memory.tensors().items() if name not in ("rows", "frames")}
    tensors = agents.tensors({"agent": to.agent, "sums": to.sums, "memory": memory})
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    try:
        yield
    finally:
        for name, tensor in tensors.items():
            tensor.copy_(before[name])


def mlps(memory: Replay, config: Config) -> dict[str, Callable[[str], Mlp]]:
    """How to compute the networks in a precision, best first: as kernels where those are for such networks."""
    try:
        from t3d.learners import triton_mlp
    except ImportError:
        return best_first({})
    fit = triton_mlp.fits(memory.obs_dim, memory.action_dim, config.hidden)
    return best_first({"hand-written kernels": triton_mlp.mlp} if fit else {})
