"""What saving costs: processor time for each step at one save a minute, and how long a step is held up.

    python benchmarks/saving.py [--saves 10]

HalfCheetah-v5, compiled, batch 256, two hidden layers of 256, a memory of 1e6. First a thousand steps show what a step
costs and how many a minute has; then the same run is saved again and again, each time with as many new rows as a minute
gives, while it goes on training. Results go to benchmarks/results/saving-CORES-cores.json.
"""

import argparse
import os
import statistics
import tempfile
import time

import numpy as np
from machine import save

from t3d.config import Config, resolve
from t3d.envs import env_factory
from t3d.learners import hardware
from t3d.replay import Transitions
from t3d.run_state import RunSetup
from t3d.runs.checkpoints import Checkpoints
from t3d.runs.folder import Run
from t3d.trainer import Trainer

ENV = "HalfCheetah-v5"


def cpu():
    return sum(os.times()[:2])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=10)
    arguments = parser.parse_args()
    config = resolve(Config(steps=10**7, random_steps=100, accelerate="compile", device="cpu"), "td3", ENV, 1)
    with hardware(config.threads, "fp32"), tempfile.TemporaryDirectory() as folder:
        run = Run(folder)
        run.begin({"env": ENV, "env_args": {}, "seeds": [0], "preset": "td3"})
        trainer = Trainer.in_memory(RunSetup(env_factory(ENV), [0], config))
        state, memory = trainer.state, trainer.state.learner.memory
        checkpoints = Checkpoints(run, {})

        def steps(n):
            longest = 0.0
            for _ in range(n):
                start = time.perf_counter()
                trainer.step()
                longest = max(longest, time.perf_counter() - start)
            return longest

        steps(300)
        clock, processors = time.perf_counter(), cpu()
        longest_alone = steps(1000)
        wall, spent = (time.perf_counter() - clock) / 1000, (cpu() - processors) / 1000
        minute = int(60 / wall)
        rows = memory.rows[:, :1].expand(-1, minute, -1).numpy()
        obs, action = rows[..., :17], rows[..., 17:23]
        new = Transitions(obs, action, 0.0, obs, 0.0, 1.0, np.ones((1, minute), bool))
        held, longest, costs = [], [], []
        for number in range(arguments.saves):
            memory.add(new)
            start, before = time.perf_counter(), cpu()
            checkpoints.save(number, state.state_dict(), memory)
            held.append(time.perf_counter() - start)
            longest.append(steps(200))
            checkpoints.wait()
            costs.append(cpu() - before - 200 * spent)
        checkpoints.close()
        run.log.close()
    share = statistics.median(costs) / (minute * spent)
    results = {
        "steps a minute": minute,
        "CPU ms a step": spent * 1e3,
        "CPU ms a save": statistics.median(costs) * 1e3,
        "more CPU a step at one save a minute": share,
        "ms a step is held up, longest": max(held) * 1e3,
        "longest step without and with a save, ms": [longest_alone * 1e3, max(longest) * 1e3],
    }
    for name, value in results.items():
        print(f"{name}: {value if isinstance(value, list) else round(value, 5)}")
    save("saving", ("torch", "numpy"), results)


if __name__ == "__main__":
    main()
