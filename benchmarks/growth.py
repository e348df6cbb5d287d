"""How the cost of an update grows: with what the memory holds, with the number of seeds, with the batch.

    python benchmarks/growth.py [--rounds 7] [--largest 1e7]

HalfCheetah-v5's sizes (17 observations, 6 actions), two hidden layers of 256, compiled, fp32. Memories of different
sizes are full and are sampled in turns. Bytes for each transition are measured, and the process's peak memory is
compared with what a run would say before it starts. Results go to benchmarks/results/growth-CORES-cores.json.
"""

import argparse
import resource
import statistics
import time

import numpy as np
from machine import save

from t3d.config import Config, resolve
from t3d.envs import env_factory
from t3d.learners import hardware
from t3d.replay import Transitions
from t3d.run_state import RunSetup, peak_memory
from t3d.trainer import Trainer

ENV = "HalfCheetah-v5"


def student(seeds=1, batch=256, capacity=10_000):
    """The state of a run whose replay memory will be full, and its learner."""
    config = Config(
        steps=10**9, random_steps=0, buffer_size=capacity, batch_size=batch, accelerate="compile", device="cpu"
    )
    config = resolve(config, "td3", ENV, seeds)
    trainer = Trainer.in_memory(RunSetup(env_factory(ENV), list(range(seeds)), config))
    return trainer.state, trainer.learner


def fill(state):
    """Random rows up to the last one, a block at a time."""
    memory, source = state.learner.memory, np.random.default_rng(0)
    block = min(memory.capacity, 100_000)
    shape = (len(state.seeds), block)
    obs, next_obs = source.standard_normal((2, *shape, memory.obs_dim), np.float32)
    action, reward = source.random((*shape, memory.action_dim), np.float32), source.random(shape, np.float32)
    for _ in range(0, memory.capacity, block):
        memory.add(Transitions(obs, action, reward, next_obs, 0.0, 1.0, np.ones(shape, bool)))


def race(runs, rounds, updates=50):
    """Milliseconds an update, round by round, in turns."""
    times = {name: [] for name in runs}
    for warm in (True, *[False] * rounds):
        for name, (_, learner) in runs.items():
            start = time.perf_counter()
            for i in range(updates):
                learner.update(0, policy_step=i % 2 == 1)
            if not warm:
                times[name].append((time.perf_counter() - start) / updates * 1e3)
    return times


def ratio(times, a, b):
    return statistics.median(x / y for x, y in zip(times[a], times[b], strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--largest", type=float, default=1e7)
    arguments = parser.parse_args()
    results = {}
    with hardware(resolve(Config(device="cpu"), "td3", ENV, 1).threads, "fp32"):
        sizes = [size for size in (10_000, 100_000, 1_000_000, 10_000_000) if size <= arguments.largest]
        runs = {size: student(capacity=size) for size in sizes}
        told = peak_memory(runs[sizes[0]][0]) + sum(runs[size][0].learner.memory.rows.nbytes for size in sizes[1:])
        for state, _ in runs.values():
            fill(state)
        times = race(runs, arguments.rounds)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        results["transitions"] = {
            size: {"ms": statistics.median(times[size]), "to the smallest": ratio(times, size, sizes[0])}
            for size in sizes
        }
        row = runs[sizes[-1]][0].learner.memory.rows
        results["bytes a transition"] = row.nbytes / sizes[-1]
        results["peak memory"] = {
            "GiB told": told / 2**30,
            "GiB measured": peak / 2**30,
            "measured to told": peak / told,
        }
        del runs

        for title, key, values in (("seeds", "seeds", (1, 2, 4, 8)), ("batch", "batch", (64, 256, 1024))):
            runs = {value: student(**{key: value}) for value in values}
            for state, _ in runs.values():
                fill(state)
            times = race(runs, arguments.rounds)
            results[title] = {
                value: {"ms": statistics.median(times[value]), "to the first": ratio(times, value, values[0])}
                for value in values
            }
    for title in ("transitions", "seeds", "batch"):
        for value, row in results[title].items():
            ms, times = row.values()
            print(f"{title:<12} {value:>12,}  {ms:8.2f} ms an update  {times:6.3f} times the first")
    print(f"{results['bytes a transition']:.1f} bytes a transition")
    print("peak memory: {:.3f} GiB told, {:.3f} GiB measured, {:.3f} times".format(*results["peak memory"].values()))
    save("growth", ("torch", "numpy"), results)


if __name__ == "__main__":
    main()
