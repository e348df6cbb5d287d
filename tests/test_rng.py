"""Random numbers: pure functions of (seed, purpose, counter, index), evenly spread and independent."""

import torch

from t3d import rng
from t3d.rng import Purpose

SEEDS = torch.tensor([0, 1, 2**61 + 5])


def test_known_bits_never_change():
    # Other bits would be other runs: a recorded seed must mean the same for ever.
    assert rng.bits64(torch.tensor([0, 1]), Purpose.SAMPLING, 3, (2,)).tolist() == [
        [-7614263497681948001, -2514742219002299582],
        [5720573001332602196, -2224562481050829709],
    ]
    assert rng.integer(5, Purpose.EPISODE, 7, 1) == 1151598028


def test_a_seed_is_the_same_alone_and_among_others():
    together = rng.bits64(SEEDS, Purpose.SMOOTHING, 9, (4, 3))
    for k in range(3):
        assert torch.equal(rng.bits64(SEEDS[k : k + 1], Purpose.SMOOTHING, 9, (4, 3))[0], together[k])


def test_each_seed_may_have_its_own_counter():
    counters = torch.tensor([4, 0, 11])
    together = rng.bits64(SEEDS, Purpose.SMOOTHING, counters, (5,))
    for k in range(3):
        alone = rng.bits64(SEEDS[k : k + 1], Purpose.SMOOTHING, int(counters[k]), (5,))
        assert torch.equal(alone[0], together[k])


def test_seed_purpose_and_counter_all_matter():
    draws = [
        rng.bits64(torch.tensor([seed]), purpose, counter, (50,))
        for seed in range(3)
        for purpose in Purpose
        for counter in range(3)
    ]
    numbers = torch.cat(draws, 1)
    assert numbers.unique().numel() == numbers.numel()


def test_uniform_covers_its_range_evenly():
    u = rng.uniform(torch.arange(4), Purpose.RANDOM_ACTION, 0, (250_000,), torch.float32)
    assert u.min() >= -1 and u.max() < 1
    assert abs(u.mean()) < 0.003 and abs(u.var() - 1 / 3) < 0.003
    counts = torch.histc(u, 100, -1, 1)
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 160  # chi-square, 99 degrees of freedom


def test_normal_has_the_moments_of_a_normal_and_no_correlation():
    x = rng.normal(torch.arange(4), Purpose.EXPLORATION, 0, (250_000,), torch.float64).flatten()
    assert abs(x.mean()) < 0.004 and abs(x.var() - 1) < 0.006
    assert abs((x**3).mean()) < 0.02 and abs((x**4).mean() - 3) < 0.05
    assert abs((x[1:] * x[:-1]).mean()) < 0.004
    assert torch.isfinite(x).all() and x.abs().max() < 6
    next_counter = rng.normal(torch.arange(4), Purpose.EXPLORATION, 1, (250_000,), torch.float64).flatten()
    assert abs((x * next_counter).mean()) < 0.004


def test_indices_reach_every_row():
    bits = rng.bits32(torch.tensor([0]), Purpose.SAMPLING, 0, (20_000,))
    assert bits.min() >= 0 and bits.max() < 2**32
    index = (bits * 1000) >> 32
    assert torch.equal(index.unique(), torch.arange(1000))
