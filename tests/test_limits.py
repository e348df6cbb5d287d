"""What there is of a machine, told before a run needs more of it. Memory and disk: tests/test_resume.py."""

import subprocess
import sys

import pytest

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
