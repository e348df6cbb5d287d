"""The tasks of a suite side by side on one GPU: each in a process of its own, on its own cores.

    python benchmarks/together.py paper                      the seven tasks of the paper's table
    python benchmarks/together.py ablation --only Hopper Walker2d
    python benchmarks/together.py ablation --only Hopper --cores 0-9 --each 2 -- --steps 100000

A task waits until as many cores are free as it is worth, or as --each says. What stands behind `--` goes to every
`t3d bench returns`. What was stopped goes on when it is started again. Each task's output is in runs/bench/NAME.log.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from t3d.bench.suites import SUITES, tasks_of

LOGS = Path("runs/bench")
# Simulations of ten seeds, by what a step of them costs; one core for all others.
CORES = {"Ant": 6, "HalfCheetah": 3, "Walker2d": 3, "Hopper": 2}
# Half of the time of these would go into evaluations every 5,000 steps.
SLOW = {"Ant": 25_000, "Walker2d": 25_000, "Hopper": 25_000}


def start(task, cores, options):
    env = task.env.rsplit("-", 1)[0]
    only = [env, *([task.variant] if task.variant else [])]
    command = [sys.executable, "-m", "t3d", "bench", "returns", "--suite", task.suite, "--only", *only]
    if env in SLOW and "--eval-every" not in options:
        command += ["--eval-every", str(SLOW[env])]
    log = (LOGS / f"{task.name}.log").open("w")
    return subprocess.Popen(
        [*command, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
        stdout=log,
        stderr=subprocess.STDOUT,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=list(SUITES))
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--cores", help="as in 0-9; all of them if not given")
    parser.add_argument("--each", type=int, help="cores for every task")
    ours, options = sys.argv[1:], []
    if "--" in ours:
        ours, options = ours[: ours.index("--")], ours[ours.index("--") + 1 :]
    arguments = parser.parse_args(ours)
    first, _, last = (arguments.cores or "").partition("-")
    free = set(range(int(first), int(last or first) + 1)) if first else os.sched_getaffinity(0)
    most = len(free)
    waiting = tasks_of(arguments.suite, arguments.only)
    LOGS.mkdir(parents=True, exist_ok=True)
    # NVIDIA's MPS lets processes use the GPU side by side instead of in turns.
    if subprocess.run(["sh", "-c", "nvidia-cuda-mps-control -d"], capture_output=True).returncode:
        print("MPS runs already, or there is none.")
    began, running, failed = time.monotonic(), {}, []
    while waiting or running:
        for process, (task, cores) in list(running.items()):
            if process.poll() is not None:
                del running[process]
                free |= cores
                failed += [task.name] if process.returncode else []
                how = "FAILED" if process.returncode else "done"
                print(f"{time.monotonic() - began:6.0f} s  {task.name} {how}", flush=True)
        for task in list(waiting):
            need = min(arguments.each or CORES.get(task.env.rsplit("-", 1)[0], 1), most)
            if len(free) >= need:
                cores = set(sorted(free)[:need])
                free -= cores
                waiting.remove(task)
                running[start(task, cores, options)] = task, cores
        time.sleep(0.5)
    print(f"all of them: {(time.monotonic() - began) / 60:.1f} minutes")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
