"""How large a part of a network each program of the kernels for GPUs should take.

    python benchmarks/tiles.py [SEEDS/PRECISION ...]        as in 10/tf32 128/bf16, which are the default

Times every kernel of `t3d/learners/triton_mlp.py` with every tile that might do, HalfCheetah-v5's shapes and batch 256,
and prints the fastest beside the one that is chosen now. All cores compile first; one process measures afterwards.
"""

import itertools
import multiprocessing
import sys

import torch
from gpu import ACTION, OBS, milliseconds
from machine import CORES

from t3d.learners import triton_mlp
from t3d.learners.compiled import set_compile_cache

WIDTH, BATCH = 256, 256
SHOWN = 4
# The kernel, whether it is of the critics or of the actor, and whether hidden layers are kept for the way back.
ROLES = {
    "forward, critics, kept": ("forward", True, True),
    "forward, critics, not kept": ("forward", True, False),
    "backward, critics": ("backward", True, False),
    "weights, critics": ("weights", True, False),
    "forward, actor, kept": ("forward", False, True),
}


def work(role, seeds, precision):
    """A call of the kernel that plays this role."""
    kernel, twins, keep = ROLES[role]
    torch.manual_seed(0)
    lead = (2, seeds) if twins else (seeds,)
    sizes = (OBS + ACTION, WIDTH, WIDTH, 1) if twins else (OBS, WIDTH, WIDTH, ACTION)
    kind = torch.bfloat16 if precision == "bf16" else torch.float32

    def drawn(*shape, dtype=torch.float32):
        return torch.randn(*shape, device="cuda", dtype=dtype)

    weights = [drawn(*lead, rows, out) for fan_in, out in itertools.pairwise(sizes) for rows in (fan_in, 1)]
    x, dy = drawn(seeds, BATCH, sizes[0]), drawn(*lead, BATCH, sizes[-1])
    h1, h2, d1, d2 = (drawn(*lead, BATCH, WIDTH, dtype=kind) for _ in range(4))
    if kernel == "forward":
        return lambda: torch.ops.t3d.mlp(x, weights, precision, keep)
    if kernel == "backward":
        return lambda: torch.ops.t3d.mlp_backward(dy, h1, h2, weights[::2], False, True, precision)
    return lambda: torch.ops.t3d.mlp_weights(x, h1, h2, d1, d2, dy, precision)


def tiles(role, seeds, precision):
    """Those that might do; the one that is chosen now comes first."""
    kernel, twins, _ = ROLES[role]
    nets = seeds * (2 if twins else 1)
    sizes = (OBS + ACTION if twins else OBS, WIDTH, WIDTH)
    if kernel == "weights":
        now = triton_mlp._weights_tile(nets, precision)
        names, shapes = ("BP", "BQ", "BB", "BS"), itertools.product((32, 64, 128), (64, 128, 256), (32, 64, 128), (64,))
    else:
        now = triton_mlp._tile(nets, sizes, precision, kernel == "backward")
        names, shapes = ("BM", "BN", "BK"), itertools.product((32, 64, 128), (64, 128, 256), (32, 64))
    found = [now]
    for shape in shapes:
        area = shape[0] * shape[1]
        for warps, stages in itertools.product((4, 8), (2, 3)):
            fit = (area <= 128 * 128 if warps == 4 else area >= 64 * 128) and area <= 128 * 256
            tile = {**dict(zip(names, shape, strict=True)), "num_warps": warps, "num_stages": stages}
            if fit and tile not in found:
                found.append(tile)
    return found


def choose(tile):
    triton_mlp._tile = lambda *_, **__: tile
    triton_mlp._weights_tile = lambda *_: tile


def prepare(job):
    """Compile, and forget it if that cannot be."""
    *case, tile = job
    choose(tile)
    try:
        work(*case)()
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, most of all
        return type(error).__name__
    return ""


def microseconds(call, times=20, rounds=3):
    """The fastest round's time for a call, recorded."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    graph.replay()
    return min(milliseconds(graph.replay) for _ in range(rounds)) / times * 1e3


def main():
    set_compile_cache()
    cases = [word.split("/") for word in sys.argv[1:] or ("10/tf32", "128/bf16")]
    cases = [(role, int(seeds), precision) for seeds, precision in cases for role in ROLES]
    chosen = {case: tiles(*case) for case in cases}
    jobs = [(*case, tile) for case in cases for tile in chosen[case]]
    with multiprocessing.get_context("spawn").Pool(CORES) as pool:
        failed = pool.map(prepare, jobs, chunksize=1)
    good = [job for job, why in zip(jobs, failed, strict=True) if not why]
    print(f"{len(jobs)} tiles, {len(jobs) - len(good)} of them too large", flush=True)
    for case in cases:
        call, times = work(*case), []
        for *of, tile in good:
            if tuple(of) == case:
                choose(tile)
                times.append((microseconds(call), tile))
        print(f"{case[0]}, {case[1]} seeds, {case[2]}")
        for place, (time, tile) in enumerate(sorted(times, key=lambda row: row[0])):
            now = tile == chosen[case][0]
            if place < SHOWN or now:
                print(f"    {time:7.2f} µs  {', '.join(f'{k} {v}' for k, v in tile.items())}{'   now' if now else ''}")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
