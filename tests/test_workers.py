"""Worker processes that are killed or hang: the run goes on, nothing false is stored, losses are counted exactly.

python tests/test_workers.py        50 kills and 10 hangs in one run
"""

import os
import signal
import tempfile
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from counter import Counter

import t3d
from t3d import T3DError, trainer
from t3d.collector import Collector
from t3d.envs import env_factory


@pytest.fixture
def workers():
    """Opens a batch of workers and closes it after the test."""
    opened = []

    def open_batch(count=3, workers=3, worker_timeout=20.0, **args):
        source = env_factory(Counter, args)
        opened.append(source.batch(count, lambda env, episode: 100 * env + episode, workers, worker_timeout))
        return opened[-1]

    yield open_batch
    for batch in opened:
        batch.close()


def act(*actions):
    return np.array(actions)[:, None]


def test_workers_do_what_one_process_does(workers):
    far, near = workers(count=5, workers=2), env_factory(Counter).batch(5, lambda env, episode: 100 * env + episode)
    assert (far.reset() == near.reset()).all()
    for _ in range(25):
        ours, theirs = far.step(np.zeros((5, 1))), near.step(np.zeros((5, 1)))
        for name, a, b in zip(ours._fields, ours, theirs, strict=True):
            assert (a == b).all(), name
    assert far.lost == 0


@pytest.mark.parametrize("trouble", ["dies", "hangs"])
def test_a_lost_worker_is_replaced_and_its_episode_ends(workers, trouble):
    batch = workers(trouble=trouble, worker_timeout=1.0)
    batch.reset()
    batch.step(act(0, 0, 0))
    moved = batch.step(act(0, 1, 0))
    assert moved.valid.tolist() == [True, False, True] and moved.truncated.tolist() == [False, True, False]
    assert not moved.terminated.any() and moved.reward.tolist() == [2, 0, 2]
    # A fresh seed, its first observation, and the others as if nothing had happened.
    assert moved.obs.tolist() == [[0, 2], [101, 0], [200, 2]] and moved.final_obs[1].tolist() == [100, 1]
    moved = batch.step(act(0, 0, 0))
    assert moved.valid.all() and moved.obs[:, 1].tolist() == [3, 1, 3]
    assert batch.lost == 1


def test_all_environments_of_a_lost_worker_end(workers):
    batch = workers(count=4, workers=2, trouble="dies")
    batch.reset()
    moved = batch.step(act(1, 0, 0, 0))
    assert moved.valid.tolist() == [False, True, False, True] and batch.lost == 1
    assert moved.obs.tolist() == [[1, 0], [100, 1], [201, 0], [300, 1]]


def test_killed_between_steps(workers):
    batch = workers()
    batch.reset()
    for round in range(3):
        os.kill(batch._workers[1].process.pid, signal.SIGKILL)
        assert batch.step(act(0, 0, 0)).valid.tolist() == [True, False, True]
        assert batch.lost == round + 1
    assert batch.step(act(0, 0, 0)).valid.all()


def test_an_exception_is_named_and_not_retried(workers):
    batch = workers(trouble="raises")
    batch.reset()
    with pytest.raises(T3DError, match=r"Counter, copy 1, episode 0, step 1: step\(\) raised ZeroDivisionError"):
        batch.step(act(0, 1, 0))


def test_one_that_always_dies_is_given_up(workers):
    batch = workers(count=1, workers=1, trouble="dies in reset")
    with pytest.raises(T3DError, match="died or hung 5 times in a row"):
        batch.reset()


def test_closing_ends_the_processes(workers):
    batch = workers()
    pids = [worker.process.pid for worker in batch._workers]
    batch.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_run_survives_its_workers(tmp_path, monkeypatch):
    survive(tmp_path, monkeypatch, kills=6, hangs=2)


def survive(tmp_path, monkeypatch, kills, hangs):
    """Killed and stopped at random steps, a run trains to its end and has counted every loss."""
    source, collect = np.random.default_rng(0), Collector.collect
    moments = source.choice(np.arange(20, 980), kills + hangs, replace=False).tolist()
    when = dict(zip(moments, [True] * kills + [False] * hangs, strict=True))
    turns, done, made, make = count(), [], [], trainer.create_state

    def collect_and_kill(self, action, active=None):
        if (turn := next(turns)) in when:
            done.append(turn)
            worker = self.envs._workers[len(done) % 2]
            os.kill(worker.process.pid, signal.SIGKILL if when[turn] else signal.SIGSTOP)
        return collect(self, action, active)

    monkeypatch.setattr(trainer, "create_state", lambda setup: made.append(make(setup)) or made[-1])
    monkeypatch.setattr(Collector, "collect", collect_and_kill)
    run = t3d.train(
        Counter, steps=2000, out=tmp_path / "run", workers=2, num_envs=2, worker_timeout=1.0, random_steps=50,
        hidden=(8, 8), batch_size=8, eval_episodes=1, device="cpu", progress=False,
    )  # fmt: skip
    memory, lost = made[0].learner.memory, made[0].collector.envs.lost
    stored = int(memory.stored.sum())
    assert len(done) == lost == kills + hangs
    assert stored == 2000 - lost
    lost_rows = [row for row in run.metrics if row["kind"] == "episode" and row["lost"]]
    assert len(lost_rows) == lost and run.evaluations[-1]["step"] == 2000
    rows = memory.rows[0, :stored]
    # Every stored transition is one that the environment made: same episode, one step on.
    assert (rows[:, 0] == rows[:, 3]).all() and (rows[:, 4] == rows[:, 1] + 1).all()
    assert (rows[:, 6] == (rows[:, 4] == 10)).all() and np.isfinite(rows.numpy()).all()
    print(f"{kills} killed, {hangs} stopped, {lost} counted as lost; {stored:,} of 2,000 transitions stored")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        survive(Path(folder), patch, kills=50, hangs=10)
