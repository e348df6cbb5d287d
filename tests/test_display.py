"""What a run shows: a live table in a terminal, lines elsewhere, nothing if asked."""

import io

import numpy as np
import pytest
from rich.console import Console

import t3d
from t3d.display import Display, _clock
from t3d.evaluate.evaluator import Evaluation

EVALUATION = Evaluation(np.array([[10.0, 20.0], [1.0, 3.0]]), np.array([[5, 5], [5, 5]]))
ROWS = [
    {"seed": 4, "critic_loss": 0.5, "actor_loss": -2.25, "q_mean": 7.125},
    {"seed": 9, "critic_loss": 1.5, "actor_loss": None, "q_mean": None},
]


def shown(terminal):
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=160, color_system=None, highlight=False)
    with Display(2000, [4, 9], console=console) as display:
        display.say("hello")
        display.evaluated(0, EVALUATION)
        display._rate = 100.0
        display.advance(500)
        display.training(ROWS)
        display.evaluated(500, EVALUATION)
    return text.getvalue()


def test_plain_lines():
    lines = shown(terminal=False).splitlines()
    assert lines[0] == "hello" and len(lines) == 3
    assert lines[2].startswith("step       500 of 2,000   ")
    for part in ("8.5  (15.0, 2.0)", "critic loss 1", "mean Q 7.12", "100 steps/s", "15s left"):
        assert part in lines[2], part


def test_a_live_table():
    text = shown(terminal=True)
    for part in ("return at 500", "15.0 ± 5.0", "2.0 ± 1.0", "7.12", "mean", "8.5", "step 500 of 2,000"):
        assert part in text, part


def test_a_run_that_is_taken_up_shows_what_was_before_and_its_own_pace():
    rows = [
        {"step": step, "seed": 4, "returns": [best], "lengths": [5], "mean": best}
        for step, best in ((0, 9.0), (500, 3.0))
    ]
    text, clock = io.StringIO(), [100.0]
    console = Console(file=text, force_terminal=False, width=160, highlight=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("t3d.display.time.perf_counter", lambda: clock[0])
        display = Display(2000, [4], console=console)
        display.begin_at(600, rows)
        assert display._evaluation[0] == 500 and display._best == {4: 9.0}
        clock[0] += 5
        display.advance(700)
    assert display._pace() == "20 steps/s   1m 05s left"


def test_resume_tells_it_where_it_is(tmp_path, monkeypatch):
    settings = {
        "hidden": (8, 8),
        "batch_size": 8,
        "eval_episodes": 1,
        "eval_every": 100,
        "device": "cpu",
        "progress": False,
    }
    run = t3d.train("Pendulum-v1", 150, out=tmp_path / "run", **settings)
    told = []
    monkeypatch.setattr(
        Display, "begin_at", lambda self, step, rows: told.append((step, [row["step"] for row in rows]))
    )
    t3d.resume(run, steps=200, progress=False)
    assert told == [(150, [0, 100, 150])]


def test_the_time_left_is_told_when_it_is_known():
    clock = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("t3d.display.time.perf_counter", lambda: clock[0])
        display = Display(10_000, [4], random_steps=1_000, quiet=True)
        for seconds, step, told in ((3, 900, "300 steps/s"), (4, 1_024, ""), (8, 1_144, "30 steps/s   4m 55s left")):
            clock[0] = float(seconds)
            display.advance(step)
            assert display._pace() == told


def test_clock():
    assert [_clock(s) for s in (7, 61, 3600 + 65)] == ["7s", "1m 01s", "1h 01m"]
