"""[steps 1 and 4] The replay memory, rule by rule, with numbers that say which transition they are."""

import torch

from t3d.replay import Replay


def put(memory, ids, valid=None, terminated=0.0, span=1.0):
    """Add the transitions `ids` (S, N): observation (id, −id), action id / 10, reward 100 · id, next id + 0.5."""
    ids = torch.as_tensor(ids, dtype=torch.float32)
    pair = torch.stack([ids, -ids], -1)
    memory.add(
        obs=pair,
        action=ids[..., None] / 10,
        reward=100 * ids,
        next_obs=pair + 0.5,
        terminated=torch.full(ids.shape, terminated),
        span=torch.full(ids.shape, span),
        valid=torch.ones(ids.shape, dtype=torch.bool) if valid is None else torch.as_tensor(valid),
    )


def everything(memory):
    """What is stored, row by row: bits that hit each row in turn."""
    length = int(memory.length.max())
    rows = torch.arange(length).expand(len(memory.length), -1)
    return memory.sample(-(-(rows << 32) // memory.length[:, None]), gamma=0.9)


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
    assert memory.length.tolist() == [3] and memory.head.tolist() == [2]
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
