"""The same functions translated by PyTorch's compiler, between tensors that stay where they are."""

import hashlib
import inspect
import os
import platform
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from t3d import agent as agents
from t3d import networks
from t3d.config import Config
from t3d.learners import cpu_mlp
from t3d.learners.eager import CannotCompile, Floats, LearnerState, add_up, products
from t3d.replay import Batch, Replay
from t3d.steps import Agent, learn


class CompiledLearner:
    """The same functions between tensors that stay where they are, so that a call has nothing to pass or to check."""

    def __init__(self, whole: LearnerState, learners: list[LearnerState], config: Config) -> None:
        set_compile_cache()
        self.store = whole.memory.add_rows
        device, dim = whole.agent.seeds.device, whole.memory.action_dim
        shape = (len(whole.agent.seeds), config.num_envs)
        self._play = ActBuffers(
            whole.agent,
            whole.memory,
            obs=torch.zeros(*shape, whole.memory.input_dim, device=device),
            step=torch.zeros((), dtype=torch.int64, device=device),
            action=torch.zeros(*shape, dim, device=device),
        )
        # On a CPU they are NumPy's too, which does small things in less time than PyTorch.
        names = ("obs", "step", "action") if device.type == "cpu" else ()
        self._here: dict[str, NDArray[Any]] = {name: getattr(self._play, name).numpy() for name in names}
        students = [StagedBatch.of(learner, config.batch_size) for learner in learners]

        # Random numbers and the batch are compiled apart from the rest, which would compute them again wherever they
        # are used. Without vector instructions the compiler is done with them in a tenth of the time.
        def fetch(to: StagedBatch) -> None:
            bits, noise = agents.draw(to.learner.agent, config.batch_size, dim)
            batch = to.learner.memory.sample(bits, config.gamma)
            for name, tensor in agents.tensors(to.batch).items():
                tensor.copy_(getattr(batch, name))
            to.noise.copy_(noise)

        def rest(to: StagedBatch, policy_step: bool) -> None:
            with products(config, device):
                add_up(to.learner.sums, learn(to.batch, to.learner.agent, to.noise, to.noise, config, policy_step))

        def translate(mlp: Callable[[str], Mlp]) -> tuple[list[Callable[[], None]], ...]:
            with with_mlp(mlp(acting_precision(config))):
                play = compiled(lambda to: to.play(config.exploration_noise), [self._play], {})
            with with_mlp(mlp(config.precision)):
                critics = compiled(lambda to: rest(to, policy_step=False), students, {})
                return play, critics, compiled(lambda to: rest(to, policy_step=True), students, {})

        self._fetch = compiled(fetch, students, {"cpp.simdlen": 1})
        (self._explore,), self._critics, self._everything = first_working(translate, mlps(config))

    def explore(self, obs: Floats, step: int) -> Callable[[], Floats]:
        if not self._here:
            self._play.obs.copy_(torch.from_numpy(obs))
            self._play.step.fill_(step)
            self._explore()
            return lambda: np.asarray(self._play.action.cpu().numpy())
        self._here["obs"][:], self._here["step"][...] = obs, step
        self._explore()
        return self._here["action"].copy

    def update(self, k: int, policy_step: bool) -> None:
        self._fetch[k]()
        (self._everything if policy_step else self._critics)[k]()

    def flush(self) -> None:
        pass


@dataclass(frozen=True)
class ActBuffers:
    """Every tensor that acting reads and writes."""

    agent: Agent
    memory: Replay
    obs: Tensor
    step: Tensor
    action: Tensor

    def play(self, noise: float) -> None:
        self.action.copy_(agents.explore(self.agent, self.obs, self.step, noise, self.memory.normalizer()))


@dataclass(frozen=True)
class StagedBatch:
    """A learner, and a batch and noise to hand on."""

    learner: LearnerState
    batch: Batch
    noise: Tensor

    @staticmethod
    def of(learner: LearnerState, size: int) -> "StagedBatch":
        memory = learner.memory
        rows = memory.rows.new_zeros(len(memory.rows), size, 1)

        def wide(width: int) -> Tensor:
            return rows.repeat(1, 1, width)

        reward, terminated, discount = (rows[..., 0].clone() for _ in range(3))
        dims = memory.input_dim, memory.action_dim
        batch = Batch(wide(dims[0]), wide(dims[1]), reward, wide(dims[0]), terminated, discount)
        return StagedBatch(learner, batch, wide(memory.action_dim))


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
    # Some are newer than the oldest PyTorch that will do.
    options = {"size_asserts": False, **options}  # they are always the same tensors
    known = {name: value for name, value in options.items() if hasattr(config, name.split(".")[0])}
    if inputs[0][0].device.type == "cpu":
        known["cpp_wrapper"] = True
    try:
        # With shapes, even though they are fixed: without, the compiler keeps nothing in its cache.
        shapes = FakeTensorMode(shape_env=ShapeEnv())
        empty = [shapes.from_tensor(tensor, static_shapes=True) for tensor in inputs[0]]
        with shapes:
            graph = make_fx(flat)(*empty)
        used = used_inputs(graph)
        inputs, empty = [[tensors[i] for i in used] for tensors in inputs], [empty[i] for i in used]
        # What was compiled for other kernels must not be found in the cache.
        source = inspect.getsource(sys.modules[networks.current().apply.__module__])
        tag = hashlib.sha256(source.encode()).hexdigest()
        with torch.compiler.config.patch(cache_key_tag=tag), warnings.catch_warnings():  # type: ignore[attr-defined]
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # who asks for fp32 wants it
            call: Any = compile_fx(graph, empty, config_patches=known)
    except (RuntimeError, ImportError) as error:
        raise CannotCompile(str(error).strip().splitlines()[0]) from error

    def tied(tensors: list[Tensor]) -> Callable[[], None]:
        def run() -> None:
            call(*tensors)

        return run

    return [tied(tensors) for tensors in inputs]


def used_inputs(graph: Any) -> list[int]:
    """Which of its inputs a traced function uses; the others are taken away: each would cost time at every call."""
    inputs = graph.graph.find_nodes(op="placeholder")
    used = [i for i, node in enumerate(inputs) if node.users]
    for node in inputs:
        if not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    return used


Mlp = Callable[[networks.Parameters, Tensor], Tensor]


def mlps(config: Config) -> dict[str, Callable[[str], Mlp]]:
    """How to compute the networks in a precision, best first: in C++ where that is for such networks and machines."""

    fit = config.device == "cpu" and cpu_mlp.fits(config.hidden)
    return best_first({"layers in C++": cpu_mlp.mlp} if fit else {})


def best_first(by_hand: dict[str, Callable[[str], Mlp]]) -> dict[str, Callable[[str], Mlp]]:
    """What is written by hand for mlps, if these are mlps; then the networks as they stand."""
    own = networks.current()
    return {**(by_hand if own is networks.MLP else {}), "plain layers": lambda _: own.apply}


def first_working(translate: Callable[[Any], Any], ways: dict[str, Any]) -> Any:
    """Machines and what comes with them are many: where the best way fails, the next one is tried, and that is said."""
    failed: list[str] = []
    for name, way in ways.items():
        try:
            found = translate(way)
        except Exception as error:  # Triton's errors have no common kind
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            failed.append(f"{name} do not work on this machine ({reason}).")
            continue
        for sentence in failed:
            warnings.warn(sentence, stacklevel=2)
        return found
    raise CannotCompile(reason)


def with_mlp(mlp: Mlp) -> AbstractContextManager[None]:
    """The networks in use, computed in another way of the same meaning."""
    return networks.using(networks.Pair(networks.current().init, mlp))


def acting_precision(config: Config) -> str:
    """Never less than is needed to learn from what is done."""
    return "fp32" if config.precision == "bf16" else config.precision


def cpu_fingerprint() -> str:
    """A name for what this machine's processor can do."""
    able = platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        able += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(able.encode()).hexdigest()[:8]


def set_compile_cache() -> None:
    """In the user's own cache, where they outlive a restart and nobody else can write them; a folder for each kind of
    processor, because what is compiled for one may be too much for another that shares the user's home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "t3d" / "compiled" / cpu_fingerprint()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ.setdefault(variable, str(cache))
