"""What a learner offers, the data it works on, and the learner that runs the functions uncompiled.

Shapes: S seeds, N environments a seed, B batch, O observation, A action.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from t3d import steps
from t3d.agent import explore, one_seed
from t3d.config import Config
from t3d.replay import Replay, Transitions
from t3d.state_dict import NOT_SAVED
from t3d.steps import Agent

Floats = NDArray[np.float32]


@dataclass
class LearnerState:
    """What learns: an agent, its replay memory, and the metrics since they were last logged; of all seeds, or one."""

    agent: Agent
    memory: Replay
    sums: dict[str, Tensor]  # (S,) metrics added up
    algorithm: Any = field(default=steps, metadata=NOT_SAVED)  # a module with the functions of `steps`

    def seed(self, k: int) -> "LearnerState":
        """Seed `k` alone; it shares its tensors with the whole."""
        sums = {name: total[k : k + 1] for name, total in self.sums.items()}
        return LearnerState(one_seed(self.agent, k), self.memory.seed(k), sums, self.algorithm)


class Learner(Protocol):
    """What the trainer calls at every step. On a GPU the calls return before the work is done, and it runs in order."""

    state: LearnerState

    def act(self, obs: Floats, step: int) -> Callable[[], Floats]:
        """Start acting on observations (S, N, O) made at a step; the result is called for (S, N, A) noisy actions."""
        ...

    def store(self, new: Transitions) -> None:
        """[step 1] Add transitions to the replay memory."""
        ...

    def update(self, k: int, policy_step: bool) -> None:
        """Steps 4 to 15 once, for the k-th independent part: all seeds together, or one seed."""
        ...

    def flush(self) -> None:
        """Start what is still waiting to be started, before anyone else reads the tensors."""
        ...


class EagerLearner:
    """The functions as they are."""

    def __init__(self, state: LearnerState, parts: list[LearnerState], config: Config) -> None:
        self.state, self._parts, self._config = state, parts, config

    def act(self, obs: Floats, step: int) -> Callable[[], Floats]:
        agent, memory = self.state.agent, self.state.memory
        here = torch.from_numpy(obs).to(agent.seeds.device)
        action = explore(agent, here, step, self._config.exploration_noise, memory.scaling())
        return lambda: np.asarray(action.cpu().numpy())

    def store(self, new: Transitions) -> None:
        self.state.memory.add(new)

    def update(self, k: int, policy_step: bool) -> None:
        update(self._parts[k], self._config, policy_step)

    def flush(self) -> None:
        pass


def update(state: LearnerState, config: Config, policy_step: bool) -> None:
    """Steps 4 to 15 once, and their metrics added up."""
    with mixed_precision(config, state.agent.seeds.device):
        done = state.algorithm.update(state.memory, state.agent, config, config.batch_size, policy_step)
        for name, value in done.metrics().items():
            state.sums[name].add_(value)


def mixed_precision(config: Config, device: torch.device) -> AbstractContextManager[Any]:
    """Matrix products in bfloat16 if asked for; weights, moments, targets and losses stay in float32."""
    return torch.autocast(device.type, torch.bfloat16) if config.precision == "bf16" else nullcontext()


@contextmanager
def hardware(threads: int, precision: str) -> Iterator[None]:
    """Set the number of CPU threads and TF32 for a run, because results depend on both; undo it afterwards."""
    matmul, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = torch.get_num_threads(), matmul.allow_tf32, convolutions.allow_tf32, convolutions.deterministic
    torch.set_num_threads(threads)
    matmul.allow_tf32 = convolutions.allow_tf32 = precision == "tf32"
    convolutions.deterministic = True
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        matmul.allow_tf32, convolutions.allow_tf32, convolutions.deterministic = before[1:]
