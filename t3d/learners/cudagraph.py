"""Compiled functions captured as CUDA graphs: a call is one replay."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from t3d import networks
from t3d.config import Config
from t3d.learners.compiled import (
    ActBuffers,
    Backend,
    Calls,
    acting_precision,
    compile_for,
    first_working,
    with_apply,
)
from t3d.learners.eager import Floats, LearnerState, update
from t3d.replay import Transitions
from t3d.state_dict import tensors
from t3d.torch_private import as_cannot_compile, set_compile_cache

ON_GPU = {
    "combo_kernels": True,  # one kernel for many tensors
    "deterministic": True,  # no choice that depends on timing
    "realize_opcount_threshold": 8,  # Adam's factors are computed once, not for each weight
}


class CudaGraphLearner:
    """Compiled functions captured as CUDA graphs.

    Observations and new transitions reach the GPU in one copy from pinned memory; transitions wait for the next
    observations. The host waits for actions only, so environments step while the GPU updates.
    """

    def __init__(self, state: LearnerState, parts: list[LearnerState], config: Config) -> None:
        set_compile_cache()
        self.state, self._config, memory = state, config, state.memory
        device, shape = state.agent.seeds.device, (len(state.agent.seeds), config.num_envs)
        frames = 0 if memory.frames is None else memory.frames.frames_per_step
        self._in = Transfer(
            device,
            step=((), np.int64),
            obs=((*shape, memory.input_dim), np.float32),
            **memory.staging_shapes(config.num_envs * config.n_step, frames),
        )
        self._out = Transfer(device, action=((*shape, memory.action_dim), np.float32))
        memory.stage_nothing(self._in.host)
        (act,), critic_updates, full_updates = first_working(
            lambda backend: self._compile(backend, parts), gpu_backends(state, config)
        )
        with as_cannot_compile():
            with _undone(state):
                self._run_act(act)
            self._act, self._store = capture(lambda: self._run_act(act)), capture(self._run_store)
            self._critic_updates = [capture(call) for call in critic_updates]
            self._full_updates = [capture(call) for call in full_updates]
        self._event = StreamEvent()  # recorded after the last work that reads `_in` or writes `_out`
        self._pending = False  # whether transitions in `_in` are not written to the replay memory yet

    def _compile(self, backend: Backend, parts: list[LearnerState]) -> tuple[Calls, Calls, Calls]:
        """Acting, an update of the critics, and an update of everything, each run once: the first run allocates."""
        config, agent, inputs = self._config, self.state.agent, self._in.device
        acting = with_apply(agent, backend(acting_precision(config)))
        buffers = ActBuffers(acting, self.state.memory, inputs["obs"], inputs["step"], self._out.device["action"])
        apply = backend(config.precision)
        learning = [replace(part, agent=with_apply(part.agent, apply)) for part in parts]
        calls = (
            compile_for(lambda buffers: buffers.act(config.exploration_noise), [buffers], ON_GPU),
            compile_for(lambda part: update(part, config, policy_step=False), learning, ON_GPU),
            compile_for(lambda part: update(part, config, policy_step=True), learning, ON_GPU),
        )
        with _undone(self.state):
            for call in (call for part in calls for call in part):
                call()
        return calls

    def _run_store(self) -> None:
        self._in.to_device()
        self.state.memory.write(self._in.device)

    def _run_act(self, act: Callable[[], None]) -> None:
        self._run_store()
        act()
        self._out.to_host()

    def act(self, obs: Floats, step: int) -> Callable[[], Floats]:
        self._event.wait()
        if not self._pending:  # the staged transitions were already written
            self.state.memory.stage_nothing(self._in.host)
        self._in.host["obs"][:] = obs
        self._in.host["step"][...] = step
        self._act.replay()
        self._event.record()
        self._pending = False
        return self._action

    def _action(self) -> Floats:
        self._event.wait()
        return np.array(self._out.host["action"])

    def store(self, new: Transitions) -> None:
        self.flush()
        self._event.wait()
        self.state.memory.stage(self._in.host, new)
        self._pending = True

    def update(self, k: int, policy_step: bool) -> None:
        self.flush()
        (self._full_updates if policy_step else self._critic_updates)[k].replay()

    def flush(self) -> None:
        if self._pending:
            self._store.replay()
            self._event.record()
            self._pending = False


class StreamEvent:
    """An event in the current stream, to wait for."""

    def __init__(self) -> None:
        self._stream = torch.cuda.current_stream()
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._reached = True

    def record(self) -> None:
        self._event.record(self._stream)
        self._reached = False

    def wait(self) -> None:
        if not self._reached:
            self._event.synchronize()
            self._reached = True


class Transfer:
    """Arrays on the host and tensors of the same names on the device; one copy moves all of them."""

    def __init__(self, device: torch.device, **parts: tuple[tuple[int, ...], type]) -> None:
        # The widest first: each begins at a multiple of its own width.
        parts = dict(sorted(parts.items(), key=lambda item: -np.dtype(item[1][1]).itemsize))
        sizes = {name: int(np.prod(shape)) * np.dtype(dtype).itemsize for name, (shape, dtype) in parts.items()}
        self._host = torch.zeros(sum(sizes.values()), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros_like(self._host, device=device)
        self.host: dict[str, NDArray[Any]] = {}
        self.device: dict[str, Tensor] = {}
        end = 0
        for name, (shape, dtype) in parts.items():
            begin, end = end, end + sizes[name]
            self.host[name] = self._host[begin:end].numpy().view(dtype).reshape(shape)
            self.device[name] = self._device[begin:end].view(torch.from_numpy(self.host[name]).dtype).view(shape)

    def to_device(self) -> None:
        self._device.copy_(self._host, non_blocking=True)

    def to_host(self) -> None:
        self._host.copy_(self._device, non_blocking=True)


def capture(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """The GPU work of a call as a CUDA graph; capturing does not run it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


@contextmanager
def _undone(state: LearnerState) -> Iterator[None]:
    """Restore the agent, the metrics and the counters of the memory afterwards."""
    kept = {name: t for name, t in tensors(state).items() if name not in ("memory.rows", "memory.frames.pixels")}
    before = {name: tensor.clone() for name, tensor in kept.items()}
    try:
        yield
    finally:
        for name, tensor in kept.items():
            tensor.copy_(before[name])


def gpu_backends(state: LearnerState, config: Config) -> dict[str, Backend]:
    """How to compute the networks, fastest first: in Triton where its kernels fit the networks."""
    own = state.agent.networks
    plain: dict[str, Backend] = {"plain layers": lambda _: own.apply}
    try:
        from t3d.learners import triton_mlp
    except ImportError:
        return plain
    fits = triton_mlp.fits(state.memory.obs_dim, state.memory.action_dim, config.hidden)
    return {"the Triton kernels": triton_mlp.mlp, **plain} if fits and own.apply is networks.mlp else plain
