"""What is kept of episodes under way, against a list for each of them."""

import numpy as np

from t3d.episode_log import EpisodeLog


def episodes(steps, seeds, envs, chance_to_end, chance_to_stand):
    """Random episodes in a log and in lists; some end, some steps are none."""
    rng = np.random.default_rng(0)
    lists = {place: [] for place in np.ndindex(seeds, envs)}
    lengths = np.zeros((seeds, envs), np.int64)
    log = EpisodeLog(lengths, 2)
    for _ in range(steps):
        new, valid = rng.random((seeds, envs, 2), np.float32), rng.random((seeds, envs)) >= chance_to_stand
        lengths += valid
        log.add([(new, valid)])
        for place, steps_of_one in lists.items():
            if valid[place]:
                steps_of_one.append(new[place])
        yield log, lists, lengths
        ended = rng.random((seeds, envs)) < chance_to_end
        log.forget(ended)
        lengths[ended] = 0
        for place in map(tuple, np.argwhere(ended)):
            lists[place].clear()


def test_an_episode_is_what_its_environment_has_behind():
    for chance_to_end, chance_to_stand in ((0.01, 0.1), (0.0, 0.0), (0.3, 0.5)):
        for log, lists, _ in episodes(700, 2, 3, chance_to_end, chance_to_stand):
            for (k, i), expected in lists.items():
                assert log.episode(k, i).tolist() == np.reshape(expected, (-1, 2)).tolist()


def test_before_an_episode_there_is_nothing():
    for log, lists, lengths in episodes(400, 2, 3, 0.02, 0.1):
        steps = log.saved_parts()["steps"]
        assert len(steps) == lengths.max()
        for (k, i), expected in lists.items():
            assert not steps[: lengths.max() - len(expected), k, i].any()


def test_it_is_no_longer_than_it_needs_to_be():
    *_, (log, _, _) = episodes(5_000, 1, 2, 0.1, 0.0)
    assert len(log._kept) < 500


def test_a_copy_goes_on_like_the_first():
    """As after a checkpoint: only what the longest episode needs was kept."""
    whole, _, lengths = next(episodes(1, 2, 3, 0.0, 0.0))
    rng, copy = np.random.default_rng(1), EpisodeLog(lengths, 2)

    def load_copy():
        saved = whole.saved_parts()["steps"]
        copy.resize(len(saved))
        copy.saved_parts()["steps"][:] = saved

    load_copy()
    for _ in range(600):
        new, valid, ended = rng.random((2, 3, 2), np.float32), rng.random((2, 3)) > 0.1, rng.random((2, 3)) < 0.01
        lengths += valid
        for log in (whole, copy):
            log.add([(new, valid)])
            log.forget(ended)
        lengths[ended] = 0
        assert len(whole.saved_parts()["steps"]) == lengths.max()
        assert (whole.saved_parts()["steps"] == copy.saved_parts()["steps"]).all()
        if rng.random() < 0.1:
            load_copy()


def test_steps_logged_together_are_those_logged_one_by_one():
    """As the collector logs actions: several steps at once, their lengths counted before."""
    rng, lengths = np.random.default_rng(2), np.zeros((2, 3), np.int64)
    one_by_one, together, waiting = EpisodeLog(lengths, 2), EpisodeLog(lengths, 2), []
    for _ in range(600):
        new, valid, ended = rng.random((2, 3, 2), np.float32), rng.random((2, 3)) > 0.1, rng.random((2, 3)) < 0.01
        lengths += valid
        one_by_one.add([(new, valid)])
        waiting.append((new, valid))
        if ended.any() or len(waiting) == 64:
            together.add(waiting)
            waiting.clear()
            for k, i in np.ndindex(2, 3):
                assert (one_by_one.episode(k, i) == together.episode(k, i)).all()
            one_by_one.forget(ended)
            together.forget(ended)
            lengths[ended] = 0
