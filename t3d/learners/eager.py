"""The verbs that a loop spends its time in, what they work on, and the plainest of them: the functions as they are."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from t3d import agent as agents
from t3d.config import Config
from t3d.replay import Replay, Transitions
from t3d.steps import Agent, Metrics

Floats = NDArray[np.float32]
Sums = dict[str, Tensor]  # (S,) metrics added up since they were last read


class Learner(Protocol):
    """What the loop does at every step. On a GPU all of them are asked for and done later, in order."""

    def explore(self, obs: Floats, step: int) -> Callable[[], Floats]:
        """(S, N, O) observations and the step they were made in -> (S, N, A) actions with noise, when called for."""
        ...

    def store(self, rows: Transitions) -> None:
        """[step 1] Transitions into the memory."""
        ...

    def update(self, k: int, policy_step: bool) -> None:
        """Steps 4 to 15, for the k-th of the agents that learn by themselves; `delayed` where the actor moves too."""
        ...

    def flush(self) -> None:
        """Ask for what is still to be asked for, before somebody else reads the tensors."""
        ...


@dataclass(frozen=True)
class LearnerState:
    """An agent that learns by itself, with its memory and its metrics: all seeds of a run, or one of them."""

    agent: Agent
    memory: Replay
    sums: Sums


class CannotCompile(Exception):
    """The compiler's reason, in a line: there is none on this machine, or it fails."""


@contextmanager
def hardware(threads: int, precision: str) -> Iterator[None]:
    """Results depend on how products are split over threads and rounded, so a run sets both for itself."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = torch.get_num_threads(), products.allow_tf32, convolutions.allow_tf32, convolutions.deterministic
    torch.set_num_threads(threads)
    products.allow_tf32 = convolutions.allow_tf32 = precision == "tf32"
    convolutions.deterministic = True
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        products.allow_tf32, convolutions.allow_tf32, convolutions.deterministic = before[1:]


def products(config: Config, device: torch.device) -> AbstractContextManager[Any]:
    """Matrix products in bfloat16 if that is asked for; weights, moments, targets and losses stay as they are."""
    return torch.autocast(device.type, torch.bfloat16) if config.precision == "bf16" else nullcontext()


def add_up(sums: Sums, metrics: Metrics) -> None:
    for name, value in metrics.items():
        sums[name].add_(value)


class EagerLearner:
    """The functions as they are."""

    def __init__(self, whole: LearnerState, learners: list[LearnerState], config: Config) -> None:
        self.whole, self.learners, self.config = whole, learners, config
        self.store = whole.memory.add_rows

    def explore(self, obs: Floats, step: int) -> Callable[[], Floats]:
        agent = self.whole.agent
        here = torch.from_numpy(obs).to(agent.seeds.device)
        action = agents.explore(agent, here, step, self.config.exploration_noise, self.whole.memory.normalizer())
        return lambda: np.asarray(action.cpu().numpy())

    def update(self, k: int, policy_step: bool) -> None:
        update(self.learners[k], self.config, policy_step)

    def flush(self) -> None:
        pass


def update(to: LearnerState, config: Config, policy_step: bool) -> None:
    """Steps 4 to 15 once."""
    with products(config, to.agent.seeds.device):
        add_up(to.sums, agents.update(to.agent, to.memory, config.batch_size, config, policy_step))
