"""Random numbers as a pure function of (seed, purpose, counter, index).

There is no generator state to save or to share: a number is a hash of its arguments. Seeds are
independent, a run resumes exactly from its counters, and CPU and GPU give the same bits. All
operations are int64 tensor arithmetic that wraps around, so a compiler can fuse them.

Shapes: `seeds` (S,) and `counter` (S,) or an int; the result is (S, *shape).
"""

from collections.abc import Sequence
from enum import IntEnum
from math import prod, tau

import torch
from torch import Tensor


class Purpose(IntEnum):
    """What a number is used for. Results depend on the values: add new ones, never renumber."""

    ACTOR_WEIGHTS = 1
    CRITIC_WEIGHTS = 2
    RANDOM_ACTION = 3
    EXPLORATION = 4
    SAMPLING = 5
    SMOOTHING = 6
    EPISODE = 7
    EVALUATION = 8
    HINDSIGHT = 9


def _signed(constant: int) -> int:
    """The int64 with the same 64 bits."""
    return constant - (1 << 64) if constant >> 63 else constant


# SplitMix64 (Steele, Lea, Flood 2014): the odd number nearest 2^64 / golden ratio, and its two multipliers.
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLY_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = _signed(0x94D049BB133111EB)


def _shift(x: Tensor, n: int) -> Tensor:
    """Logical right shift: `>>` on int64 copies the sign bit, and the mask removes the copies."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's output function: every input bit reaches every output bit."""
    x = (x ^ _shift(x, 30)) * _MULTIPLY_1
    x = (x ^ _shift(x, 27)) * _MULTIPLY_2
    return x ^ _shift(x, 31)


def bits64(seeds: Tensor, purpose: Purpose, counter: Tensor | int, shape: Sequence[int]) -> Tensor:
    """64 random bits for each index of `shape`, for each seed: (S, *shape) int64."""
    stream = _mix((_mix(seeds * _GOLDEN) + int(purpose)) * _GOLDEN)  # (S,)
    stream = _mix((stream + counter) * _GOLDEN)  # (S,)
    # Add the index before multiplying: Triton's `arange` has 32 bits, and adding `stream` widens it to 64.
    index = torch.arange(prod(shape), device=seeds.device)
    return _mix((stream[:, None] + index) * _GOLDEN).reshape(-1, *shape)


def halves(seeds: Tensor, purpose: Purpose, counter: Tensor | int, shape: Sequence[int]) -> Tensor:
    """`bits64` with its halves swapped: the lower half is `bits32`, the upper half is free for other uses."""
    bits = bits64(seeds, purpose, counter, shape)
    return _shift(bits, 32) | (bits << 32)


def bits32(seeds: Tensor, purpose: Purpose, counter: Tensor | int, shape: Sequence[int]) -> Tensor:
    """32 random bits as int64 in [0, 2^32), for indices: `(bits · size) >> 32`."""
    return _shift(bits64(seeds, purpose, counter, shape), 32)


def uniform(seeds: Tensor, purpose: Purpose, counter: Tensor | int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uniform on [−1, 1), in steps of 2^−23, exact in float32."""
    bits = _shift(bits64(seeds, purpose, counter, shape), 40)
    return bits.to(dtype) * 2.0**-23 - 1.0


def normal(seeds: Tensor, purpose: Purpose, counter: Tensor | int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Standard normal by Box–Muller; both uniforms come from one 64-bit number."""
    bits = bits64(seeds, purpose, counter, shape)
    radius = (_shift(bits, 40) + 1).to(dtype) * 2.0**-24  # (0, 1]: the logarithm is finite
    angle = (bits & 0xFFFFFF).to(dtype) * 2.0**-24
    return torch.sqrt(-2.0 * torch.log(radius)) * torch.cos(tau * angle)


def integer(seed: int, purpose: Purpose, counter: int, index: int = 0) -> int:
    """One number below 2^31 on the host, to seed other generators."""
    bits = bits64(torch.tensor([seed]), purpose, counter, (index + 1,))
    return int(bits[0, index]) & 0x7FFFFFFF
