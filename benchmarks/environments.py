"""How fast environments step: our paths beside `gymnasium.make` and `AsyncVectorEnv`, in one run, interleaved.

    python benchmarks/environments.py [TASK ...]        by default HalfCheetah-v5 and Ant-v5

Every way is timed for a short while, then the next one, eleven rounds over; a ratio is the median of the rounds' own
ratios, because a shared machine changes its speed from second to second. `one core` is
measured pinned to a single core. Results go to benchmarks/results/environments-CORES-cores.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv
from machine import save

from t3d.envs import env_factory

CORES = sorted(os.sched_getaffinity(0))


def gym_serial(task, count):
    """What a plain loop over `gymnasium.make` costs, resets included."""
    envs = [gymnasium.make(task) for _ in range(count)]
    for i, env in enumerate(envs):
        env.reset(seed=i)
    actions = np.random.default_rng(0).uniform(-1, 1, (1000, count, *envs[0].action_space.shape)).astype(np.float32)
    actions *= envs[0].action_space.high

    def step(t):
        for i, env in enumerate(envs):
            _, _, terminated, truncated, _ = env.step(actions[t % 1000, i])
            if terminated or truncated:
                env.reset(seed=t)

    return step


def ours(task, count):
    """Our batch, with everything the contract promises: mapped actions, checks, true last observations."""
    return contract(env_factory(task), count)


def fallback(task, count):
    """The contract over `gymnasium.make`, as any task without a faster path has it."""
    return contract(env_factory(lambda: gymnasium.make(task)), count)


def contract(source, count):
    batch = source.batch(count, lambda env, episode: 1000 * env + episode)
    batch.reset()
    actions = np.random.default_rng(0).uniform(-1, 1, (1000, count, batch.actions.dim)).astype(np.float32)
    return lambda t: batch.step(actions[t % 1000])


def gym_async(task, count):
    envs = AsyncVectorEnv([lambda: gymnasium.make(task)] * count)
    envs.reset(seed=0)
    actions = np.random.default_rng(0).uniform(-1, 1, (1000, *envs.action_space.shape)).astype(np.float32)
    actions *= envs.action_space.high
    return lambda t: envs.step(actions[t % 1000])


WAYS = {"gymnasium": gym_serial, "ours": ours, "fallback": fallback, "async": gym_async}


def measure(task, wanted, rounds=11, seconds=0.25):
    """Microseconds for a step of all environments, round by round: {name: [µs, …]}."""
    steps = {f"{way} {count}": WAYS[way](task, count) for way, count in wanted}
    times = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            step(0)
            start, t = time.perf_counter(), 0
            while time.perf_counter() - start < seconds:
                for _ in range(20):
                    t += 1
                    step(t)
            times[name].append((time.perf_counter() - start) / t * 1e6)
    return times


def ratio(times, slow, fast):
    return statistics.median(a / b for a, b in zip(times[slow], times[fast], strict=True))


def pinned(task, wanted):
    """The same, in a process that has one core."""
    command = [sys.executable, __file__, "--child", task, json.dumps(wanted)]
    result = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=lambda: os.sched_setaffinity(0, CORES[:1])
    )
    return json.loads(result.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=["HalfCheetah-v5", "Ant-v5"])
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.child[0], json.loads(arguments.child[1]))))
        os._exit(0)  # without waiting for AsyncVectorEnv's workers

    results = {}
    for task in arguments.tasks:
        one = pinned(task, [["gymnasium", 1], ["ours", 1], ["fallback", 1], ["gymnasium", 8], ["ours", 8]])
        wide = measure(task, [["ours", 8], ["async", 8], ["gymnasium", 10], ["ours", 10], ["ours", 100]])
        ratios = {
            "one environment, one core: ours / gymnasium.make": ratio(one, "gymnasium 1", "ours 1"),
            "one environment, one core, behind the contract: ours / fallback": ratio(one, "fallback 1", "ours 1"),
            "eight environments, one core: ours / gymnasium.make": ratio(one, "gymnasium 8", "ours 8"),
            f"eight environments, {len(CORES)} cores: ours / AsyncVectorEnv": ratio(wide, "async 8", "ours 8"),
            f"ten environments, {len(CORES)} cores: ours / gymnasium.make": ratio(wide, "gymnasium 10", "ours 10"),
        }
        one, wide = ({name: statistics.median(values) for name, values in times.items()} for times in (one, wide))
        results[task] = {"one core, µs a step": one, f"{len(CORES)} cores, µs a step": wide, "times as fast": ratios}
        print(f"\n{task} (path: {env_factory(task).path()[0]})")
        for title, numbers in (("one core", one), (f"{len(CORES)} cores", wide)):
            for name, value in numbers.items():
                print(f"  {title:<9} {name:<14} {value:9.1f} µs a step, {value / int(name.split()[1]):7.1f} each")
        for name, times in ratios.items():
            print(f"  {times:5.2f}x  {name}")
    print()
    save("environments", ("mujoco", "gymnasium", "numpy"), results)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
