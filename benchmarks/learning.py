"""Does it learn as well in one precision as in another? The gate before anything is built on a faster mode.

    python benchmarks/learning.py [--seeds 10] [--steps 300000] [--only HalfCheetah-v5/tf32 ...] [--runs DIR]

Trains HalfCheetah-v5 in fp32, TF32 and bfloat16, and Hopper-v5 and Walker2d-v5 in fp32 and TF32, all seeds of a task in
one run, and compares what they reach: the mean over the last five evaluations of each seed. A difference from fp32 is
given in per cent of fp32 with its 95 % interval, from 10,000 bootstrap samples over seeds; it should stay above -10 %.
What was trained once is kept, in benchmarks/results/learning/, and a run that was stopped goes on.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from machine import RESULTS

import t3d

PLAN = [
    "HalfCheetah-v5/tf32",
    "HalfCheetah-v5/fp32",
    "HalfCheetah-v5/bf16",
    "Hopper-v5/tf32",
    "Walker2d-v5/tf32",
    "Hopper-v5/fp32",
    "Walker2d-v5/fp32",
]
LAST = 5  # evaluations that count as the end


def trained(name, arguments):
    """The curves of one task in one precision: from the file, or trained now."""
    env, precision = name.split("/")
    path = RESULTS / "learning" / f"{env}-{precision}-{arguments.seeds}-seeds-{arguments.steps}-steps.json"
    if path.exists():
        return json.loads(path.read_text())
    folder, begin = Path(arguments.runs) / path.stem, time.monotonic()
    if (folder / "config.json").exists():
        run = t3d.resume(folder, progress=arguments.progress)
    else:
        settings = {"precision": precision, "eval_every": arguments.eval_every, "device": arguments.device}
        run = t3d.train(env, arguments.steps, arguments.seeds, folder, progress=arguments.progress, **settings)
    rows = [row for row in run.metrics if row["kind"] == "evaluation"]
    steps = sorted({row["step"] for row in rows})
    means = [[row["mean"] for row in rows if row["seed"] == seed] for seed in run.seeds]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    config = {key: run.config[key] for key in ("accelerate", "overlap", "precision", "device", "eval_episodes")}
    curves = {"env": env, "config": config, "versions": run.config["versions"], "gpu": gpu, "steps": steps}
    curves |= {"seeds": run.seeds, "means": means, "wall_seconds": round(time.monotonic() - begin, 1)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(curves) + "\n")
    return curves


def ends(curves):
    """What each seed reached."""
    return np.array(curves["means"])[:, -LAST:].mean(1)


def difference(ours, reference, samples=10_000):
    """Per cent of the reference's mean: the difference of means, and its 95 % interval."""
    source = np.random.default_rng(0)
    drawn = [source.choice(x, (samples, len(x))).mean(1) for x in (ours, reference)]
    low, high = np.percentile((drawn[0] - drawn[1]) / abs(reference.mean()) * 100, [2.5, 97.5])
    return (ours.mean() - reference.mean()) / abs(reference.mean()) * 100, low, high


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--eval-every", type=int, default=15_000)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", nargs="*", default=PLAN, metavar="TASK/PRECISION")
    parser.add_argument("--runs", default="runs/learning")
    parser.add_argument("--progress", action="store_true")
    arguments = parser.parse_args()
    found = {}
    print(f"{'':<24}{'mean':>9}{'sd':>8}{'lowest':>9}{'highest':>9}{'seconds':>9}", flush=True)
    for name in arguments.only:
        curves = trained(name, arguments)
        reached = found[name] = ends(curves)
        numbers = "".join(f"{x:9.0f}" for x in (reached.min(), reached.max(), curves["wall_seconds"]))
        print(f"{name:<24}{reached.mean():9.0f}{reached.std():8.0f}{numbers}", flush=True)
    for name, reached in found.items():
        reference = found.get(name.split("/")[0] + "/fp32")
        if reference is not None and not name.endswith("/fp32"):
            change, low, high = difference(reached, reference)
            print(f"{name:<24}{change:+.1f} % of fp32, 95 % interval {low:+.1f} to {high:+.1f} %")


if __name__ == "__main__":
    main()
