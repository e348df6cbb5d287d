"""Private parts of PyTorch are used in one file, and a run goes on without them."""

import ast
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from killed import SMALL, end_of

import t3d
from t3d.torch_private import (
    CannotCompile,
    as_cannot_compile,
    compile_function,
    has_avx512_bf16,
    import_compiler,
    load_cpp,
)

PACKAGE = Path(t3d.__file__).parent
IN_TEXT = re.compile(r"\btorch(\.\w+)*\._\w|\bfrom torch(\.\w+)* import _\w")
ENDS = rf"; PyTorch is {re.escape(torch.__version__)}, and 2\.11 to 2\.13 are tested"


def private(name):
    return name.startswith("_") and not name.endswith("__")


def private_uses(source):
    """The lines that import or read a private part of PyTorch, or name one in a string."""
    tree, lines = ast.parse(source), set()
    nodes = list(ast.walk(tree))
    roots = set()  # the names that parts of PyTorch have in this file
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in (alias for alias in node.names if alias.name.split(".")[0] == "torch"):
                roots.add((alias.asname or alias.name).split(".")[0])
                if any(map(private, alias.name.split("."))):
                    lines.add(node.lineno)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            roots |= {alias.asname or alias.name for alias in node.names}
            if any(map(private, [*node.module.split("."), *(alias.name for alias in node.names)])):
                lines.add(node.lineno)
    for node in nodes:
        if isinstance(node, ast.Attribute) and private(node.attr) and root(node) in roots:
            lines.add(node.lineno)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and IN_TEXT.search(node.value):
            lines.add(node.lineno)
        if isinstance(node, ast.Call) and root(node.func) in ("getattr", "setattr", "hasattr") and len(node.args) > 1:
            name = node.args[1]
            if root(node.args[0]) in roots and isinstance(name, ast.Constant) and private(str(name.value)):
                lines.add(node.lineno)
    return sorted(lines)


def root(node):
    """The name that a chain of attributes begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def test_no_other_file_reaches_into_pytorch():
    found = {str(path.relative_to(PACKAGE)): private_uses(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert len(found) > 50 and len(found.pop("torch_private.py")) > 5
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.cpu._is_avx512_bf16_supported()", "import torch._dynamo", "from torch import _dynamo",
        "from torch._inductor import config", "import torch.nn as nn\nnn._reduction",
        "from torch import cuda\ncuda._lazy",
        "import torch\ngetattr(torch.cpu, '_is_supported')", "import torch as t\nt._C", "x = 'import torch._dynamo'",
        "SCRIPT = 'from torch import _dynamo; go()'",
    ],
)  # fmt: skip
def test_such_a_use_is_found(source):
    assert private_uses(source) == [source.count("\n") + 1]


def test_other_uses_are_not_private():
    source = "import torch\nfrom torch.nn.functional import relu\nself._torch = torch.__version__\nx._y\n'torch.nn'"
    assert private_uses(source) == []


# ------------------------------------------------------------------------------------------ what is broken


def compiler_changed(monkeypatch):
    def compile_fx(*args, **options):
        raise AttributeError("module 'torch._inductor' has no attribute 'graph'\nand more lines")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)


def tracing_gone(monkeypatch):
    monkeypatch.delattr("torch.fx.experimental.proxy_tensor.make_fx")


def fake_tensors_changed(monkeypatch):
    monkeypatch.setattr("torch._subclasses.FakeTensorMode.from_tensor", lambda self, tensor: tensor)


def compiler_gone(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._inductor", None)


BROKEN = {
    compiler_changed: r"AttributeError: module 'torch\._inductor' has no attribute 'graph'",
    tracing_gone: r"ImportError: cannot import name 'make_fx' from 'torch\.fx\.experimental\.proxy_tensor' \(.*\)",
    fake_tensors_changed: r"TypeError: .*unexpected keyword argument 'static_shapes'",
    compiler_gone: r"ModuleNotFoundError: import of torch\._inductor halted; None in sys\.modules",
}
ALL = pytest.mark.parametrize(("breaks", "reason"), BROKEN.items(), ids=[breaks.__name__ for breaks in BROKEN])


@ALL
def test_what_is_missing_is_one_line_of_reason(breaks, reason, monkeypatch):
    def increase(x):
        x.add_(1)

    breaks(monkeypatch)
    x = torch.zeros(3)
    with pytest.raises(CannotCompile, match=f"^{reason}{ENDS}$"):
        compile_function(increase, [[x]], {}, "")
    assert x.tolist() == [0, 0, 0]


def test_the_loader_of_c_plus_plus_missing(monkeypatch):
    monkeypatch.delattr("torch._inductor.codecache.CppCodeCache.load")
    with pytest.raises(CannotCompile, match=f"^AttributeError: .*has no attribute 'load'{ENDS}$"):
        load_cpp("int nothing;")


def test_whatever_fails_is_a_reason():
    for error, reason in (
        (ValueError("one\ntwo"), "ValueError: one"),
        (RuntimeError(), "RuntimeError: no reason given"),
        (CannotCompile("as it is"), "as it is"),
    ):
        with pytest.raises(CannotCompile) as raised, as_cannot_compile():
            raise error
        assert str(raised.value) == reason
    with pytest.raises(KeyboardInterrupt), as_cannot_compile():
        raise KeyboardInterrupt


def test_the_other_private_parts_may_be_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    import_compiler()
    monkeypatch.delattr("torch.cpu._is_avx512_bf16_supported")
    assert has_avx512_bf16() is False


# ------------------------------------------------------------------------------------------ the run goes on

SETTINGS = {**SMALL, "progress": True, "eval_episodes": 2}


def said(capsys):
    """What was printed, in one line."""
    return " ".join(capsys.readouterr().out.split())


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    return t3d.train("Pendulum-v1", 240, 2, tmp_path_factory.mktemp("runs") / "eager", **SETTINGS)


@pytest.mark.parametrize("breaks", [compiler_changed, tracing_gone])
def test_a_run_that_cannot_be_compiled_is_the_uncompiled_run(breaks, eager, tmp_path, monkeypatch, capsys):
    breaks(monkeypatch)
    run = t3d.train("Pendulum-v1", 240, 2, tmp_path / "run", **{**SETTINGS, "accelerate": "compile"})
    text = said(capsys)
    assert text.count("cannot be compiled") == 1
    sentence = rf"The update cannot be compiled here \({BROKEN[breaks]}{ENDS}\)\. It runs uncompiled, which is slower\."
    assert re.search(sentence, text), text
    assert "not bit for bit" not in text
    assert run.config["accelerate"] == "eager"
    assert end_of(run.path)[0] == 240 and end_of(run.path)[:4] == end_of(eager.path)[:4]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    settings = {**SETTINGS, "accelerate": "compile"}
    run = t3d.train("Pendulum-v1", 240, 2, tmp_path_factory.mktemp("runs") / "compiled", **settings)
    if run.config["accelerate"] != "compile":
        pytest.skip("there is no compiler")
    return run.path


@pytest.mark.parametrize("breaks", [compiler_changed, tracing_gone])
def test_a_compiled_run_is_resumed_uncompiled(breaks, compiled, tmp_path, monkeypatch, capsys):
    for name in ("run", "uncompiled"):
        shutil.copytree(compiled, tmp_path / name)
    with monkeypatch.context() as patch:  # the same checkpoint, resumed as a run that was never compiled
        changed = t3d.api.changed_config
        patch.setattr("t3d.api.changed_config", lambda *given: replace(changed(*given), accelerate="eager"))
        t3d.resume(tmp_path / "uncompiled", 400)
    assert "Compiling" not in (text := said(capsys)) and "bit for bit" not in text
    breaks(monkeypatch)
    run = t3d.resume(tmp_path / "run", 400)
    text = said(capsys)
    assert text.count("cannot be compiled") == 1
    sentences = (
        rf"The update cannot be compiled here \({BROKEN[breaks]}{ENDS}\)\. It runs uncompiled, which is slower\."
        r" The run was compiled until here: from here on it is not bit for bit the same\."
    )
    assert re.search(sentences, text), text
    assert run.config["accelerate"] == "compile"  # with a compiler, a later resume compiles again
    end = end_of(run.path)
    assert end[0] == 400 and end[:4] == end_of(tmp_path / "uncompiled")[:4]


def test_a_finished_run_is_not_compiled(compiled, tmp_path, monkeypatch, capsys):
    shutil.copytree(compiled, tmp_path / "run")
    monkeypatch.setattr("t3d.learners.compiled.compile_function", None)
    t3d.resume(tmp_path / "run")
    text = said(capsys)
    assert "is finished: all 240 steps are done" in text and "Compiling" not in text
