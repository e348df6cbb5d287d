"""The whole loop on a CPU, an environment step and an update, beside other libraries' and the machine's limit.

    python benchmarks/speed.py [--rounds 5] [--steps 400] [--only NAME ...]

Every contender is a process of its own (benchmarks/contenders/), in a virtual environment of its own where it is not
ours; the first run makes those. All get ready first. Then, round after round, each takes its steps while the others
stand still; a ratio is the median of the rounds' own ratios, because a shared machine changes its speed from minute to
minute. HalfCheetah-v5, batch 256, two hidden layers of 256, one update per step. Results go to
benchmarks/results/speed-CORES-cores.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import venv
from pathlib import Path

from machine import save

HERE = Path(__file__).resolve().parent
ENV, BATCH, HIDDEN, OBS, ACTION = "HalfCheetah-v5", 256, 256, 17, 6
PEERS = {
    "sb3": ("stable-baselines3==2.9.2", ["baselines.py", "stable_baselines3", ENV]),
    "sbx": ("sbx-rl==0.28.0", ["baselines.py", "sbx", ENV]),
    "tianshou": ("tianshou==2.0.1", ["tianshou_td3.py", ENV]),
    "torchrl": ("torchrl==0.14.1", ["torchrl_td3.py", ENV]),
}
OURS = {
    "ours eager fp32": ["ours.py", "eager", "fp32", "1", ENV],
    "ours compile fp32": ["ours.py", "compile", "fp32", "1", ENV],
    "ours compile bf16": ["ours.py", "compile", "bf16", "1", ENV],
    "ours compile fp32, 4 seeds": ["ours.py", "compile", "fp32", "4", ENV],
}
LIMITS = {"products fp32": ["products.py", "fp32", "256"], "products bf16": ["products.py", "bf16", "256"]}


def flop_per_update():
    """Multiplications and additions in the products of one update, the delayed steps counted half."""
    actor, critic = OBS * HIDDEN + HIDDEN**2 + HIDDEN * ACTION, (OBS + ACTION) * HIDDEN + HIDDEN**2 + HIDDEN
    target = actor + 2 * critic  # steps 5 and 7
    critics = 2 * (critic + critic + HIDDEN**2 + HIDDEN)  # step 10; back to the weights, and through two layers
    policy_step = actor + critic + critic + actor + HIDDEN**2 + HIDDEN * ACTION  # step 13, there and back
    return 2 * BATCH * (target + critics + policy_step / 2)


def python_of(name, package):
    """The interpreter of a peer's own virtual environment, made if need be."""
    folder = HERE / ".venvs" / name
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"installing {package} ...", flush=True)
        venv.create(folder, with_pip=True)
        needs = ["torch==2.13.0", "gymnasium==1.4.0", "mujoco==3.17.0", "imageio", "packaging", package]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *needs], check=True)
    return python


class Contender:
    def __init__(self, python, arguments, environment):
        self.process = subprocess.Popen(
            [python, *arguments],
            cwd=HERE / "contenders",
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended early")
        return json.loads(line) if line.startswith("{") else self.answer()

    def take(self, steps):
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return self.answer()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--only", nargs="*", help="contenders to leave in, by the start of their names")
    arguments = parser.parse_args()
    wanted = {name: (sys.executable, command) for name, command in (OURS | LIMITS).items()}
    for name, (package, command) in PEERS.items():
        if not arguments.only or name in arguments.only:
            wanted[name] = (python_of(name, package), command)
    if arguments.only:
        wanted = {name: w for name, w in wanted.items() if any(name.startswith(start) for start in arguments.only)}

    contenders = {}
    for name, (python, command) in wanted.items():  # one by one: they would slow each other's compilers down
        print(f"{name} gets ready ...", flush=True)
        contenders[name] = Contender(python, command, {})
        contenders[name].about = contenders[name].answer()
    wall, cpu = {name: [] for name in contenders}, {name: [] for name in contenders}
    for _ in range(arguments.rounds):
        for name, contender in contenders.items():
            spent = contender.take(arguments.steps)
            wall[name].append(spent["wall"] / arguments.steps * 1e3)
            cpu[name].append(spent["cpu"] / arguments.steps * 1e3)
    report(arguments, contenders, wall, cpu)


def ratio(slow, fast):
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def report(arguments, contenders, wall, cpu):
    for name in LIMITS:
        if name in wall:  # as if an update were nothing but its products
            scale = flop_per_update() / contenders[name].about["flop"]
            wall[name], cpu[name] = [x * scale for x in wall[name]], [x * scale for x in cpu[name]]
    peers = [name for name in PEERS if name in wall]
    print(
        f"\n{'':<28}{'ms a step':>10}{'CPU ms':>9}" + "".join(f"{'x ' + peer:>12}" for peer in peers) + f"{'limit':>9}"
    )
    table = {}
    for name in wall:
        limit = "products bf16" if "bf16" in name else "products fp32"
        row = {
            "ms a step": statistics.median(wall[name]),
            "CPU ms a step": statistics.median(cpu[name]),
            "times as fast as": {peer: ratio(wall[peer], wall[name]) for peer in peers},
            "share of the limit": ratio(wall[limit], wall[name]) if limit in wall else None,
            "rounds": wall[name],
        }
        table[name] = row
        ratios = "".join(f"{value:>12.2f}" for value in row["times as fast as"].values())
        share = f"{row['share of the limit']:>9.0%}" if limit in wall else ""
        print(f"{name:<28}{row['ms a step']:>10.2f}{row['CPU ms a step']:>9.2f}{ratios}{share}")
    one, four = "ours compile fp32", "ours compile fp32, 4 seeds"
    if one in wall and four in wall:
        print(f"four seeds cost {ratio(wall[four], wall[one]):.2f} times one seed")
    peers = {name: package for name, (package, _) in PEERS.items()}
    save("speed", ("torch", "mujoco", "gymnasium", "numpy"), table, peers=peers)


if __name__ == "__main__":
    main()
