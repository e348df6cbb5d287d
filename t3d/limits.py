"""Checks of memory, disk space and free cores before a run starts."""

import os
import shutil
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from t3d import files
from t3d.errors import T3DError

CGROUPS = (  # memory limit and usage of a container: cgroup version 2 and version 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory(device: torch.device) -> int | None:
    """The free memory of a device in bytes; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = [_available()]
    for limit, used in CGROUPS:
        most, now = _number(Path(limit)), _number(Path(used))
        if most is not None and now is not None:
            found.append(max(0, most - now))
    known = [number for number in found if number is not None]
    return min(known) if known else None


def _available() -> int | None:
    try:
        lines = files.read_text(Path("/proc/meminfo")).splitlines()
    except T3DError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _number(path: Path) -> int | None:
    try:
        text = files.read_text(path).strip()
    except T3DError:
        return None
    return int(text) if text.isdecimal() else None  # "max" means no limit


def refuse_oversize(rows: int, row_bytes: int, seeds: int, device: torch.device) -> None:
    """Raise T3DError if the replay memory does not fit into free memory; name the largest size that fits."""
    free = free_memory(device)
    needed = rows * row_bytes * seeds
    if free is not None and needed > 0.9 * free:  # the rest of the run needs memory too
        fits = int(0.9 * free) // (row_bytes * seeds)
        raise T3DError(
            f"the replay memory needs {needed / 2**30:,.2f} GiB, but {free / 2**30:,.2f} GiB are free on this"
            f" {'GPU' if device.type == 'cuda' else 'machine'}: --buffer-size {fits} fits."
        )


def refuse_large_networks(sizes: Sequence[int], networks: int, device: torch.device) -> None:
    """Raise T3DError if the networks do not fit into free memory; `sizes` are the widths from input to output."""
    weights = sum((fan_in + 1) * fan_out for fan_in, fan_out in pairwise(sizes))
    needed, free = 4 * 4 * weights * networks, free_memory(device)  # weights, target and Adam's two moments
    if free is not None and needed > 0.9 * free:
        layers = ", ".join(f"{size:,}" for size in sizes[1:-1])
        raise T3DError(
            f"networks with layers of {layers} need {needed / 2**30:,.1f} GiB, but {free / 2**30:,.1f} GiB are free:"
            " use smaller numbers for --hidden."
        )


def short_of_disk(folder: Path, needed: int) -> str | None:
    """Return a warning if the disk has less free space than checkpoints need."""
    free = shutil.disk_usage(folder).free
    if needed <= free:
        return None
    return (
        f"Checkpoints of this run need up to {needed / 2**30:,.2f} GiB, but the disk of {folder} has"
        f" {free / 2**30:,.2f} GiB left. If the disk is full, the run stops and keeps its last checkpoint."
    )


def short_of_cores(threads: int) -> str | None:
    """Return a warning if other processes use the cores: training threads often wait for the slowest one."""
    busy = busy_cores() if threads > 1 else None
    if busy is None or busy + threads < cores() + 0.5:
        return None
    fewer = max(1, round(cores() - busy))
    return (
        f"{busy:.1f} of {cores()} cores are busy with other work: {threads} threads wait for each other and can be"
        f" many times slower than {fewer}. Start a new run with --threads {fewer}."
    )


def busy_cores(seconds: float = 0.2) -> float | None:
    """How many cores of this process are busy with other processes; None if unknown."""
    first, start, own = _idle(), time.monotonic(), time.process_time()
    time.sleep(seconds)
    last, end, own = _idle(), time.monotonic(), time.process_time() - own
    if first is None or last is None:
        return None
    return max(0.0, cores() - (last - first + own) / (end - start))


def _idle() -> float | None:
    """The total idle seconds of the cores of this process."""
    try:
        counts = {name: times for name, *times in map(str.split, files.read_text(Path("/proc/stat")).splitlines())}
        ours = [counts[f"cpu{core}"] for core in os.sched_getaffinity(0)]
    except (T3DError, KeyError, ValueError, AttributeError):
        return None
    return sum(float(times[3]) + float(times[4]) for times in ours) / os.sysconf("SC_CLK_TCK")
