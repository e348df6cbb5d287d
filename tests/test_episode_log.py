"""What is kept of episodes under way, against a list for each of them."""

import numpy as np

from t3d.episode_log import EpisodeLog


def episodes(steps, seeds, envs, chance_to_end, chance_to_stand):
    """Random episodes on a tape and in lists; some end, some steps are none."""
    rng = np.random.default_rng(0)
    tape = EpisodeLog(seeds, envs, 2)
    lists = {place: [] for place in np.ndindex(seeds, envs)}
    lengths = np.zeros((seeds, envs), np.int64)
    for _ in range(steps):
        new, valid = rng.random((seeds, envs, 2), np.float32), rng.random((seeds, envs)) >= chance_to_stand
        lengths += valid
        tape.add(new, valid, lengths)
        for place, steps_of_one in lists.items():
            if valid[place]:
                steps_of_one.append(new[place])
        yield tape, lists, lengths
        ended = rng.random((seeds, envs)) < chance_to_end
        tape.forget(ended)
        lengths[ended] = 0
        for place in map(tuple, np.argwhere(ended)):
            lists[place].clear()


def test_an_episode_is_what_its_environment_has_behind():
    for chance_to_end, chance_to_stand in ((0.01, 0.1), (0.0, 0.0), (0.3, 0.5)):
        for tape, lists, lengths in episodes(700, 2, 3, chance_to_end, chance_to_stand):
            for (k, i), expected in lists.items():
                assert tape.last(lengths[k, i])[:, k, i].tolist() == np.reshape(expected, (-1, 2)).tolist()


def test_before_an_episode_there_is_nothing():
    for tape, lists, lengths in episodes(400, 2, 3, 0.02, 0.1):
        for (k, i), expected in lists.items():
            assert not tape.last(lengths.max())[: lengths.max() - len(expected), k, i].any()


def test_it_is_no_longer_than_it_needs_to_be():
    *_, (tape, _, _) = episodes(5_000, 1, 2, 0.1, 0.0)
    assert len(tape._kept) < 500


def test_a_copy_goes_on_like_the_first():
    """As after a checkpoint: only what the longest episode needs was kept."""
    whole = next(episodes(1, 2, 3, 0.0, 0.0))[0]
    rng, lengths = np.random.default_rng(1), np.ones((2, 3), np.int64)
    copy = EpisodeLog(2, 3, 2)
    copy.rewind(1)
    copy.last(1)[:] = whole.last(1)
    for _ in range(600):
        new, valid, ended = rng.random((2, 3, 2), np.float32), rng.random((2, 3)) > 0.1, rng.random((2, 3)) < 0.01
        lengths += valid
        for tape in (whole, copy):
            tape.add(new, valid, lengths)
            tape.forget(ended)
        lengths[ended] = 0
        longest = lengths.max()
        assert (whole.last(longest) == copy.last(longest)).all()
        if rng.random() < 0.1:
            copy.rewind(longest)
            copy.last(longest)[:] = whole.last(longest)
