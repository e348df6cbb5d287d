"""How the same text is run: as it stands, or compiled. The only file that knows these words.

`accelerate` gives the two verbs that a loop spends its time in, tied to the tensors of one run. `eager` calls the
functions of `agent.py` as they are. `compile` has PyTorch translate them into a few fused loops around the matrix
products: the first time takes a minute, after that the translation is found in a cache on the disk.

Shapes: S seeds, N environments a seed, B batch, O observation, A action.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from t3d import agent as agents
from t3d.config import Config
from t3d.replay import Batch, Replay
from t3d.steps import Agent, Metrics, learn

Floats = NDArray[np.float32]
Sums = dict[str, Tensor]  # (S,) metrics added up since they were last read


class Verbs(Protocol):
    """What the loop does at every step."""

    def explore(self, obs: Floats, step: int) -> Floats:
        """(S, N, O) observations and the step they were made in -> (S, N, A) actions with noise."""
        ...

    def update(self, k: int, delayed: bool) -> None:
        """Steps 4 to 15, for the k-th of the agents that learn by themselves; `delayed` where the actor moves too."""
        ...


@dataclass(frozen=True)
class Learner:
    """An agent that learns by itself, with its memory and its metrics: all seeds of a run, or one of them."""

    agent: Agent
    memory: Replay
    sums: Sums


class CannotCompile(Exception):
    """The compiler's reason, in a line: there is none on this machine, or it fails."""


@contextmanager
def hardware(threads: int, precision: str) -> Iterator[None]:
    """Results depend on how products are split over threads and rounded, so a run sets both for itself."""
    before = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.backends.cuda.matmul.allow_tf32 = before[1]


def products(config: Config, device: torch.device) -> AbstractContextManager[Any]:
    """Matrix products in bfloat16 if that is asked for; weights, moments, targets and losses stay as they are."""
    return torch.autocast(device.type, torch.bfloat16) if config.precision == "bf16" else nullcontext()


def add_up(sums: Sums, metrics: Metrics) -> None:
    for name, value in metrics.items():
        sums[name].add_(value)


def accelerate(agent: Agent, memory: Replay, sums: Sums, config: Config) -> Verbs:
    """The verbs in the mode that the config names, compiled when this returns."""
    if config.update_after == "episode":
        # Episodes end at different times, and then a seed learns by itself, also where all end at once: whether it is
        # stacked with others may change its rounding, and another seed's episodes must not.
        of_seed = ({name: total[k : k + 1] for name, total in sums.items()} for k in range(len(agent.seeds)))
        learners = [Learner(agents.one_seed(agent, k), memory.seed(k), part) for k, part in enumerate(of_seed)]
    else:
        learners = [Learner(agent, memory, sums)]
    kind = Compiled if config.accelerate == "compile" else Eager
    return kind(agent, learners, config)


class Eager:
    """The functions as they are."""

    def __init__(self, agent: Agent, learners: list[Learner], config: Config) -> None:
        self.agent, self.learners, self.config = agent, learners, config

    def explore(self, obs: Floats, step: int) -> Floats:
        here = torch.from_numpy(obs).to(self.agent.seeds.device)
        return np.asarray(agents.explore(self.agent, here, step, self.config.exploration_noise).cpu().numpy())

    def update(self, k: int, delayed: bool) -> None:
        to, config = self.learners[k], self.config
        with products(config, to.agent.seeds.device):
            add_up(to.sums, agents.update(to.agent, to.memory, config.batch_size, config, delayed))


class Compiled:
    """The same functions between tensors that stay where they are, so that a call has nothing to pass or to check."""

    def __init__(self, agent: Agent, learners: list[Learner], config: Config) -> None:
        _keep_translations()
        device, dim = agent.seeds.device, learners[0].memory.action_dim
        shape = (len(agent.seeds), config.num_envs)
        self._play = Player(
            agent,
            obs=torch.zeros(*shape, learners[0].memory.obs_dim, device=device),
            step=torch.zeros((), dtype=torch.int64, device=device),
            action=torch.zeros(*shape, dim, device=device),
        )
        students = [Student.of(learner, config.batch_size) for learner in learners]

        def play(to: Player) -> None:
            to.action.copy_(agents.explore(to.agent, to.obs, to.step, config.exploration_noise))

        # Random numbers and the batch are compiled apart from the rest, which would compute them again wherever they
        # are used. Without vector instructions the compiler is done with them in a tenth of the time.
        def fetch(to: Student) -> None:
            bits, noise = agents.draw(to.agent, config.batch_size, dim)
            batch = to.memory.sample(bits, config.gamma)
            for name, tensor in agents.tensors(to.batch).items():
                tensor.copy_(getattr(batch, name))
            to.noise.copy_(noise)

        def critics(to: Student) -> None:
            with products(config, device):
                add_up(to.sums, learn(to.batch, to.agent, to.noise, to.noise, config, delayed=False))

        def everything(to: Student) -> None:
            with products(config, device):
                add_up(to.sums, learn(to.batch, to.agent, to.noise, to.noise, config, delayed=True))

        (self._explore,) = compiled(play, [self._play], {})
        self._fetch = compiled(fetch, students, {"cpp.simdlen": 1})
        self._critics = compiled(critics, students, {})
        self._everything = compiled(everything, students, {})

    def explore(self, obs: Floats, step: int) -> Floats:
        self._play.obs.copy_(torch.from_numpy(obs))
        self._play.step.fill_(step)
        self._explore()
        return np.array(self._play.action.cpu().numpy())

    def update(self, k: int, delayed: bool) -> None:
        self._fetch[k]()
        (self._everything if delayed else self._critics)[k]()


@dataclass(frozen=True)
class Player:
    """Every tensor that acting reads and writes."""

    agent: Agent
    obs: Tensor
    step: Tensor
    action: Tensor


@dataclass(frozen=True)
class Student:
    """Every tensor that learning reads and writes: a learner's, and a batch and noise to hand on."""

    agent: Agent
    memory: Replay
    sums: Sums
    batch: Batch
    noise: Tensor

    @staticmethod
    def of(learner: Learner, size: int) -> "Student":
        memory = learner.memory
        rows = memory.rows.new_zeros(len(memory.rows), size, 1)

        def wide(width: int) -> Tensor:
            return rows.repeat(1, 1, width)

        scalars = (rows[..., 0].clone() for _ in range(3))
        reward, terminated, discount = scalars
        batch = Batch(wide(memory.obs_dim), wide(memory.action_dim), reward, wide(memory.obs_dim), terminated, discount)
        return Student(learner.agent, memory, learner.sums, batch, wide(memory.action_dim))


def compiled(function: Callable[[Any], None], subjects: list[Any], options: dict[str, Any]) -> list[Callable[[], None]]:
    """`function(subject)` as a call without arguments, for each of several subjects of the same shapes.

    PyTorch traces the function and compiles what it found. From then on the compiled code is called by itself, with the
    tensors it read at first, without the checks that would cost as much as a tenth of an update. For the other
    subjects it is given the tensors of the same names.
    """
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor.compile_fx import compile_fx

    found: list[Any] = []

    def backend(graph: Any, examples: Any) -> Callable[..., Any]:
        call = compile_fx(graph, examples, config_patches={"cpp_wrapper": True, **options})

        def note(*tensors: Tensor) -> tuple[()]:
            found.extend((call, tensors))
            return ()  # nothing happens yet

        return note

    assert isinstance(function, FunctionType)
    # Its own code object: PyTorch keeps what it traced by code object, and another run has other constants.
    own = FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
    try:
        torch.compile(own, backend=backend, fullgraph=True, dynamic=False)(subjects[0])
    except BackendCompilerFailed as error:
        raise CannotCompile(str(error).strip().splitlines()[0]) from error
    call, tensors = found
    names = {id(tensor): name for name, tensor in agents.tensors(subjects[0]).items()}
    wanted = [names[id(tensor)] for tensor in tensors]

    def tied(subject: Any) -> Callable[[], None]:
        mine = agents.tensors(subject)
        inputs = [mine[name] for name in wanted]

        def run() -> None:
            call(*inputs)

        return run

    return [tied(subject) for subject in subjects]


def _keep_translations() -> None:
    """In the user's own cache, where they outlive a restart and nobody else can write them."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "t3d" / "compiled"
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError:
            return
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
