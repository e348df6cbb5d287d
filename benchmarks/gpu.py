"""The update and the whole loop on a GPU.

    python benchmarks/gpu.py [update] [loop] [whole] [start] [chain] [--again]

update: microseconds for seeds in 1, 2, 4, 10, 32, 128 and products in TF32 and bfloat16, recorded.
loop:   environment steps a second with 1 and 10 seeds, training without evaluations.
whole:  the same with an evaluation of ten episodes every 5,000 steps: in turns, and beside training.
start:  seconds from the command to the first update, with an empty and with a full cache.
chain:  the kernels of an update, one after another, and what a kernel costs that does next to nothing.

In this order, whatever the order they are named in: a process that was profiled once launches more slowly ever after.

HalfCheetah-v5, batch 256, two hidden layers of 256, one update per step. What was measured once is kept in
benchmarks/results/gpu-NAME.json and not measured again, so it can be done in several runs; --again forgets it.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from machine import CORES, RESULTS, processor

from t3d.config import Config, resolve
from t3d.envs import env_factory
from t3d.learners import LearnerState, hardware, make_learner
from t3d.replay import Replay
from t3d.run_state import RunSetup
from t3d.steps import METRICS, POLICY_METRICS, init_agent
from t3d.trainer import Trainer

ENV, OBS, ACTION = "HalfCheetah-v5", 17, 6
SEEDS = (1, 2, 4, 10, 32, 128)
WARM_UP = 15  # seconds: that long PyTorch's compile workers, one for each core, take to start beside the loop
GPU = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
PATH = RESULTS / f"gpu-{re.sub(r'[^a-z0-9]+', '-', GPU.lower())}.json"


def config_of(seeds, **settings):
    settings = {"steps": 1_000_000, "device": "cuda", "accelerate": "graph", "precision": "tf32", **settings}
    return resolve(Config(**settings), "td3", ENV, seeds)


def learner(seeds, precision):
    """A learner of `seeds` agents with random transitions in their replay memories."""
    torch.manual_seed(0)
    memory = Replay(seeds, 10_000, OBS, ACTION, device="cuda")
    memory.rows.normal_()
    memory.rows[..., -2:] = 1 - memory.rows.new_tensor([1.0, 0.0])  # not terminated, one step long
    memory.stored[:] = 10_000
    memory.length.fill_(10_000)
    config = config_of(seeds, precision=precision)
    agent = init_agent(torch.arange(seeds, device="cuda"), OBS, ACTION, config.hidden)
    sums = {name: torch.zeros(seeds, device="cuda") for name in METRICS + POLICY_METRICS}
    return make_learner(LearnerState(agent, memory, sums), config)


def updates(learner, times):
    for update in range(times):
        learner.update(0, policy_step=update % 2 == 1)


def microseconds(learner, times=400, rounds=5):
    """The median round's time for one update, every second one delayed."""
    updates(learner, times)
    spent = []
    for _ in range(rounds):
        spent.append(milliseconds(lambda: updates(learner, times)) / times * 1e3)
    return statistics.median(spent)


def milliseconds(work):
    """What the GPU takes for what `work` asks of it."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def update(found):
    for precision in ("tf32", "bf16"):
        for seeds in SEEDS:
            name = f"update, {seeds} seeds, {precision}"
            if name not in found:
                with hardware(1, precision):
                    found[name] = microseconds(learner(seeds, precision))
                keep(found)
            print(f"{name:<32}{found[name]:9.1f} µs{found[name] / seeds:9.1f} µs a seed", flush=True)


def chain(found):
    for seeds in (1, 10):
        for precision in ("tf32", "bf16"):
            name = f"kernels, {seeds} seeds, {precision}"
            if name not in found:
                with hardware(1, precision):
                    found[name] = profile(learner(seeds, precision))
                keep(found)
            print(f"{name}, one after another, in two updates:")
            for kernel, count, each in found[name]:
                print(f"    {count:4} x {each:6.2f} µs  {kernel[:90]}")
            total, number = sum(c * e for _, c, e in found[name]), sum(c for _, c, _ in found[name])
            print(f"    {number:4} kernels, {total:.1f} µs in them", flush=True)
    if "a kernel that does nothing" not in found:
        found["a kernel that does nothing"] = nothing()
        keep(found)
    print(f"a kernel that does next to nothing, in a recording: {found['a kernel that does nothing']:.2f} µs")


def profile(learner):
    """(kernel, how often in two updates, microseconds each), the longest in all first."""
    updates(learner, 20)
    torch.cuda.synchronize()
    times = 20
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        updates(learner, 2 * times)
        torch.cuda.synchronize()
    rows = [(e.key, e.count / times, e.device_time) for e in seen.key_averages() if e.device_time > 0]
    return sorted(rows, key=lambda row: -row[1] * row[2])


def nothing():
    x = torch.zeros(32, device="cuda")
    x.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(1000):
            x.add_(1)
    graph.replay()
    return milliseconds(graph.replay)  # for a thousand: microseconds for one


def loop(found):
    for seeds in (1, 10):
        name = f"loop, {seeds} seeds, tf32"
        if name not in found:
            found[name] = steps_per_second(seeds)
            keep(found)
        each, total = found[name]
        print(f"{name:<32}{1e6 / each:9.0f} µs a step{total:9.0f} environment steps a second in all", flush=True)
    if all(f"loop, {seeds} seeds, tf32" in found for seeds in (1, 10)):
        one, ten = found["loop, 1 seeds, tf32"][0], found["loop, 10 seeds, tf32"][0]
        print(f"ten seeds take {one / ten:.2f} times as long as one")


def steps_per_second(seeds, steps=5_000, rounds=5):
    config = config_of(seeds, random_steps=1_000)
    with hardware(config.threads, config.precision):
        trainer = Trainer.in_memory(RunSetup(env_factory(ENV), list(range(seeds)), config))

        def take(times):
            for _ in range(times):
                trainer.step()
            torch.cuda.synchronize()

        begin = time.perf_counter()
        while time.perf_counter() - begin < WARM_UP:
            take(1_000)
        rates = []
        for _ in range(rounds):
            start = time.perf_counter()
            take(steps)
            rates.append(steps / (time.perf_counter() - start))
    trainer.state.close()
    rate = statistics.median(rates)
    return rate, rate * seeds


def whole(found):
    for seeds in (1, 10):
        for name, beside in (("in turns", "off"), ("beside training", "on")):
            name = f"evaluations {name}, {seeds} seeds, tf32"
            if name not in found:
                found[name] = with_evaluations(seeds, beside)
                keep(found)
            each, total = 1e6 / found[name], seeds * found[name]
            print(f"{name:<42}{each:9.0f} µs a step{total:9.0f} environment steps a second in all", flush=True)


def with_evaluations(seeds, beside, first=20_000, last=100_000):
    """Steps a second from one step of a run to the end of its last evaluation."""
    options = ["--steps", str(last), "--random-steps", "1000", "--async-eval", beside]
    with tempfile.TemporaryDirectory() as out, started(out, seeds, options) as wait_for:
        began = wait_for(rf'"training", "step": {first},')
        return (last - first) / (wait_for(rf'"evaluation", "step": {last},') - began)


def start(found):
    if "first update, cold" not in found:
        with tempfile.TemporaryDirectory() as cache:
            found["first update, cold"], found["first update, warm"] = first_update(cache), first_update(cache)
            keep(found)
    for name in ("first update, cold", "first update, warm"):
        print(f"{name:<32}{found[name]:9.1f} s", flush=True)


def first_update(cache):
    """From the command to the first losses in the run's metrics."""
    options = ["--random-steps", "10", "--log-every", "1", "--eval-episodes", "1"]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as out, started(out, 10, options, cache) as wait_for:
        return wait_for(r'"critic_loss": \d') - begin


@contextmanager
def started(out, seeds, options, cache=None):
    """A run in a process of its own, and how to wait until its metrics have something in them."""
    command = [sys.executable, "-m", "t3d", "train", ENV, "--seeds", str(seeds), "--out", f"{out}/run", *options]
    command += ["--device", "cuda", "--accelerate", "graph", "--precision", "tf32"]
    # This process's own caches: the run is to make its own. And bytecode is kept, as where packages were installed.
    own = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    if cache is not None:
        environment["XDG_CACHE_HOME"] = cache
    run = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    metrics = Path(out) / "run" / "metrics.jsonl"

    def wait_for(pattern):
        while not (metrics.exists() and re.search(pattern, metrics.read_text())):
            assert run.poll() is None, f"the run ended before its metrics had {pattern}"
            time.sleep(0.05)
        return time.monotonic()

    try:
        yield wait_for
    finally:
        run.kill()
        run.wait()


def keep(found):
    versions = {"python": platform.python_version()}
    for package in ("torch", "triton", "mujoco", "gymnasium", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "unknown"
    where = {"command": "python benchmarks/gpu.py", "gpu": GPU, "cores": CORES, "processor": processor(), **versions}
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(json.dumps({**where, "results": found}, indent=2, ensure_ascii=False) + "\n")


def main():
    parts = {"update": update, "loop": loop, "whole": whole, "start": start, "chain": chain}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=[])
    parser.add_argument("--again", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("PyTorch finds no GPU on this machine.")
    found = json.loads(PATH.read_text())["results"] if PATH.exists() and not arguments.again else {}
    for name, part in parts.items():
        if name in (arguments.parts or parts):
            part(found)
    print(f"written to benchmarks/results/{PATH.name}")


if __name__ == "__main__":
    main()
