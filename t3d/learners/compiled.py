"""The functions compiled by PyTorch, on tensors that stay in place: a call passes no arguments and checks nothing.

Shapes: S seeds, N environments a seed, B batch, O observation, A action.
"""

import hashlib
import inspect
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from t3d import networks, steps
from t3d.agent import explore
from t3d.config import Config
from t3d.learners import cpu_mlp
from t3d.learners.eager import Floats, LearnerState, mixed_precision, update
from t3d.networks import Apply, Networks
from t3d.replay import Batch, Replay, Transitions
from t3d.state_dict import tensors, with_tensors
from t3d.steps import Agent
from t3d.torch_private import CannotCompile, compile_function, set_compile_cache

Backend = Callable[[str], Apply]  # a precision -> the network's function in it
Calls = list[Callable[[], None]]


class CompiledLearner:
    """Compiled functions on fixed tensors."""

    def __init__(self, state: LearnerState, parts: list[LearnerState], config: Config) -> None:
        set_compile_cache()
        self.state, self._config = state, config
        device, memory = state.agent.seeds.device, state.memory
        shape = (len(state.agent.seeds), config.num_envs)
        self._buffers = ActBuffers(
            state.agent,
            memory,
            obs=torch.zeros(*shape, memory.input_dim, device=device),
            step=torch.zeros((), dtype=torch.int64, device=device),
            action=torch.zeros(*shape, memory.action_dim, device=device),
        )
        # On a CPU NumPy shares them: it has less overhead than PyTorch for small writes.
        names = ("obs", "step", "action") if device.type == "cpu" else ()
        self._arrays: dict[str, NDArray[Any]] = {name: getattr(self._buffers, name).numpy() for name in names}
        # Random numbers and sampling are compiled apart from the rest, which would compute them again wherever they
        # are used. Without vector instructions the compiler takes a tenth of the time for them. An algorithm with an
        # `update` of its own is compiled in one.
        batches = [StagedBatch.create(part, config.batch_size) for part in parts]
        self._fetch: Calls = []
        if is_steps_update(state.algorithm):
            self._fetch = compile_for(lambda staged: staged.fetch(config), batches, {"cpp.simdlen": 1})
        self._act, self._critic_updates, self._full_updates = first_working(
            lambda backend: self._compile(backend, batches), cpu_backends(state.agent.networks, config)
        )

    def _compile(self, backend: Backend, batches: list["StagedBatch"]) -> tuple[Calls, Calls, Calls]:
        """Acting, an update of the critics, and an update of everything."""
        config, apply = self._config, backend(self._config.precision)
        acting = replace(self._buffers, agent=with_apply(self._buffers.agent, backend(acting_precision(config))))
        learning = [replace(b, state=replace(b.state, agent=with_apply(b.state.agent, apply))) for b in batches]

        def learn(staged: StagedBatch, policy_step: bool) -> None:
            if self._fetch:
                staged.learn(config, policy_step)
            else:
                update(staged.state, config, policy_step)

        return (
            compile_for(lambda buffers: buffers.act(config.exploration_noise), [acting], {}),
            compile_for(lambda staged: learn(staged, policy_step=False), learning, {}),
            compile_for(lambda staged: learn(staged, policy_step=True), learning, {}),
        )

    def act(self, obs: Floats, step: int) -> Callable[[], Floats]:
        if not self._arrays:
            self._buffers.obs.copy_(torch.from_numpy(obs))
            self._buffers.step.fill_(step)
            self._act[0]()
            return lambda: np.asarray(self._buffers.action.cpu().numpy())
        self._arrays["obs"][:], self._arrays["step"][...] = obs, step
        self._act[0]()
        return self._arrays["action"].copy

    def store(self, new: Transitions) -> None:
        self.state.memory.add(new)

    def update(self, k: int, policy_step: bool) -> None:
        if self._fetch:
            self._fetch[k]()
        (self._full_updates if policy_step else self._critic_updates)[k]()

    def flush(self) -> None:
        pass


def is_steps_update(algorithm: Any) -> bool:
    """Whether its `update` is that of `steps`, and calls the algorithm's own `draw` and `learn`."""
    update = algorithm.update
    names = getattr(update, "__globals__", {})
    own = all(names.get(name) is getattr(algorithm, name) for name in ("draw", "learn"))
    return own and getattr(update, "__code__", None) == steps.update.__code__


@dataclass(frozen=True)
class ActBuffers:
    """Every tensor that acting reads and writes."""

    agent: Agent
    memory: Replay
    obs: Tensor
    step: Tensor
    action: Tensor

    def act(self, noise: float) -> None:
        self.action.copy_(explore(self.agent, self.obs, self.step, noise, self.memory.scaling()))


@dataclass(frozen=True)
class StagedBatch:
    """Every tensor that an update reads and writes: a sampled batch and its noise are staged between two calls."""

    state: LearnerState
    batch: Batch
    noise: Tensor

    @staticmethod
    def create(state: LearnerState, size: int) -> "StagedBatch":
        memory = state.memory
        rows = memory.rows.new_zeros(len(memory.rows), size, 1)

        def wide(width: int) -> Tensor:
            return rows.repeat(1, 1, width)

        reward, terminated, discount = (rows[..., 0].clone() for _ in range(3))
        dims = memory.input_dim, memory.action_dim
        batch = Batch(wide(dims[0]), wide(dims[1]), reward, wide(dims[0]), terminated, discount)
        return StagedBatch(state, batch, wide(memory.action_dim))

    def fetch(self, config: Config) -> None:
        """Draw random numbers and sample the batch. [step 4]"""
        agent, memory = self.state.agent, self.state.memory
        bits, noise = self.state.algorithm.draw(agent, config.batch_size, memory.action_dim)
        batch = memory.sample(bits, config.gamma, config.reward_scale)
        for name, tensor in tensors(self.batch).items():
            tensor.copy_(getattr(batch, name))
        self.noise.copy_(noise)

    def learn(self, config: Config, policy_step: bool) -> None:
        """Steps 5 to 15 on the staged batch."""
        with mixed_precision(config, self.noise.device):
            done = self.state.algorithm.learn(self.batch, self.state.agent, self.noise, config, policy_step)
            for name, value in done.metrics().items():
                self.state.sums[name].add_(value)


def compile_for(function: Callable[[Any], None], subjects: list[Any], options: dict[str, Any]) -> Calls:
    """`function(subject)` as a call without arguments, for each of several subjects of the same shapes."""
    own = [tensors(subject) for subject in subjects]
    names = list(own[0])

    def flat(*given: Tensor) -> None:
        function(with_tensors(subjects[0], dict(zip(names, given, strict=True))))

    # The cache may not return code that was compiled for another backend of the networks.
    tag = hashlib.sha256(_network_source(subjects[0]).encode()).hexdigest()
    inputs = [[given[name] for name in names] for given in own]
    return compile_function(flat, inputs, {"size_asserts": False, **options}, tag)  # the tensors are always the same


def _network_source(subject: Any) -> str:
    agent: Agent = subject.agent if hasattr(subject, "agent") else subject.state.agent
    return inspect.getsource(sys.modules[agent.networks.apply.__module__])


def with_apply(agent: Agent, apply: Apply) -> Agent:
    """The same agent with a faster function behind its networks."""
    return replace(agent, networks=replace(agent.networks, apply=apply))


def cpu_backends(own: Networks, config: Config) -> dict[str, Backend]:
    """How to compute these networks, fastest first: in C++ where it fits the networks and the machine."""
    fits = own.apply is networks.mlp and config.device == "cpu" and cpu_mlp.fits(config.hidden)
    return {**({"the C++ layers": cpu_mlp.mlp} if fits else {}), "plain layers": lambda _: own.apply}


def first_working(compile_with: Callable[[Backend], Any], backends: dict[str, Backend]) -> Any:
    """Compile with the first backend that works on this machine; warn about those that do not."""
    failed: list[str] = []
    for name, backend in backends.items():
        try:
            compiled = compile_with(backend)
        except Exception as error:  # Triton's errors have no common class
            reason = str(error) if isinstance(error, CannotCompile) else f"{type(error).__name__}: {error}"
            reason = reason.splitlines()[0]
            failed.append(f"{name} do not work on this machine ({reason}).")
            continue
        for sentence in failed:
            warnings.warn(sentence, stacklevel=2)
        return compiled
    raise CannotCompile(reason)


def acting_precision(config: Config) -> str:
    """Acting never uses bf16: actions are stored and learned from."""
    return "fp32" if config.precision == "bf16" else config.precision
