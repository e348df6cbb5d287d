"""[steps 1 and 4] The replay memory, rule by rule, with numbers that say which transition they are."""

import numpy as np
import pytest
import torch

from t3d.nstep import NStep
from t3d.replay import Replay, Transitions


def put(memory, ids, valid=None, terminated=0.0, span=1.0):
    """Add the transitions `ids` (S, N): observation (id, −id), action id / 10, reward 100 · id, next id + 0.5."""
    ids = torch.as_tensor(ids, dtype=torch.float32)
    pair = torch.stack([ids, -ids], -1)
    new = Transitions(
        obs=pair,
        action=ids[..., None] / 10,
        reward=100 * ids,
        next_obs=pair + 0.5,
        terminated=torch.full(ids.shape, terminated),
        span=torch.full(ids.shape, span),
        valid=np.ones(ids.shape, bool) if valid is None else np.array(valid),
    )
    memory.add(new)


def everything(memory, **options):
    """What is stored, row by row: bits that hit each row in turn."""
    length = int(memory.length.max())
    rows = torch.arange(length).expand(len(memory.length), -1)
    return memory.sample(-(-(rows << 32) // memory.length[:, None]), gamma=0.9, **options)


def test_every_field_comes_back():
    memory = Replay(1, 10, 2, 1)
    put(memory, [[3]], terminated=1.0)
    batch = everything(memory)
    assert batch.obs.tolist() == [[[3, -3]]]
    torch.testing.assert_close(batch.action, torch.tensor([[[0.3]]]))
    assert batch.reward.tolist() == [[300]]
    assert batch.next_obs.tolist() == [[[3.5, -2.5]]]
    assert batch.terminated.tolist() == [[1]]
    torch.testing.assert_close(batch.discount, torch.tensor([[0.9]]))


def test_a_row_of_three_steps_is_discounted_three_times():
    memory = Replay(1, 10, 2, 1)
    put(memory, [[1]], span=3.0)
    torch.testing.assert_close(everything(memory).discount, torch.tensor([[0.9**3]]))


def test_the_oldest_is_overwritten():
    memory = Replay(1, 3, 2, 1)
    for i in range(1, 6):
        put(memory, [[i]])
    assert memory.length.tolist() == [3] and memory.stored.tolist() == [5]
    assert sorted(everything(memory).reward[0].tolist()) == [300, 400, 500]


def test_rows_that_are_no_transition_are_not_stored():
    memory = Replay(2, 4, 2, 1)
    put(memory, [[1, 2, 3], [4, 5, 6]], valid=[[True, False, True], [False, False, True]])
    assert memory.length.tolist() == [2, 1]
    batch = memory.sample(torch.tensor([[0, 2**32 - 1], [0, 2**32 - 1]]), gamma=0.9)
    assert batch.reward.tolist() == [[100, 300], [600, 600]]


def test_seeds_have_their_own_rings():
    memory = Replay(2, 3, 2, 1)
    for i in range(1, 6):
        put(memory, [[i], [10 + i]], valid=[[True], [i % 2 == 0]])
    assert memory.length.tolist() == [3, 2]
    low, high = memory.sample(torch.tensor([[0, 0], [0, 2**32 - 1]]), gamma=1.0).reward.tolist()
    assert low == [400, 400] and high == [1200, 1400]


def test_one_seed_shares_its_rows_with_the_whole():
    memory = Replay(2, 5, 2, 1)
    put(memory.seed(1), [[7]])
    assert memory.length.tolist() == [0, 1] and memory.rows[1, 0, 0] == 7


def test_sampling_is_even():
    memory = Replay(1, 10, 2, 1)
    put(memory, [list(range(10))])
    bits = torch.arange(0, 2**32, 2**32 // 10_000)[None]
    counts = torch.bincount((memory.sample(bits, 1.0).reward[0] / 100).round().long())
    assert counts.min() >= 999 and counts.max() <= 1001


# ------------------------------------------------------------------------------------- n-step returns


def steps_through(nstep, script):
    """Transitions out for a script of (time, ended) on one environment: (time, span, reward, next, terminated)."""
    out, now = [], 0.0
    for time, end in script:
        lost = end == "lost"
        before, now = now, time + 0.5
        new = Transitions(
            obs=np.full((1, 1, 1), before if lost else time),  # which a lost step leaves as it was
            action=np.full((1, 1, 1), time / 10),
            reward=np.full((1, 1), 10.0**time),
            next_obs=np.full((1, 1, 1), time + 0.5),
            terminated=np.array([[end == "terminated"]]),
            span=np.ones((1, 1)),
            valid=np.array([[not lost and end != "reset"]]),
        )
        rows = nstep.add(new, truncated=np.array([[end in ("truncated", "lost")]]))
        for i in np.flatnonzero(rows.valid[0]):
            assert rows.action[0, i, 0] == pytest.approx(rows.obs[0, i, 0] / 10)
            numbers = (rows.obs[0, i, 0], rows.span[0, i], rows.reward[0, i], rows.next_obs[0, i, 0])
            out.append((*map(float, numbers), bool(rows.terminated[0, i])))
    return out


def test_one_step_is_the_step_itself():
    rows = steps_through(NStep(1, 0.5, (1, 1), 1, 1), [(0, ""), (1, "terminated"), (2, "truncated")])
    assert rows == [(0, 1, 1, 0.5, False), (1, 1, 10, 1.5, True), (2, 1, 100, 2.5, False)]


def test_three_steps_and_a_termination():
    rows = steps_through(NStep(3, 0.5, (1, 1), 1, 1), [(0, ""), (1, ""), (2, ""), (3, "terminated")])
    assert rows == [
        (0, 3, 1 + 5 + 25, 2.5, False),
        (1, 3, 10 + 50 + 250, 3.5, True),
        (2, 2, 100 + 500, 3.5, True),
        (3, 1, 1000, 3.5, True),
    ]


def test_an_episode_shorter_than_n_and_the_next_one_apart():
    rows = steps_through(NStep(3, 0.5, (1, 1), 1, 1), [(0, ""), (1, "truncated"), (2, ""), (3, ""), (4, "")])
    assert rows == [(0, 2, 6, 1.5, False), (1, 1, 10, 1.5, False), (2, 3, 100 + 500 + 2500, 4.5, False)]


def test_reset_steps_are_no_transitions():
    rows = steps_through(NStep(2, 0.5, (1, 1), 1, 1), [(0, "terminated"), (9, "reset"), (1, ""), (2, "terminated")])
    assert rows == [(0, 1, 1, 0.5, True), (1, 2, 10 + 50, 2.5, True), (2, 1, 100, 2.5, True)]


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ([0, 1, 2], [(0, 3, 31, 2.5, False), (1, 2, 10 + 50, 2.5, False), (2, 1, 100, 2.5, False)]),
        ([0], [(0, 1, 1, 0.5, False)]),
        ([], []),
    ],
)
def test_a_lost_step_ends_what_was_under_way_before_it(before, expected):
    script = [(time, "") for time in before] + [(8, "lost"), (4, "terminated")]
    assert steps_through(NStep(3, 0.5, (1, 1), 1, 1), script) == [*expected, (4, 1, 10_000, 4.5, True)]


def test_environments_are_apart():
    nstep = NStep(2, 1.0, (2, 2), 1, 1)
    ids = np.arange(4.0).reshape(2, 2)
    no, yes = np.zeros((2, 2), bool), np.ones((2, 2), bool)

    def step(obs, truncated):
        return nstep.add(Transitions(obs[..., None], ids[..., None], ids, ids[..., None], no, 1, yes), truncated)

    first = step(ids, ids == 1)
    assert first.valid.tolist() == [[False, False, False, True], [False, False, False, False]]
    second = step(ids + 10, no)
    assert second.valid[:, :2].tolist() == [[True, False], [True, True]]  # the full rows come first
    assert second.obs[second.valid][:, 0].tolist() == [0, 2, 3] and second.reward[second.valid].tolist() == [0, 4, 6]


# ------------------------------------------------------------------------------------------------ normalisation


def test_observations_are_normalised_by_each_seeds_own_mean_and_deviation():
    source = np.random.default_rng(0)
    obs = source.normal(size=(2, 60, 3)) * [1, 100, 1e-3] + np.array([[[5, -1e4, 0]], [[0, 7, 3]]])
    valid = source.random((2, 60)) < 0.7
    memory = Replay(2, 40, 3, 1, dtype=torch.float64, normalize=True)
    for t in range(0, 60, 3):  # three at a time; the ring forgets, the statistics do not
        part = slice(t, t + 3)
        zeros, now = np.zeros((2, 3)), obs[:, part]
        memory.add(Transitions(now, zeros[..., None], zeros, now + 1, zeros, zeros + 1, valid[:, part]))
    for k in range(2):
        counted = obs[k][valid[k]]
        assert memory.statistics.count[k] == len(counted)
        np.testing.assert_allclose(memory.statistics.mean[k], counted.mean(0), rtol=1e-12)
        np.testing.assert_allclose(memory.statistics.squares[k] / len(counted), counted.var(0), rtol=1e-9)
    batch = everything(memory.seed(1))
    raw, counted = memory.rows[1, : memory.length[1], :3].numpy(), obs[1][valid[1]]
    deviation = np.sqrt(counted.var(0) + 1e-8)
    np.testing.assert_allclose(batch.obs[0], (raw - counted.mean(0)) / deviation, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(batch.next_obs[0][:, 2], 10)  # 1 is far away where the deviation is a thousandth


def test_nothing_is_normalised_by_a_single_observation():
    memory = Replay(1, 10, 2, 1, normalize=True)
    put(memory, [[3]])
    assert everything(memory).obs.tolist() == [[[3, -3]]]


def test_rewards_are_scaled_when_they_are_read():
    memory = Replay(1, 10, 2, 1)
    put(memory, [[3]])
    assert everything(memory, reward_scale=0.01).reward.tolist() == [[3]] and memory.rows[0, 0, -3] == 300
