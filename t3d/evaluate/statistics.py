"""Statistics over seeds: the numbers of the paper's tables, interquartile means, bootstrap intervals.

Shapes: S seeds, E evaluations.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray


def best_mean(curves: NDArray[np.float64]) -> tuple[int, float, float]:
    """Of curves (S, E): the evaluation at which the mean over seeds is highest, that mean, and the deviation there.

    This is what the TD3 paper's Table 1 gives; the deviation is that of the population.
    """
    best = int(curves.mean(0).argmax())
    return best, float(curves[:, best].mean()), float(curves[:, best].std())


def last_mean(curves: NDArray[np.float64], count: int = 10) -> NDArray[np.float64]:
    """(S, E) -> (S,): each seed's mean over its last evaluations."""
    mean: NDArray[np.float64] = curves[:, -count:].mean(1)
    return mean


def interquartile_mean(scores: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
    """The mean of the middle half: a quarter of the scores is left out at either end, rounded down."""
    ordered = np.sort(scores, axis)
    cut = ordered.shape[axis] // 4
    mean: NDArray[np.float64] = ordered.take(range(cut, ordered.shape[axis] - cut), axis).mean(axis)
    return mean


def interval(
    groups: Sequence[NDArray[np.float64]],
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    samples: int = 10_000,
    level: float = 0.95,
) -> tuple[float, float]:
    """Where `statistic` lies in `level` of the samples: seeds are drawn again from each group by itself, stratified.

    The statistic takes (samples, all that were drawn) and gives (samples,). The same scores give the same interval.
    """
    factory = np.random.default_rng(0)
    drawn = [group[factory.integers(0, len(group), (samples, len(group)))] for group in groups]
    low, high = np.quantile(statistic(np.concatenate(drawn, 1)), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
