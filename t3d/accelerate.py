"""How the same text is run: as it stands, compiled, or recorded. The only file that knows these words.

`accelerate` gives the verbs that a loop spends its time in, tied to the tensors of one run. `eager` calls the functions
of `agent.py` as they are. `compile` has PyTorch translate them into a few fused loops around the matrix products: the
first time takes a minute, after that the translation is found in a cache on the disk. `graph` does so on a GPU, with
`kernels.py` for the networks, and has the GPU record what it is told once, to repeat it at a single word.

Shapes: S seeds, N environments a seed, B batch, O observation, A action.
"""

import hashlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from t3d import agent as agents
from t3d import networks
from t3d.config import Config
from t3d.replay import Batch, Replay, Rows
from t3d.steps import Agent, Metrics, learn

Floats = NDArray[np.float32]
Sums = dict[str, Tensor]  # (S,) metrics added up since they were last read
Perceptron = Callable[[networks.Parameters, Tensor], Tensor]


class Verbs(Protocol):
    """What the loop does at every step. On a GPU all of them are asked for and done later, in order."""

    def explore(self, obs: Floats, step: int) -> Callable[[], Floats]:
        """(S, N, O) observations and the step they were made in -> (S, N, A) actions with noise, when called for."""
        ...

    def store(self, rows: Rows) -> None:
        """[step 1] Transitions into the memory."""
        ...

    def update(self, k: int, delayed: bool) -> None:
        """Steps 4 to 15, for the k-th of the agents that learn by themselves; `delayed` where the actor moves too."""
        ...

    def flush(self) -> None:
        """Ask for what is still to be asked for, before somebody else reads the tensors."""
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
    modes: dict[str, Callable[[Learner, list[Learner], Config], Verbs]]
    modes = {"eager": Eager, "compile": Compiled, "graph": Recorded}
    return modes[config.accelerate](Learner(agent, memory, sums), learners, config)


class Eager:
    """The functions as they are."""

    def __init__(self, whole: Learner, learners: list[Learner], config: Config) -> None:
        self.whole, self.learners, self.config = whole, learners, config
        self.store = whole.memory.add_rows

    def explore(self, obs: Floats, step: int) -> Callable[[], Floats]:
        agent = self.whole.agent
        here = torch.from_numpy(obs).to(agent.seeds.device)
        action = agents.explore(agent, here, step, self.config.exploration_noise)
        return lambda: np.asarray(action.cpu().numpy())

    def update(self, k: int, delayed: bool) -> None:
        update(self.learners[k], self.config, delayed)

    def flush(self) -> None:
        pass


def update(to: Learner, config: Config, delayed: bool) -> None:
    """Steps 4 to 15 once."""
    with products(config, to.agent.seeds.device):
        add_up(to.sums, agents.update(to.agent, to.memory, config.batch_size, config, delayed))


class Compiled:
    """The same functions between tensors that stay where they are, so that a call has nothing to pass or to check."""

    def __init__(self, whole: Learner, learners: list[Learner], config: Config) -> None:
        _keep_translations()
        self.store = whole.memory.add_rows
        device, dim = whole.agent.seeds.device, whole.memory.action_dim
        shape = (len(whole.agent.seeds), config.num_envs)
        self._play = Player(
            whole.agent,
            obs=torch.zeros(*shape, whole.memory.obs_dim, device=device),
            step=torch.zeros((), dtype=torch.int64, device=device),
            action=torch.zeros(*shape, dim, device=device),
        )
        students = [Student.of(learner, config.batch_size) for learner in learners]

        # Random numbers and the batch are compiled apart from the rest, which would compute them again wherever they
        # are used. Without vector instructions the compiler is done with them in a tenth of the time.
        def fetch(to: Student) -> None:
            bits, noise = agents.draw(to.learner.agent, config.batch_size, dim)
            batch = to.learner.memory.sample(bits, config.gamma)
            for name, tensor in agents.tensors(to.batch).items():
                tensor.copy_(getattr(batch, name))
            to.noise.copy_(noise)

        def rest(to: Student, delayed: bool) -> None:
            with products(config, device):
                add_up(to.learner.sums, learn(to.batch, to.learner.agent, to.noise, to.noise, config, delayed))

        (self._explore,) = compiled(lambda to: to.play(config.exploration_noise), [self._play], {})
        self._fetch = compiled(fetch, students, {"cpp.simdlen": 1})
        self._critics = compiled(lambda to: rest(to, delayed=False), students, {})
        self._everything = compiled(lambda to: rest(to, delayed=True), students, {})

    def explore(self, obs: Floats, step: int) -> Callable[[], Floats]:
        self._play.obs.copy_(torch.from_numpy(obs))
        self._play.step.fill_(step)
        self._explore()
        return lambda: np.array(self._play.action.cpu().numpy())

    def update(self, k: int, delayed: bool) -> None:
        self._fetch[k]()
        (self._everything if delayed else self._critics)[k]()

    def flush(self) -> None:
        pass


class Recorded:
    """The same functions, compiled, and recorded by the GPU: a call is one word, and the GPU does the rest by itself.

    What goes to the GPU at a step, observations and new transitions, goes in one copy, and is taken from memory that
    the GPU can reach by itself; transitions wait for the next observations. The host waits for nothing but the actions,
    so environments move while the GPU learns.
    """

    def __init__(self, whole: Learner, learners: list[Learner], config: Config) -> None:
        _keep_translations()
        self._memory, agent, device = whole.memory, whole.agent, whole.agent.seeds.device
        shape = (len(agent.seeds), config.num_envs)
        rows = (shape[0], config.num_envs * config.n_step)
        self._in = Transfer(
            device,
            step=((), torch.int64),
            length=(shape[:1], torch.int64),
            where=(rows, torch.int64),
            obs=((*shape, self._memory.obs_dim), torch.float32),
            rows=((*rows, self._memory.rows.shape[-1]), torch.float32),
        )
        self._out = Transfer(device, action=((*shape, self._memory.action_dim), torch.float32))
        self._in.here["where"][:] = self._memory.first + self._memory.capacity  # the row that is never read
        there = self._in.there
        player = Player(agent, there["obs"], there["step"], self._out.there["action"])

        def translate(perceptron: Callable[[str], Perceptron]) -> tuple[list[Callable[[], None]], ...]:
            with _networks_of(perceptron("fp32" if config.precision == "bf16" else config.precision)):
                play = compiled(lambda to: to.play(config.exploration_noise), [player], ON_GPU)
            with _networks_of(perceptron(config.precision)):
                critics = compiled(lambda to: update(to, config, delayed=False), learners, ON_GPU)
                everything = compiled(lambda to: update(to, config, delayed=True), learners, ON_GPU)
            with _undone(whole):  # once for real: the first time is done in another way than ever after
                for work in (*play, *critics, *everything):
                    work()
            return play, critics, everything

        (play,), critics, everything = first_that_works(translate, perceptrons(whole.memory, config))

        def store() -> None:
            self._in.to_device()
            self._memory.write(there["rows"], there["where"])
            self._memory.length.copy_(there["length"])

        def explore() -> None:
            store()
            play()
            self._out.to_host()

        with _undone(whole):
            explore()
        np.minimum(self._memory.stored, self._memory.capacity, out=self._in.here["length"])
        self._explore, self._store = recorded(explore), recorded(store)
        self._critics, self._everything = [recorded(one) for one in critics], [recorded(one) for one in everything]
        self._mark = Mark()  # behind the last thing that reads `_in` or writes `_out`
        self._pending = False  # whether there are transitions in `_in` that were not asked to be stored

    def explore(self, obs: Floats, step: int) -> Callable[[], Floats]:
        self._mark.wait()
        self._in.here["obs"][:] = obs
        self._in.here["step"][...] = step
        self._explore.replay()
        self._mark.set()
        self._pending = False
        return self._explored

    def _explored(self) -> Floats:
        self._mark.wait()
        return self._out.here["action"].copy()

    def store(self, rows: Rows) -> None:
        self.flush()
        self._mark.wait()
        self._in.here["where"][:] = self._memory.lay_out(self._in.here["rows"], *rows)
        np.minimum(self._memory.stored, self._memory.capacity, out=self._in.here["length"])
        self._pending = True

    def update(self, k: int, delayed: bool) -> None:
        self.flush()
        (self._everything if delayed else self._critics)[k].replay()

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


ON_GPU = {"combo_kernels": True, "deterministic": True}  # one kernel for many tensors; no choice that is left to timing


class Transfer:
    """Arrays on the host and tensors of the same names on the device, which move from here to there in one copy."""

    def __init__(self, device: torch.device, **parts: tuple[tuple[int, ...], torch.dtype]) -> None:
        sizes = {name: int(np.prod(shape)) * dtype.itemsize for name, (shape, dtype) in parts.items()}
        self._here = torch.zeros(sum(sizes.values()), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._there = torch.zeros_like(self._here, device=device)
        self.here, self.there = {}, {}
        end = 0
        for name, (shape, dtype) in parts.items():
            begin, end = end, end + sizes[name]
            self.here[name] = self._here[begin:end].view(dtype).view(shape).numpy()
            self.there[name] = self._there[begin:end].view(dtype).view(shape)

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
def _undone(to: Learner) -> Iterator[None]:
    """Whatever happens to an agent and its metrics inside is as it was afterwards."""
    tensors = agents.tensors({"agent": to.agent, "sums": to.sums, "length": to.memory.length})
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    try:
        yield
    finally:
        for name, tensor in tensors.items():
            tensor.copy_(before[name])


def perceptrons(memory: Replay, config: Config) -> dict[str, Callable[[str], Perceptron]]:
    """How to compute the networks in a precision, best first: as kernels where those are for such networks."""
    plain: dict[str, Callable[[str], Perceptron]] = {"plain layers": lambda _: networks.mlp}
    try:
        from t3d import kernels
    except ImportError:
        return plain
    if not kernels.fits(memory.obs_dim, memory.action_dim, config.hidden):
        return plain
    return {"hand-written kernels": kernels.mlp, **plain}


def first_that_works(translate: Callable[[Any], Any], ways: dict[str, Any]) -> Any:
    """GPUs and what comes with them are many: what the best way fails with is said, and the next one tried."""
    for name, way in ways.items():
        try:
            return translate(way)
        except Exception as error:  # Triton's errors have no common kind
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            warnings.warn(f"{name} do not work on this GPU ({reason}).", stacklevel=2)
    raise CannotCompile(reason)


@contextmanager
def _networks_of(perceptron: Perceptron) -> Iterator[None]:
    networks.perceptron, before = perceptron, networks.perceptron
    try:
        yield
    finally:
        networks.perceptron = before


@dataclass(frozen=True)
class Player:
    """Every tensor that acting reads and writes."""

    agent: Agent
    obs: Tensor
    step: Tensor
    action: Tensor

    def play(self, noise: float) -> None:
        self.action.copy_(agents.explore(self.agent, self.obs, self.step, noise))


@dataclass(frozen=True)
class Student:
    """A learner, and a batch and noise to hand on."""

    learner: Learner
    batch: Batch
    noise: Tensor

    @staticmethod
    def of(learner: Learner, size: int) -> "Student":
        memory = learner.memory
        rows = memory.rows.new_zeros(len(memory.rows), size, 1)

        def wide(width: int) -> Tensor:
            return rows.repeat(1, 1, width)

        reward, terminated, discount = (rows[..., 0].clone() for _ in range(3))
        batch = Batch(wide(memory.obs_dim), wide(memory.action_dim), reward, wide(memory.obs_dim), terminated, discount)
        return Student(learner, batch, wide(memory.action_dim))


def compiled(function: Callable[[Any], None], subjects: list[Any], options: dict[str, Any]) -> list[Callable[[], None]]:
    """`function(subject)` as a call without arguments, for each of several subjects of the same shapes.

    PyTorch traces the function without doing anything and compiles what it found. The compiled code is called by
    itself, with the subject's tensors, without the checks that would cost as much as a tenth of an update.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    own = [agents.tensors(subject) for subject in subjects]
    names = list(own[0])

    def flat(*tensors: Tensor) -> None:
        function(agents.with_tensors(subjects[0], dict(zip(names, tensors, strict=True))))

    inputs = [[tensors[name] for name in names] for tensors in own]
    known = {name: value for name, value in options.items() if hasattr(config, name.split(".")[0])}
    if inputs[0][0].device.type == "cpu":
        known["cpp_wrapper"] = True
    try:
        # With shapes, even though they are fixed: without, the compiler keeps nothing in its cache.
        shapes = FakeTensorMode(shape_env=ShapeEnv())
        empty = [shapes.from_tensor(tensor, static_shapes=True) for tensor in inputs[0]]
        with shapes:
            graph = make_fx(flat)(*empty)
        # What was compiled for other kernels must not be found in the cache.
        source = inspect.getsource(sys.modules[networks.perceptron.__module__])
        tag = hashlib.sha256(source.encode()).hexdigest()
        with torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
            call: Any = compile_fx(graph, empty, config_patches=known)
    except (RuntimeError, ImportError) as error:
        raise CannotCompile(str(error).strip().splitlines()[0]) from error

    def tied(tensors: list[Tensor]) -> Callable[[], None]:
        def run() -> None:
            call(*tensors)

        return run

    return [tied(tensors) for tensors in inputs]


def _keep_translations() -> None:
    """In the user's own cache, where they outlive a restart and nobody else can write them."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "t3d" / "compiled"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ.setdefault(variable, str(cache))
