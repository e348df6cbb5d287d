"""Twenty wrong TD3s, and which test catches each.

    python tests/wrong_td3s.py          prints the table; `make wrong` does the same

Each is the package with a line or two changed, as people have really got them wrong. The fast tests are run on
a changed copy, a process for each core; a wrong TD3 that no test notices would be a hole in the tests.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAST_TESTS = [f"tests/test_{name}.py" for name in ("steps", "networks", "optim", "replay", "oracle", "trainer")]

STEPS, NETWORKS, OPTIM = "steps.py", "networks.py", "optim.py"
DELAYED_TARGETS = """
        update_target_actor(agent, hp.tau)  # [step 14]
        update_target_critic(agent, hp.tau)  # [step 15]
"""
BEFORE_STEP_12 = "    critic_update = update_critic("
NO_SMOOTHING = (STEPS, "(scale * noise).clamp(-clip, clip)", "0 * noise")

WRONG: dict[str, list[tuple[str, str, str]]] = {
    "no minimum": [(STEPS, "q.amin(0)", "q[0]")],
    "mean instead of minimum": [(STEPS, "q.amin(0)", "q.mean(0)")],
    "maximum instead of minimum": [(STEPS, "q.amin(0)", "q.amax(0)")],
    "no delay": [(STEPS, "    if policy_step:", "    if True:")],
    "targets not delayed": [(STEPS, DELAYED_TARGETS, DELAYED_TARGETS.replace("        ", "    "))],
    "no smoothing": [NO_SMOOTHING],
    "unclipped noise": [(STEPS, ".clamp(-clip, clip)", "")],
    "unclamped action": [(STEPS, ".clamp(-limit, limit)", "")],
    "done ignored": [(STEPS, "discount * (1 - terminated) * target_q", "discount * target_q")],
    "truncation as done": [
        (
            "collector.py",
            "final_obs, terminated, self._span, valid)",
            "final_obs, terminated | truncated, self._span, valid)",
        )
    ],
    "target from the online critics": [
        (STEPS, "q_values(agent, agent.target_critic,", "q_values(agent, agent.critic,")
    ],
    "only one critic trained": [(STEPS, ".mean(-1).sum(0)", ".mean(-1)[0]")],
    "identical twins": [
        (
            NETWORKS,
            "        return parameters\n",
            "        return {n: t[:1].expand_as(t).clone() for n, t in parameters.items()}\n",
        )
    ],
    "actor down instead of up": [(STEPS, "return -agent.networks.critic(", "return agent.networks.critic(")],
    "actor on the second critic": [(NETWORKS, "tensor[0] for name", "tensor[1] for name")],
    "tau swapped with 1 - tau": [(OPTIM, "lerp_(online[name], tau)", "lerp_(online[name], 1 - tau)")],
    "targets moved before the step": [
        (STEPS, DELAYED_TARGETS, "\n"),
        (STEPS, BEFORE_STEP_12, "    if policy_step:" + DELAYED_TARGETS + BEFORE_STEP_12),
    ],
    "reward scaled": [(STEPS, "return reward + (", "return 0.1 * reward + (")],
    "discount squared": [(STEPS, "(discount * (1", "(discount**2 * (1")],
    "smoothing noise on the acting policy instead": [
        NO_SMOOTHING,
        ("agent.py", "(action + noise * epsilon)", "(action + (0.2 * epsilon).clamp(-0.5, 0.5))"),
    ],
}


def changed_copy(edits: list[tuple[str, str, str]], folder: Path) -> None:
    """The package and its tests, with the edits made; an edit that no longer fits is an error."""
    shutil.copytree(ROOT / "t3d", folder / "t3d", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name, old, new in edits:
        path = folder / "t3d" / name
        text = path.read_text()
        if text.count(old) != 1:
            raise SystemExit(f"{name} holds {old!r} {text.count(old)} times; change tests/wrong_td3s.py to fit")
        path.write_text(text.replace(old, new))


def caught_by(edits: list[tuple[str, str, str]]) -> str:
    """The first test that fails on the changed copy, or nothing."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        changed_copy(edits, folder)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *FAST_TESTS]
        # The copy before the installed package: the working folder comes first for `python -m`.
        environment = {**os.environ, "PYTHONPATH": name, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if result.returncode not in (0, 1):
            raise SystemExit(result.stdout + result.stderr)
        failed = re.search(r"^FAILED tests/(\S+)", result.stdout, re.MULTILINE)
        return failed.group(1) if failed else ""


def main() -> int:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        right, *tests = pool.map(caught_by, [[], *WRONG.values()])
    if right:
        raise SystemExit(f"the fast tests fail on the package as it is: put that right first ({right})")
    width = max(map(len, WRONG))
    print(f"{'wrong TD3':<{width}}  caught by")
    for name, test in zip(WRONG, tests, strict=True):
        print(f"{name:<{width}}  {test or 'NOTHING'}")
    print(f"{sum(map(bool, tests))} of {len(WRONG)} caught")
    return 0 if all(tests) else 1


if __name__ == "__main__":
    sys.exit(main())
