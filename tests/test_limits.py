"""What there is of a machine, told before a run needs more of it. A disk that fills up: tests/test_resume.py."""

import subprocess
import sys

import pytest
from killed import KNOBS

import t3d
from t3d import limits


def test_cores_that_others_use_are_seen():
    if limits.busy_cores() is None:
        pytest.skip("this system does not say what its cores do")
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert limits.busy_cores(1.0) > 0.4
    finally:
        busy.kill()
        busy.wait()


@pytest.mark.parametrize(
    "busy, threads, said", [(0.2, 2, None), (1.1, 2, "--threads 1"), (1.1, 1, None), (None, 2, None)]
)
def test_threads_that_would_wait_for_each_other(busy, threads, said, monkeypatch):
    monkeypatch.setattr(limits, "busy_cores", lambda: busy)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    sentence = limits.short_of_cores(threads)
    assert sentence is None if said is None else said in sentence and "1.1 of 2 cores" in sentence


def test_a_run_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("t3d.api.short_of_cores", lambda threads: f"{threads} threads on busy cores.")
    t3d.train("Pendulum-v1", 30, out=tmp_path / "run", **{**KNOBS, "threads": 2})
    assert "2 threads on busy cores." in capsys.readouterr().out


def test_what_does_not_fit_is_refused_before_it_begins(tmp_path, monkeypatch):
    monkeypatch.setattr("t3d.limits.free_memory", lambda device: 10**6)
    with pytest.raises(t3d.T3DError, match=r"needs 3.35 GiB, but 0.00 GiB are free .*: --buffer-size \d+ fits"):
        t3d.train("Pendulum-v1", 100_000_000, out=tmp_path / "run", buffer_size=90_000_000, **KNOBS)
    assert not (tmp_path / "run").exists()
