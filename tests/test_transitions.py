"""No transition is invented, lost or doubled, whatever the environments, the workers, the resets and n.

python tests/test_transitions.py [TRANSITIONS]      the same on 100,000 transitions of each kind
"""

import sys
from collections import defaultdict
from itertools import product

import numpy as np
import pytest
import torch
from counter import Ids, fate
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from t3d.envs import env_factory
from t3d.nstep import NStep
from t3d.replay import Replay, Transitions

GAMMA = 0.75
KINDS = ("in process", "workers", "mortal workers", "next step", "same step", "disabled")
COUNTS, STEPS = (1, 3, 16), (1, 3, 5)


def episode_seed(env, episode):
    return 100_000 * env + episode


def open_kind(kind, count):
    if kind == "in process":
        return env_factory(Ids).batch(count, episode_seed)
    if "workers" in kind:
        return env_factory(Ids, {"mortal": kind == "mortal workers"}).batch(count, episode_seed, min(count, 4))
    mode = {"next step": AutoresetMode.NEXT_STEP, "same step": AutoresetMode.SAME_STEP}.get(
        kind, AutoresetMode.DISABLED
    )
    vector = SyncVectorEnv([Ids] * count, autoreset_mode=mode)
    return env_factory(vector).training_batch(count, episode_seed)


def play(kind, count, n, transitions):
    """The memory after so many transitions went through, and how many processes were lost."""
    envs = open_kind(kind, count)
    memory = Replay(1, transitions + count * n, 3, 1, dtype=torch.float64)
    nstep = NStep(n, GAMMA, (1, count), 3, 1)
    obs, seen = envs.reset()[None], 0
    action = np.zeros((1, count, 1), np.float32)
    while seen < transitions:
        moved = envs.step(action[0])
        parts = (moved.reward, moved.final_obs, moved.terminated, np.ones(count), moved.valid)
        new = Transitions(obs, action, *(part[None] for part in parts))
        memory.add(nstep.add(new, moved.truncated[None]))
        obs, seen = moved.obs[None], seen + int(moved.valid.sum())
    envs.close()
    stored = int(memory.length)
    bits = -(-(torch.arange(stored) << 32) // stored)
    return memory.sample(bits[None], GAMMA), envs.lost


def told(obs):
    """Episode and time from observations."""
    return obs[:, 0] * 2**20 + obs[:, 1], obs[:, 2]


def check(kind, count, n, transitions):
    """Every row by its own numbers, and every episode from its first step to its last without a gap."""
    batch, lost = play(kind, count, n, transitions)
    (uid, time), (next_uid, next_time) = (told(obs[0].numpy()) for obs in (batch.obs, batch.next_obs))
    assert (uid == next_uid).all(), "a row reaches into another episode"
    span = next_time - time
    assert (span >= 1).all() and (span <= n).all()
    np.testing.assert_allclose(batch.discount[0].numpy(), GAMMA**span, rtol=1e-12)
    total = sum(np.where(span > i, GAMMA**i * 2.0 ** -(time + 1 + i), 0.0) for i in range(n))
    np.testing.assert_allclose(batch.reward[0].numpy(), total, rtol=1e-12)

    fates = {episode: fate(episode) for episode in np.unique(uid)}
    length, terminates, _ = (np.array([fates[episode][i] for episode in uid]) for i in range(3))
    assert (batch.terminated[0].numpy() == ((next_time == length) & terminates)).all()
    died = {episode for episode, (_, _, death) in fates.items() if death} if kind == "mortal workers" else set()
    full = (span == n) | (next_time == length)
    episodes = defaultdict(list)
    for episode, start, whole in zip(uid, time, full, strict=True):
        episodes[episode].append(int(start))
        assert whole or died, "a row is shorter than n in the middle of an episode"
    unfinished = 0
    for episode, starts in episodes.items():
        assert starts and sorted(starts) == list(range(len(starts))), "a transition is missing or doubled"
        unfinished += len(starts) < fates[episode][0] and episode not in died
    # The last episode of each environment may be under way; those that share a lost process end with it.
    assert unfinished <= count * (1 + lost)
    assert bool(lost) == bool(died) or kind != "mortal workers"
    return len(uid), lost


@pytest.mark.parametrize(("kind", "count", "n"), list(product(KINDS, COUNTS, STEPS)))
def test_transitions(kind, count, n):
    check(kind, count, n, 600 if kind == "mortal workers" else 2200)


if __name__ == "__main__":
    wanted = int(float(sys.argv[1])) if len(sys.argv) > 1 else 100_000
    for kind, count, n in product(KINDS, COUNTS, STEPS):
        some = 5_000 if kind == "mortal workers" else wanted
        rows, lost = check(kind, count, n, some)
        print(f"{kind:<15} environments {count:>2}   n {n}   {rows:>7,} rows right   {lost} processes lost", flush=True)
