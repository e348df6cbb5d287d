"""Where a result was measured, and where it goes."""

import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

from t3d.bench.returns import processor

RESULTS = Path(__file__).resolve().parent / "results"
CORES = len(os.sched_getaffinity(0))


def save(name, packages, results, **more):
    """benchmarks/results/NAME-CORES-cores.json, with the command, the versions and the processor."""
    script = Path(sys.argv[0]).name
    where = {
        "command": " ".join(["python", f"benchmarks/{script}", *sys.argv[1:]]),
        "python": platform.python_version(),
    }
    where |= {"cores": CORES, "processor": processor(), **{package: version(package) for package in packages}}
    path = RESULTS / f"{name}-{CORES}-cores.json"
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps({**where, **more, "results": results}, indent=2, ensure_ascii=False) + "\n")
    print(f"written to benchmarks/results/{path.name}")
