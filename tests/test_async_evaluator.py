"""Evaluations in a process of their own: the same numbers as in turns, whatever happens to that process."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from counter import Counter
from killed import KNOBS, rows_of

import t3d
from t3d.config import Config, resolve
from t3d.display import Display
from t3d.envs import env_factory
from t3d.evaluate.async_evaluator import AsyncEvaluator, resolve_async_eval
from t3d.evaluate.evaluator import Evaluation, Evaluator, PolicySnapshot
from t3d.networks import MLP

SMALL = {**KNOBS, "steps": 300, "eval_every": 100, "seeds": (3, 8), "eval_episodes": 2, "progress": False}
GONE = r"the evaluation subprocess is not available \({}.*\): evaluations pause training from now on."


def evaluations(run):
    return [row for row in rows_of(run.path) if row["kind"] == "evaluation"]


def policies(run):
    """Weights and cards of all policies; a card names its run, which is another one here."""
    found = [run.policy(seed, which) for seed in run.seeds for which in ("best", "last")]
    weights = [{name: tensor.tolist() for name, tensor in policy.parameters.items()} for policy in found]
    return weights, [replace(policy.card, run="") for policy in found]


def test_the_same_evaluations_and_policies_as_in_turns(tmp_path):
    # With this gamma the time limit does not hide what is to be compared with the critics' values.
    settings = {**SMALL, "normalize_obs": "on", "eval_values": "on", "gamma": 0.9}
    runs = [t3d.train("Pendulum-v1", out=tmp_path / word, async_eval=word, **settings) for word in ("on", "off")]
    assert evaluations(runs[0]) == evaluations(runs[1]) and len(evaluations(runs[0])) == 8
    assert all(row["q_predicted"] is not None and row["discounted_return"] < 0 for row in evaluations(runs[0]))
    assert policies(runs[0]) == policies(runs[1])
    assert [run.config["async_eval"] for run in runs] == ["on", "off"]
    assert runs[0].policy(3, "last").card.step == 300


class Locked(Counter):
    """An environment that can be sent as long as it is not made."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def test_where_evaluations_are_played():
    devices = [Config(device="cuda", async_eval=word).eval_device for word in ("on", "off", "auto")]
    assert devices == ["cpu", "cuda", "cuda"]


def test_rows_keep_their_order(tmp_path):
    """An evaluation is taken in when the next one is due, and the last two at the end."""
    run = t3d.train(Locked, out=tmp_path / "run", async_eval="on", log_every=50, **SMALL)
    told = [(row["kind"], row["step"]) for row in run.metrics if row["seed"] == 3 and row["kind"] != "episode"]
    assert told == [
        *(("training", 50), ("training", 100), ("evaluation", 0), ("training", 150), ("training", 200)),
        *(("evaluation", 100), ("training", 250), ("training", 300), ("evaluation", 200), ("evaluation", 300)),
    ]


@pytest.fixture
def asked():
    """Opens an evaluator beside this process for two seeds, with actors for it."""
    opened = []

    def open_one(env, obs_dim=2):
        config = resolve(Config(**{**KNOBS, "steps": 100, "eval_episodes": 3}), "td3", "x", 2)
        opened.append(AsyncEvaluator(env_factory(env), [3, 8], config, MLP))
        return opened[-1], PolicySnapshot(MLP, MLP.init_actor(torch.tensor([3, 8]), obs_dim, 1, (8,), torch.float32))

    yield open_one
    for evaluator in opened:
        evaluator.close()


def in_turns(env, snapshot):
    with closing(Evaluator(env_factory(env), [3, 8], Config(eval_episodes=3))) as evaluator:
        return evaluator.run(snapshot)


def never():
    return False


def test_a_process_that_is_killed_is_done_without(asked):
    evaluator, snapshot = asked(Counter)
    expected = in_turns(Counter, snapshot)
    evaluator.submit(snapshot)
    assert (evaluator.result(snapshot, never).returns == expected.returns).all()
    evaluator._process.kill()
    evaluator._process.wait()
    with pytest.warns(UserWarning, match=GONE.format("it ended with exit code -9")):
        evaluator.submit(snapshot)
    for _ in range(2):
        evaluation = evaluator.result(snapshot, never)
        assert (evaluation.returns == expected.returns).all() and (evaluation.lengths == 10).all()
        evaluator.submit(snapshot)


def test_who_is_told_to_stop_does_not_begin_to_play_instead(asked):
    evaluator, snapshot = asked(Counter)
    evaluator._process.kill()
    with pytest.warns(UserWarning, match=GONE.format("it ended with exit code -9")):
        assert evaluator.result(snapshot, lambda: True) is None
    assert evaluator._fallback is None


def test_an_environment_that_cannot_be_sent(asked):
    lock = threading.Lock()

    def locked():
        with lock:
            return Counter()

    with pytest.warns(UserWarning, match=GONE.format("TypeError: cannot pickle")):
        evaluator, snapshot = asked(locked)
    evaluator.submit(snapshot)
    assert (evaluator.result(snapshot, never).returns == in_turns(Counter, snapshot).returns).all()


class Poisoned(Counter):
    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, float("nan") if self.time == 4 else reward, *rest


def test_what_goes_wrong_there_is_said_here(asked):
    evaluator, snapshot = asked(Poisoned)
    evaluator.submit(snapshot)
    with (
        pytest.warns(UserWarning, match=GONE.format("EnvError: Poisoned.*the reward is nan")),
        pytest.raises(t3d.T3DError, match="the reward is nan"),
    ):
        evaluator.result(snapshot, never)


class Slow(Counter):
    def __init__(self, seconds=0.02):
        super().__init__()
        self.seconds = seconds

    def step(self, action):
        time.sleep(self.seconds)
        return super().step(action)


def test_it_can_be_told_to_stop_and_looked_at(asked):
    evaluator, snapshot = asked(Slow)
    evaluator.submit(snapshot)
    assert evaluator.poll() is None and evaluator.result(snapshot, lambda: True) is None
    evaluation = evaluator.result(snapshot, never)
    assert evaluator.poll() is evaluation and (evaluation.lengths == 10).all()
    evaluator.submit(snapshot)
    assert evaluator.poll() is None  # not the one before


def test_what_is_there_early_is_shown_once(capsys):
    display = Display(100, [3])
    for _ in range(2):
        display.evaluated(50, in_one_episode(7.0))
    display.evaluated(100, in_one_episode(8.0))
    shown = capsys.readouterr().out.splitlines()
    assert [line.split("return")[1].split()[0] for line in shown] == ["7.0", "8.0"]


def in_one_episode(score):
    return Evaluation(np.array([[score]]), np.array([[1]]))


ORPHAN = """
import sys, time
sys.path[:0] = [{tests!r}]
import torch
from test_async_evaluator import KNOBS, MLP, AsyncEvaluator, Config, PolicySnapshot, Slow, env_factory, resolve
config = resolve(Config(**{{**KNOBS, "steps": 100, "eval_episodes": 3}}), "td3", "x", 1)
evaluator = AsyncEvaluator(env_factory(Slow, {{"seconds": 0.5}}), [3], config, MLP)
evaluator.submit(PolicySnapshot(MLP, MLP.init_actor(torch.tensor([3]), 2, 1, (8,), torch.float32)))
print(evaluator._process.pid, flush=True)
evaluator.result(None, lambda: False)
"""


def test_nobody_is_left_behind_when_the_run_is_killed():
    script = ORPHAN.format(tests=str(Path(__file__).parent))
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    time.sleep(3.0)  # in the middle of its episodes, which take 15 seconds, or still on the way to them
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 7
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = alive(child)
    if left:
        os.kill(child, signal.SIGKILL)
    assert not left


def alive(pid):
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("change", "decision"),
    [
        ({}, "on"),
        ({"device": "cpu"}, "off"),
        ({"envs": 13}, "off"),  # of 16 cores
        ({"envs": 12}, "on"),
        ({"hidden": 1024}, "off"),
        ({"sight": object()}, "off"),
        ({"vector": object()}, "off"),
        ({"from_python": True}, "off"),
        ({"async_eval": "on", "device": "cpu", "envs": 99}, "on"),
        ({"async_eval": "off"}, "off"),
    ],
)
def test_where_it_is_left_open(change, decision, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)
    config = Config(device=change.get("device", "cuda"), async_eval=change.get("async_eval", "auto"))
    source = SimpleNamespace(vector=change.get("vector"), from_python=change.get("from_python", False), real=False)
    envs = SimpleNamespace(count=change.get("envs", 10), frame_stack=change.get("sight"))
    width = change.get("hidden", 256)
    actor = {"w1": torch.empty(10, 17, width, device="meta"), "w2": torch.empty(10, width, width, device="meta")}
    assert resolve_async_eval(config, source, actor, envs).async_eval == decision
