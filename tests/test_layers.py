"""The shape of the package: what may import what, where files are read and written, what the docs quote."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "t3d"

# In reading order: each may import those above it. docs/architecture.md has the same list.
ORDER = [
    "errors", "files", "limits", "layout", "state_dict", "rng", "networks", "custom_network", "optim", "normalizer",
    "replay", "pixels", "nstep", "episode_log", "steps", "agent", "algorithm", "documents", "torch_private", "options",
    "config", "learners", "envs", "hindsight", "collector", "policy", "evaluate", "runs", "run_state", "display",
    "recorder", "trainer", "api", "bench", "__init__", "cli", "__main__",
]  # fmt: skip

# What a file imports for its annotations alone, from below it: only under `if TYPE_CHECKING`.
FOR_TYPES = {("replay", "pixels")}


def room(path):
    """envs/gym.py is in the room `envs`."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def only_for_types(tree):
    """The nodes under `if TYPE_CHECKING`, which are not run."""
    guards = (node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return {inner for guard in guards for part in guard.body for inner in ast.walk(part)}


def imported(path):
    """The rooms of t3d that a file imports, and whether only for its annotations."""
    tree = ast.parse(path.read_text())
    not_run = only_for_types(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "t3d"]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "t3d":
            inside = node.module.split(".")[1:]
            names = [node.module] if inside else [f"t3d.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name.split(".")[1] if "." in name else "__init__", node in not_run


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_each_file_imports_only_what_stands_above_it(path):
    assert room(path) in ORDER, f"{room(path)} has no place in the order"
    for name, for_types in imported(path):
        if not (for_types and (room(path), name) in FOR_TYPES):
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


def test_all_fifteen_steps_stand_in_order_in_update_and_learn():
    source = (PACKAGE / "steps.py").read_text()
    first_two = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)][:2]
    assert [function.name for function in first_two] == ["update", "learn"]
    code = "\n".join(ast.get_source_segment(source, function) for function in first_two)
    numbers = re.findall(r"\[step (\d+)\]", code)
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
