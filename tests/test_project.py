"""The files around the package agree with each other."""

import ast
import re
import tomllib
from pathlib import Path

import t3d

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BUILT_IN_MARKERS = {"parametrize", "skipif", "skip", "xfail", "usefixtures", "filterwarnings", "xdist_group"}


def found(pattern, name):
    """What the one match of a pattern in a file holds."""
    (match,) = re.findall(pattern, (ROOT / name).read_text(), re.MULTILINE)
    return match


def test_the_version_is_the_same_everywhere():
    assert "version" in PROJECT["project"]["dynamic"] and "version" not in PROJECT["project"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "t3d/__init__.py"
    assert found(r"^version: (.*)", "CITATION.cff") == t3d.__version__
    newest = re.search(r"^## \[?([0-9.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest.group(1) == t3d.__version__


def test_the_workflow_runs_every_python_that_is_declared():
    classifiers = PROJECT["project"]["classifiers"]
    declared = re.findall(r"Python :: (3\.\d+)$", "\n".join(classifiers), re.MULTILINE)
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    run = re.findall(r'^ +- python: "(.*?)"', workflow, re.MULTILINE)
    assert len(run) > 1 and run == declared
    assert PROJECT["project"]["requires-python"] == f">={declared[0]}"


def test_the_workflow_installs_extras_that_exist():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    asked = [*re.findall(r"extras: (\S+)", workflow), found(r"^EXTRAS \?= (.*)", "Makefile")]
    assert len(asked) > 1
    for extras in asked:
        assert set(extras.split(",")) <= PROJECT["project"]["optional-dependencies"].keys()


def test_every_marker_is_declared():
    used = {
        marker
        for path in TESTS.glob("*.py")
        for marker in re.findall(r"pytest\.mark\.(\w+)", path.read_text())
    }  # fmt: skip
    declared = {line.split(":")[0] for line in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    assert declared and {"parametrize", *declared} <= used <= BUILT_IN_MARKERS | declared


def test_every_slow_test_exists():
    listed = (TESTS / "slow.txt").read_text().splitlines()
    assert listed == sorted(set(listed))
    for name in listed:
        file, _, test = name.partition("::")
        tests = {node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)}
        assert not test or test.split("[")[0] in tests, f"tests/slow.txt: there is no {name}"
        assert not test or file not in listed, f"tests/slow.txt lists all of {file}"
    assert listed


def test_every_requirement_for_the_tests_is_pinned():
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text().lower(), re.MULTILINE))
    extras = PROJECT["project"]["optional-dependencies"]
    needed = [
        *PROJECT["project"]["dependencies"],
        *(line for name in ("mujoco", "pixels", "dev") for line in extras[name]),
    ]
    assert {re.match(r"[\w.-]+", line).group().lower() for line in needed} <= pinned


def test_the_pre_commit_hooks_are_the_tools_of_make_lint():
    hooks = re.findall(r"^ +entry: \.venv/bin/(.*)", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    rules = re.search(r"^lint: setup\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1)
    assert [rule.removesuffix(" .") for rule in re.findall(r"\$\(BIN\)/(.*)", rules)] == hooks
