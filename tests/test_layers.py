"""The shape of the package: what may import what, where files are read and written, what the docs quote."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "t3d"

# In reading order: each may import those above it. docs/architecture.md has the same list.
ORDER = [
    "errors", "files", "limits", "layout", "rng", "networks", "custom_network", "optim", "replay", "pixels", "nstep",
    "episode_log", "steps", "agent", "documents", "options", "config", "learners", "envs", "hindsight", "policy",
    "evaluate", "runs", "display", "run_state", "trainer", "api", "bench", "__init__", "cli", "__main__",
]  # fmt: skip


def room(path):
    """envs/gym.py is in the room `envs`."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported(path):
    """The rooms of t3d that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "t3d"]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "t3d":
            inside = node.module.split(".")[1:]
            names = [node.module] if inside else [f"t3d.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name.split(".")[1] if "." in name else "__init__"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_each_file_imports_only_what_stands_above_it(path):
    assert room(path) in ORDER, f"{room(path)} has no place in the order"
    for name in imported(path):
        assert name == room(path) or ORDER.index(name) < ORDER.index(room(path)), f"{path.name} imports {name}"


def test_architecture_lists_the_same_order():
    text = (ROOT / "docs" / "architecture.md").read_text()
    listed = re.findall(r"^\| `(?:t3d/)?(\w+)(?:\.py|/)`", text, re.MULTILINE)
    assert listed == ORDER


def test_nothing_that_is_loaded_can_run_code():
    words = re.compile(r"\b(pickle|(?<!safetensors\.)torch\.load|eval\(|exec\(|marshal|shelve|joblib|yaml)")
    for path in PACKAGE.rglob("*.py"):
        assert not words.search(path.read_text()), path


def test_the_algorithm_knows_nothing_of_what_makes_it_fast():
    text = (PACKAGE / "steps.py").read_text().lower()
    assert not re.search(r"\b(compile|graph|device|stream|cuda|jit)", text)


def test_all_fifteen_steps_stand_in_order_in_one_function():
    source = (PACKAGE / "steps.py").read_text()
    function = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef))
    assert function.name == "learn"
    numbers = re.findall(r"\[step (\d+)\]", ast.get_source_segment(source, function))
    assert [int(number) for number in numbers] == list(range(1, 16))


def test_the_docs_quote_the_code_as_it_is():
    """Every line of Python in docs/fifteen-steps.md stands in the package."""
    code = {" ".join(line.split()) for path in PACKAGE.rglob("*.py") for line in path.read_text().splitlines()}
    text = (ROOT / "docs" / "fifteen-steps.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 15
    for block in blocks:
        for line in block.splitlines():
            assert not line.strip() or " ".join(line.split()) in code, f"not in the code: {line}"
    assert [int(n) for n in re.findall(r"^## Step (\d+)", text, re.MULTILINE)] == list(range(1, 16))


def test_the_docs_links_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
