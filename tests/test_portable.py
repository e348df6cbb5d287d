"""`import t3d` and training on a system without the modules that only Unix has, as on Windows."""

import subprocess
import sys
from pathlib import Path

HIDDEN = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty")

SCRIPT = f"""
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name in {HIDDEN!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

for name in {HIDDEN!r}:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Hide())

import t3d

run = t3d.train(
    "Pendulum-v1", out=sys.argv[1], steps=60, random_steps=20, hidden=(8, 8), batch_size=8, eval_every=60,
    eval_episodes=1, accelerate="eager", threads=1,
)
assert [row["step"] for row in run.evaluations] == [0, 60]
assert not set({HIDDEN!r}) & set(sys.modules), sorted(sys.modules)
"""


def test_training_without_the_modules_of_unix(tmp_path):
    """`fcntl` locks the run folder and `resource` measures memory; without them only the lock is missing."""
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run")], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "This system has no flock: run folders are not locked." in done.stdout
    assert "cannot open files relative to a folder" not in done.stdout  # this system can
