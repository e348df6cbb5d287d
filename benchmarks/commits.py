"""The processor time of a training step in two checkouts, beside each other: whether a change made it slower.

    python benchmarks/commits.py BASE [--rounds 20] [--seconds 2] [--only NAME ...]

BASE is a folder with another checkout, as of `git worktree add`; ours is the one of this file. Each runs its own
benchmarks/contenders/ours.py: environment steps with an update after each, batch 256, two hidden layers of 256, in a
process with one core, because threads that wait for each other would count. Both get ready first: set-up, compiling
and the first steps are not measured. Then they take the same steps in turns, and the order changes from round to round.
Every five rounds both are new processes, because where its memory lies makes one some per cent slower than the next.
A ratio is base/ours, the median of the rounds: above 1 ours is faster. The quartiles of the rounds are in brackets.
A package that only one of the checkouts imports can be added with PYTHONPATH.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

OURS = Path(__file__).resolve().parent.parent
ROUNDS_OF_A_PROCESS = 5
CORE = max(os.sched_getaffinity(0))
CASES = {
    f"{env} {mode}, {seeds} seed{'s' if seeds > 1 else ''}": [mode, "fp32", str(seeds), env]
    for env in ("HalfCheetah-v5", "Pendulum-v1")
    for mode in ("eager", "compile")
    for seeds in (1, 4)
}


class Checkout:
    """A process that trains in a checkout when it is told to."""

    def __init__(self, path, arguments):
        script = path / "benchmarks" / "contenders" / "ours.py"
        self.process = subprocess.Popen(
            [sys.executable, script, *arguments],
            env=environment(path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {CORE}),
        )
        self._clock = (~self.process.pid << 3) | 2  # Linux's number of the clock of a process's processor time
        self._answer()

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended early")
        return json.loads(line)

    def take(self, steps):
        """Processor seconds for so many steps."""
        before = time.clock_gettime(self._clock)
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        self._answer()
        return time.clock_gettime(self._clock) - before

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def environment(path):
    """Environment variables with which a checkout is imported from its own folder."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")]))}


def refuse_misplaced(path):
    """End here if the package would be imported from elsewhere, or not at all."""
    command = [sys.executable, "-c", "import t3d; print(t3d.__file__)"]
    found = subprocess.run(command, env=environment(path), cwd=path, stdout=subprocess.PIPE, text=True, check=True)
    if not Path(found.stdout.strip()).resolve().is_relative_to(path):
        sys.exit(f"{path}: t3d is imported from {found.stdout.strip()}")


def race(base, arguments, rounds, seconds):
    """Milliseconds of processor time a step in both checkouts, round by round, and how many steps a round has."""
    sides, steps, times = [], 0, [[], []]
    for number in range(rounds):
        if number % ROUNDS_OF_A_PROCESS == 0:
            for side in sides:
                side.close()
            sides = [Checkout(base, arguments), Checkout(OURS, arguments)]
            steps = steps or max(1, round(20 * seconds / max(side.take(20) for side in sides)))
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            times[side].append(sides[side].take(steps) / steps * 1e3)
    for side in sides:
        side.close()
    return *times, steps


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=2, help="processor time of a round, for each checkout")
    parser.add_argument("--only", nargs="*", default=[""], help="cases to leave in, by the start of their names")
    arguments = parser.parse_args()
    base = arguments.base.resolve()
    for path in (base, OURS):
        refuse_misplaced(path)
    print(f"{'':<32}{'base, CPU ms a step':>20}{'ours':>8}{'base/ours':>11}")
    for name, case in CASES.items():
        if not name.startswith(tuple(arguments.only)):
            continue
        before, after, steps = race(base, case, arguments.rounds, arguments.seconds)
        ratios = [a / b for a, b in zip(before, after, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        middle = [statistics.median(numbers) for numbers in (before, after, ratios)]
        print(f"{name:<32}{middle[0]:>20.3f}{middle[1]:>8.3f}{middle[2]:>11.3f}", end="  ")
        print(f"({low:.3f} to {high:.3f}; {arguments.rounds} rounds of {steps} steps)", flush=True)


if __name__ == "__main__":
    main()
