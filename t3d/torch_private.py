"""The only file that uses private parts of PyTorch (`torch._…`): tracing, Inductor, and the C++ loader.

Tested with the versions in `TESTED`. Private parts may change with any release, so every failure here becomes
`CannotCompile` with one line of reason, and the run goes on uncompiled.
"""

import hashlib
import os
import platform
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TESTED = "2.11 to 2.13"


class CannotCompile(Exception):
    """There is no compiler on this machine, or it fails; the text is the reason, in one line."""


@contextmanager
def as_cannot_compile() -> Iterator[None]:
    """Raise whatever fails inside as `CannotCompile`."""
    try:
        yield
    except CannotCompile:
        raise
    except Exception as error:  # compilers' errors have no common class, and a private name may be gone
        lines = str(error).strip().splitlines() or ["no reason given"]
        hint = ""
        if isinstance(error, AttributeError | ImportError | TypeError):
            hint = f"; PyTorch is {torch.__version__}, and {TESTED} are tested"
        raise CannotCompile(f"{type(error).__name__}: {lines[0]}{hint}") from error


def compile_function(
    function: Callable[..., None], inputs: list[list[Tensor]], options: dict[str, Any], tag: str
) -> list[Callable[[], None]]:
    """Compile `function` once; return, for each list of tensors of the same shapes, a call without arguments.

    `make_fx` traces the function on fake tensors and Inductor compiles the graph. The compiled code is called directly:
    the guards of `torch.compile` would cost a tenth of an update. `tag` becomes part of the cache's key.
    """
    with as_cannot_compile():
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        # Not every option exists in every version.
        known = {name: value for name, value in options.items() if hasattr(config, name.split(".")[0])}
        if inputs[0][0].device.type == "cpu":
            known["cpp_wrapper"] = True
        # With a shape environment, though shapes are fixed: Inductor's cache needs one.
        fake = FakeTensorMode(shape_env=ShapeEnv())
        empty = [fake.from_tensor(tensor, static_shapes=True) for tensor in inputs[0]]
        with fake:
            graph = make_fx(function)(*empty)
        used = _used_inputs(graph)
        with torch.compiler.config.patch(cache_key_tag=tag), warnings.catch_warnings():  # type: ignore[attr-defined]
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # whoever asks for fp32 wants it
            call: Any = compile_fx(graph, [empty[i] for i in used], config_patches=known)
        return [_bound(call, [tensors[i] for i in used]) for tensors in inputs]


def _bound(call: Any, tensors: list[Tensor]) -> Callable[[], None]:
    def run() -> None:
        call(*tensors)

    return run


def _used_inputs(graph: Any) -> list[int]:
    """Remove the inputs that a traced function does not use, because each costs time at every call; keep the others."""
    inputs = graph.graph.find_nodes(op="placeholder")
    used = [i for i, node in enumerate(inputs) if node.users]
    for node in inputs:
        if not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    return used


def load_cpp(source: str) -> None:
    """Compile C++ that registers PyTorch operators, or load it from the cache."""
    with as_cannot_compile():
        from torch._inductor.codecache import CppCodeCache

        CppCodeCache.load(source)


def import_compiler() -> None:
    """Import PyTorch's compiler before Mesa. Each brings an LLVM, and the process dies if the compiler's is second."""
    with suppress(Exception):
        import torch._dynamo  # noqa: F401


def has_avx512_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 numbers."""
    try:
        return bool(torch.cpu._is_avx512_bf16_supported())
    except AttributeError:
        return False


def set_compile_cache() -> None:
    """Keep compiled code in the user's cache folder, where it survives a restart and nobody else can write.

    Each kind of CPU has a folder, because machines with different CPUs may share a home.
    """
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        cache = home / "t3d" / "compiled" / _cpu_fingerprint()
        cache.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home, or none that can be written
        return
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        os.environ.setdefault(variable, str(cache))


def _cpu_fingerprint() -> str:
    """A short hash of this CPU's features."""
    features = platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(features.encode()).hexdigest()[:8]
