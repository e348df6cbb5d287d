"""How the same text is run: as it stands, or compiled. The only file that knows these words.

`accelerate` gives the two verbs that a loop spends its time in, in one of two modes. `eager` calls the functions of
`agent.py` and `steps.py` as they are. `compile` has PyTorch translate them into a few fused loops around the matrix
products: the first time takes a minute, after that the translation is found in a cache on the disk.

Shapes: S seeds, N environments a seed, B batch, O observation, A action.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor

from t3d import agent as agents
from t3d.errors import T3DError
from t3d.replay import Batch, Replay
from t3d.steps import Agent, Knobs, Metrics, learn

Mode = Literal["eager", "compile"]
Precision = Literal["fp32", "tf32", "bf16"]
Sums = dict[str, Tensor]  # (S,) metrics added up since they were last read

# Below this many updates a run is over before a compiler has paid for itself.
UPDATES_WORTH_COMPILING = 50_000


@dataclass(frozen=True)
class Verbs:
    """What the loop does at every step."""

    explore: Callable[[Agent, Tensor, Tensor, float], Tensor]
    update: Callable[[Agent, Replay, Sums, bool], None]


class CannotCompile(Exception):
    """The compiler's reason, in a line: there is none on this machine, or it fails."""


@contextmanager
def compiling() -> Iterator[None]:
    """Around the first call of compiled verbs."""
    from torch._dynamo.exc import BackendCompilerFailed

    try:
        yield
    except BackendCompilerFailed as error:
        raise CannotCompile(str(error).strip().splitlines()[0]) from error


def choose(device: str, updates: float) -> Mode:
    """The mode of a run that names none: a function of the run alone, so that the same run is always the same."""
    return "compile" if device == "cpu" and updates >= UPDATES_WORTH_COMPILING else "eager"


def refuse_precision(precision: str, device: str) -> None:
    """Say so where the hardware has no such numbers: it would pretend to, slowly."""
    if precision == "tf32" and device != "cuda":
        raise T3DError("--precision tf32 is for NVIDIA GPUs; on a CPU use fp32, or bf16 where it has it.")
    has_bf16 = torch.cuda.is_bf16_supported() if device == "cuda" else torch.cpu._is_avx512_bf16_supported()
    if precision == "bf16" and not has_bf16:
        raise T3DError(f"--precision bf16: this {'GPU' if device == 'cuda' else 'processor'} cannot; use fp32.")


@contextmanager
def hardware(threads: int, precision: Precision) -> Iterator[None]:
    """Results depend on how products are split over threads and rounded, so a run sets both for itself."""
    before = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.backends.cuda.matmul.allow_tf32 = before[1]


def accelerate(mode: Mode, precision: Precision, batch_size: int, knobs: Knobs) -> Verbs:
    """The verbs in this mode."""

    def products(agent: Agent) -> AbstractContextManager[Any]:
        """Matrix products in bfloat16; weights, moments, targets and losses stay as they are."""
        return torch.autocast(agent.seeds.device.type, torch.bfloat16) if precision == "bf16" else nullcontext()

    def fetch(agent: Agent, memory: Replay) -> tuple[Batch, Tensor, Tensor]:
        bits, noise = agents.draw(agent, batch_size, memory.action_dim)
        return memory.sample(bits, knobs.gamma), bits, noise

    def critics(agent: Agent, batch: Batch, bits: Tensor, noise: Tensor, sums: Sums) -> None:
        with products(agent):
            add_up(sums, learn(batch, agent, bits, noise, knobs, delayed=False))

    def everything(agent: Agent, batch: Batch, bits: Tensor, noise: Tensor, sums: Sums) -> None:
        with products(agent):
            add_up(sums, learn(batch, agent, bits, noise, knobs, delayed=True))

    explore = agents.explore
    if mode == "compile":
        _keep_translations()
        # The random numbers are compiled apart: together with the rest they would be computed again wherever they are
        # used. They are few, and without vector instructions the compiler is done with them in a tenth of the time.
        fetch = compiled(fetch, {"cpp.simdlen": 1})
        explore = compiled(explore)
        critics, everything = compiled(critics), compiled(everything)

    def update(agent: Agent, memory: Replay, sums: Sums, delayed: bool) -> None:
        batch, bits, noise = fetch(agent, memory)
        (everything if delayed else critics)(agent, batch, bits, noise, sums)

    return Verbs(explore, update)


def add_up(sums: Sums, metrics: Metrics) -> None:
    for name, value in metrics.items():
        sums[name] += value


def compiled(function: Callable[..., Any], options: dict[str, Any] | None = None) -> Any:
    """One translation of one function, for good: it is always called with the same shapes and the same constants.

    PyTorch would check before each call whether that still holds, in a tenth of the time of an update. Without the
    check two runs may not share a translation, so each gets a copy of the function's code.
    """
    assert isinstance(function, FunctionType)
    code, name = function.__code__.replace(), function.__name__
    copy = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    always: dict[str, Any] = {"guard_filter_fn": lambda guards: [False] * len(guards), "cpp_wrapper": True}
    return torch.compile(copy, fullgraph=True, dynamic=False, options=always | (options or {}))


def _keep_translations() -> None:
    """In the user's own cache, where they outlive a restart and nobody else can write them."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "t3d" / "compiled"
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError:
            return
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
