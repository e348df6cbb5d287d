"""Environments that fail: in training, in evaluations, in workers, and in vector environments."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from counter import Counter, Mortal
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from killed import SMALL, end_of
from test_bad_environments import NAN, Good, after_seven

import t3d
from t3d import T3DError, rng, trainer
from t3d.cli import main
from t3d.config import Config, resolve
from t3d.envs import env_factory
from t3d.rng import Purpose
from t3d.run_state import RunSetup, create_state
from t3d.trainer import Trainer

KNOBS = {**SMALL, "steps": 200, "eval_every": 100, "batch_size": 4}


def evaluation_seed(seed, episode):
    return int(rng.integer(seed, Purpose.EVALUATION, episode))


# ------------------------------------------------------------------------------------- evaluations in workers


def mortal(folder, deaths, how="exit", **settings):
    folder.mkdir()
    args = {"folder": str(folder), "victims": (evaluation_seed(0, 0),), "deaths": deaths, "how": how}
    settings = {**KNOBS, "workers": 2, "eval_episodes": 3, "progress": True, **settings}
    return t3d.train(Mortal, out=folder / "run", env_args=args, **settings)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return mortal(tmp_path_factory.mktemp("mortal") / "0", deaths=0)


@pytest.mark.parametrize(("how", "settings"), [("exit", {}), ("sys.exit", {}), ("hang", {"worker_timeout": 1.0})])
def test_an_evaluation_survives_its_worker(how, settings, undisturbed, tmp_path, capsys):
    run = mortal(tmp_path / "run", 2, how, **settings)
    assert run.evaluations == undisturbed.evaluations
    for seed, which in ((0, "best"), (0, "last")):
        ours, theirs = t3d.load(run, seed, which), t3d.load(undisturbed, seed, which)
        assert ours.card == replace(theirs.card, run=run.identity)
        assert all(torch.equal(tensor, theirs.parameters[name]) for name, tensor in ours.parameters.items())
    said = capsys.readouterr().out
    again = sum(map(int, re.findall(r"(\d+) episodes were restarted from their seeds", said)))
    assert again == 4  # it, and the one that lives in the same process, twice


def test_an_episode_that_always_ends_its_worker_has_no_return(undisturbed, tmp_path, capsys):
    run = mortal(tmp_path / "run", 3)
    first, *rest = run.evaluations
    known = undisturbed.evaluations[0]["returns"]
    assert first["returns"] == [None, *known[1:]] and rest == undisturbed.evaluations[1:]
    assert first["mean"] == (known[1] + known[2]) / 2
    assert t3d.load(run).card.step > 0  # what was at step 0 cannot be the best
    assert "episode 0 of the evaluation of seed 0 has no return" in capsys.readouterr().out


def test_one_that_never_returns_is_never_the_best(tmp_path, capsys):
    run = mortal(tmp_path / "run", 100)
    assert [row["returns"][0] for row in run.evaluations] == [None] * 3
    with pytest.raises(T3DError, match="no best policy of seed 0 yet"):
        t3d.load(run)
    assert t3d.load(run, which="last").card.returns[0] is None


class DiesInReset(Counter):
    """From its third reset on in a process."""

    resets = 0

    def reset(self, *, seed=None, options=None):
        self.resets += 1
        if self.resets == 3:
            os._exit(1)
        return super().reset(seed=seed)


class NeverBegins(Counter):
    """Once there is a file, no process survives a reset."""

    def __init__(self, file=""):
        super().__init__()
        self.file = Path(file)

    def reset(self, *, seed=None, options=None):
        if self.file.exists():
            os._exit(1)
        return super().reset(seed=seed)


def test_a_worker_that_ends_in_reset_is_replaced(tmp_path):
    run = t3d.train(DiesInReset, out=tmp_path / "run", workers=1, **{**KNOBS, "eval_every": 0})
    assert run.metrics[-1]["step"] == 200


def test_one_that_is_given_up_has_saved_the_run(tmp_path, monkeypatch):
    file, step = tmp_path / "now", Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda self: (self.state.step == 95 and file.touch(), step(self))[1])
    args = {"env_args": {"file": str(file)}, "workers": 1, "on_env_error": "cut"}
    with pytest.raises(T3DError, match=r"died or hung 5 times in a row.*The run up to the failed step is saved"):
        t3d.train(NeverBegins, out=tmp_path / "run", **args, **{**KNOBS, "eval_every": 0})
    assert end_of(tmp_path / "run")[0] == 100  # the last step of an episode, whose reset failed
    file.unlink()
    t3d.resume(tmp_path / "run", env=NeverBegins, allow_env_args=True, progress=False)
    assert end_of(tmp_path / "run")[0] == 200


def test_evaluate_plays_in_workers_too(tmp_path):
    """Registered under an id, so that the command line can make it."""
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import gymnasium
from t3d.cli import main
args = dict(folder={str(tmp_path)!r}, victims=[{evaluation_seed(0, 4)}], deaths=100)
gymnasium.register("Mortal-v0", "counter:Mortal", kwargs=args)
main("train Mortal-v0 --steps 60 --workers 1 --hidden 8 --eval-episodes 1 --out {tmp_path}/run".split())
main("evaluate {tmp_path}/run --episodes 6".split())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 episodes have no return: their worker processes died or hung 3 times each" in done.stdout


def test_no_process_outlives_its_parent(tmp_path):
    marker = f"t3d-test-{os.getpid()}"
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import t3d; from counter import Counter
t3d.train(Counter, 10**6, out={str(tmp_path / "run")!r}, workers=2, hidden=(8,), async_eval="on", eval_every=200,
          env_args={{"trouble": "{marker}"}}, progress=False)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    began = time.monotonic()
    while len(family(process.pid)) < 5 and time.monotonic() - began < 60:  # two, one beside, and two of that
        time.sleep(0.2)
    children = family(process.pid)
    assert len(children) >= 5
    process.send_signal(signal.SIGKILL)
    process.wait()
    began = time.monotonic()
    while any(map(alive, children)) and time.monotonic() - began < 10:
        time.sleep(0.1)
    assert not [pid for pid in children if alive(pid)]


def family(pid):
    """All processes that descend from it."""
    found = []
    for child in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for number in map(int, child.read_text().split()):
                found += [number, *family(number)]
    return found


def alive(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


# ------------------------------------------------------------------------------------------- a failing step


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no")


class Unshowable:
    def __repr__(self):
        raise ValueError("no")


class Exits(Good):
    def step(self, action):
        raise SystemExit("the simulator gave up")


class Interrupts(BaseException):
    pass


def fails_in(episodes, kind):
    """Its seventh step fails in these episodes, counted over all of its copies."""

    class Fails(Good):
        made = begun = 0
        noted = ()

        def __init__(self):
            type(self).made += 1

        def reset(self, *, seed=None, options=None):
            type(self).begun += 1
            return super().reset(seed=seed)

        def step(self, action):
            obs, reward, terminated, truncated, info = super().step(action)
            if self.time == 7 and type(self).begun in episodes:
                type(self).noted += (np.array(action),)
                if isinstance(kind, BaseException):
                    raise kind
                obs = obs * NAN if kind == "obs" else obs
                reward = NAN if kind == "reward" else reward
            return obs, reward, terminated, truncated, info

    return Fails


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (ZeroDivisionError("motor 3"), r"step\(\) raised ZeroDivisionError: motor 3 \(.*test_env_errors\.py:\d+\)"),
        (SystemExit(5), r"step\(\) raised SystemExit: 5"),
        (Unprintable(), r"step\(\) raised Unprintable: its message cannot be read"),
        (Interrupts("x"), r"step\(\) raised Interrupts: x"),
        ("obs", r"observation\[0\] is nan"),
        ("reward", "the reward is nan"),
    ],
)
def test_a_failing_step_is_told_saved_and_passed(kind, what, tmp_path):
    env = fails_in([4], kind)  # two evaluations' environments, and then the second episode of training
    path = tmp_path / "run"
    with pytest.raises(T3DError) as stopped:
        t3d.train(env, out=path, num_envs=1, **KNOBS)
    said = str(stopped.value)
    assert re.search(what, said), said
    step = t3d.Run.open(path).metrics[-1]["step"]
    assert "environment 0 of seed 0, after step 16 of the run" in said and "episode 1, step 7" in said
    action = env.noted[-1]
    assert f"the last action [{action[0].item()}" in said and "observation [6.0" in said
    assert (
        "The run up to the failed step is saved" in said
        and f"t3d.resume({str(path)!r}, env=Fails, on_env_error='cut')" in said
    )
    report = (path / "errors" / "step-16-0.txt").read_text()
    assert "global step: 16" in report and "last action: [" in report and "episode: 1" in report
    if isinstance(kind, BaseException):
        assert "Traceback (most recent call last)" in report and 'test_env_errors.py", line' in report
    assert step <= 16 and end_of(path)[0] == 16
    again = t3d.resume(path, env=fails_in([], None), on_env_error="cut", progress=False)
    assert again.config["on_env_error"] == "cut" and end_of(path)[0] == 200  # kept
    assert np.isfinite(np.frombuffer(end_of(path)[2]["0"], np.float32)).all()


def test_cut_ends_the_episode_and_makes_the_environment_anew(tmp_path, monkeypatch, capsys):
    env, states_seen, create = fails_in([3, 8], ZeroDivisionError("x")), [], trainer.create_state
    monkeypatch.setattr(trainer, "create_state", lambda setup: states_seen.append(create(setup)) or states_seen[-1])
    settings = {**KNOBS, "eval_every": 0, "progress": True, "on_env_error": "cut"}
    run = t3d.train(env, out=tmp_path / "run", **settings)
    said = capsys.readouterr().out
    assert "Its episode is cut. Errors so far: 1." in said and "Its episode is cut. Errors so far: 2." in said
    assert "2 steps of environments failed, and their episodes were cut" in said
    assert env.made == 3  # one, and two anew
    memory = states_seen[0].learner.memory
    stored = memory.rows[0, : int(memory.length[0])].numpy()
    assert len(stored) == 198 and states_seen[0].collector.env_errors == 2
    obs, after, terminated = stored[:, 0], stored[:, 4], stored[:, 7]
    cut = np.flatnonzero((after == 6) & (obs == 5))
    assert not terminated[cut].any() and (after != 7).sum() >= 178  # six steps of it, and the seventh nowhere
    lost = [row for row in run.metrics if row["kind"] == "episode" and row["lost"]]
    assert [row["length"] for row in lost] == [6, 6]
    assert len(list((run.path / "errors").iterdir())) == 2


def test_failures_are_limited(tmp_path):
    env = after_seven(error=ZeroDivisionError("x"))
    with pytest.raises(T3DError, match=r"4 steps of Changed failed, and --max-env-errors is 3: .* max_env_errors=8"):
        t3d.train(
            env, out=tmp_path / "run", on_env_error="cut", max_env_errors=3, **{**KNOBS, "eval_every": 0}
        )  # fmt: skip


def test_limited_by_a_hundred():
    assert t3d.config.Config().max_env_errors == 100 and t3d.config.Config().on_env_error == "stop"


class ResetFails(Good):
    begun = 0

    def reset(self, *, seed=None, options=None):
        type(self).begun += 1
        if type(self).begun == 6:
            raise OSError("the arm is stuck")
        return super().reset(seed=seed)


def test_a_failing_reset_stops_even_with_cut(tmp_path):
    ResetFails.begun = 0
    with pytest.raises(T3DError, match=r"reset\(\) raised OSError: the arm is stuck") as stopped:
        t3d.train(ResetFails, out=tmp_path / "run", on_env_error="cut", **KNOBS)
    assert "--on-env-error cut" not in str(stopped.value) and "resume" in str(stopped.value)
    t3d.resume(tmp_path / "run", env=Good, progress=False)


def test_a_failing_evaluation_stops_even_with_cut(tmp_path):
    env = fails_in([2], ZeroDivisionError("x"))
    with pytest.raises(T3DError, match="episode 0 of the evaluation of seed 0") as stopped:
        t3d.train(env, out=tmp_path / "run", on_env_error="cut", **KNOBS)
    assert "resume" in str(stopped.value)
    t3d.resume(tmp_path / "run", env=Good, progress=False)  # the evaluation is still owed
    assert [row["step"] for row in t3d.Run.open(tmp_path / "run").evaluations] == [0, 100, 200]


def test_in_workers_a_failing_step_is_cut_too(tmp_path, capsys):
    settings = {**KNOBS, "eval_every": 0, "progress": True, "exploration_noise": 5.0, "max_env_errors": 10**6}
    run = t3d.train(
        Counter, out=tmp_path / "run", env_args={"trouble": "raises"}, workers=2, num_envs=2, on_env_error="cut",
        **settings,
    )  # fmt: skip
    said = capsys.readouterr().out
    assert "ZeroDivisionError: so told" in said and "Its episode is cut. Errors so far: 1." in said
    assert run.metrics[-1]["step"] == 200


def test_mujoco_simulations_that_fail_are_cut_by_themselves(tmp_path, monkeypatch):
    pytest.importorskip("mujoco")
    from t3d.envs.mujoco_tasks import HalfCheetah

    calls, reward = [], HalfCheetah.obs

    def obs(self):
        calls.append(0)
        row = reward(self).copy()
        if len(calls) == 60:
            row[1, 3] = NAN
        return row

    monkeypatch.setattr(HalfCheetah, "obs", obs)
    path = tmp_path / "run"
    run = t3d.train("HalfCheetah-v5", out=path, num_envs=2, on_env_error="cut", **{**KNOBS, "eval_every": 0})
    lost = [row for row in run.metrics if row["kind"] == "episode" and row["lost"]]
    assert len(lost) == 1 and "observation[3] is nan" in next((path / "errors").iterdir()).read_text()
    assert "environment 1 of seed 0" in next((path / "errors").iterdir()).read_text()


def test_a_run_with_cut_episodes_resumes_bit_for_bit(tmp_path):
    settings = {**KNOBS, "steps": 300, "on_env_error": "cut", "eval_every": 0}

    class Fails(Good):  # as a function of its seed
        def step(self, action):
            if self.time == 6 and self.np_random_seed % 3 == 0:
                raise OSError("x")
            return super().step(action)

        def obs(self):
            return np.array([self.time, self.np_random_seed % 100], np.float32)

    whole = t3d.train(Fails, out=tmp_path / "whole", **settings)
    path = tmp_path / "parts"
    t3d.train(Fails, out=path, **{**settings, "steps": 152})
    t3d.resume(path, steps=300, env=Fails, progress=False)
    assert end_of(path)[2] == end_of(whole.path)[2]
    ours, theirs = (end_of(folder)[1]["collector.env_errors"] for folder in (path, whole.path))
    assert ours == theirs != torch.tensor(0).numpy().tobytes()


# ---------------------------------------------------------------------------- what environments may not return


class ClosesBadly(Good):
    def close(self):
        raise OSError("it is jammed")


BAD = [
    ("terminated as an array", after_seven(terminated=np.array([True, False])), "terminated is array.*not True or"),
    ("terminated as NaN", after_seven(terminated=NAN), "terminated is nan, not True or False"),
    ("terminated as text", after_seven(terminated="no"), "terminated is 'no', not True or False"),
    ("truncated as None", after_seven(truncated=None), "truncated is None, not True or False"),
    ("terminated as 2", after_seven(terminated=2), "terminated is 2, not True or False"),
    ("an exception that cannot be printed", after_seven(error=Unprintable()), "its message cannot be read: ValueError"),
    ("SystemExit", Exits, "raised SystemExit: the simulator gave up"),
    ("a reward of many", after_seven(reward=[1, 2]), "not a number"),
    ("an unprintable reward", after_seven(reward=Unshowable()), "the reward is a Unshowable"),
    ("a flag in an array", after_seven(terminated=np.array([1])), ""),
    ("a tensor", after_seven(reward=torch.tensor(1.0)), ""),
]  # fmt: skip


@pytest.mark.parametrize(("env", "sentence"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_answers_are_sentences(env, sentence, tmp_path):
    call = lambda: t3d.train(env, out=tmp_path / "run", **{**KNOBS, "eval_every": 0})  # noqa: E731
    if not sentence:
        call()
        return
    with pytest.raises(T3DError, match=sentence) as stopped:
        call()
    assert "\n" not in str(stopped.value)


def test_an_environment_that_closes_badly_is_warned_of(tmp_path):
    with pytest.warns(t3d.errors.T3DWarning, match=r"ClosesBadly: close\(\) raised OSError: it is jammed"):
        run = t3d.train(ClosesBadly, out=tmp_path / "run", **KNOBS)
    assert run.evaluations[-1]["step"] == 200


def test_system_exit_is_a_sentence_and_exit_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(gymnasium.registry, "Exits-v0", gymnasium.envs.registration.EnvSpec("Exits-v0", Exits))
    with pytest.raises(SystemExit) as left:
        main(["train", "Exits-v0", "--steps", "100", "--hidden", "8", "--out", str(tmp_path / "run"), "--eval-every=0"])
    err = capsys.readouterr().err
    assert left.value.code == 2 and err.startswith("t3d: Exits-v0, copy 0") and "SystemExit: the simulator" in err


class Vector(VectorEnv):
    """Two of `Good`, one change in the seventh step."""

    num_envs = 2
    single_observation_space, single_action_space = Good.observation_space, Good.action_space
    observation_space = spaces.Box(-10.0, 10.0, (2, 2), np.float32)

    def __init__(self, mode=AutoresetMode.NEXT_STEP, **change):
        self.metadata = {"autoreset_mode": mode}
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, 2)
        self.change, self.time = change, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros((2, 2), np.float32), {}

    def step(self, actions):
        self.time += 1
        parts = {"obs": np.ones((2, 2), np.float32), "reward": np.ones(2), "terminated": np.zeros(2, bool)}
        parts |= {"truncated": np.zeros(2, bool), "info": {}}
        if self.time == 7:
            if "error" in self.change:
                raise self.change["error"]
            parts |= self.change
        return tuple(parts.values())[: self.change.get("parts", 5)]


ENDED = np.array([True, False])
VECTORS = [
    ("an exception", {"error": ZeroDivisionError("x")}, r"step 7: step\(\) raised ZeroDivisionError: x"),
    ("SystemExit", {"error": SystemExit(0)}, r"step\(\) raised SystemExit"),
    ("rewards in columns", {"reward": np.ones((2, 1))}, r"the rewards are float64 \(2, 1\), not of shape \(2,\)"),
    ("rewards of three", {"reward": np.ones(3)}, r"the rewards are float64 \(3,\), not of shape \(2,\)"),
    ("rewards of text", {"reward": np.array(["1", "2"])}, "the rewards are <U1"),
    ("one flag", {"terminated": np.zeros(1, bool)}, r"the terminated flags are bool \(1,\), not of shape \(2,\)"),
    ("flags that are numbers", {"truncated": np.zeros(2)}, "the truncated flags are float64"),
    ("a flag that is none", {"truncated": None}, "the truncated flags are object"),
    ("other observations", {"obs": np.ones((2, 3))}, r"the observations are float64 \(2, 3\)"),
    ("NaN", {"obs": np.full((2, 2), NAN)}, r"observation\[0\] is nan"),
    ("four answers", {"parts": 4}, "not .observations, rewards, terminated, truncated, info."),
    ("no last observation", {"terminated": ENDED, "mode": AutoresetMode.SAME_STEP}, "no 'final_obs'"),
    ("no info", {"truncated": ENDED, "info": None, "mode": AutoresetMode.SAME_STEP}, "no 'final_obs'"),
    (
        "a last observation of another shape",
        {"truncated": ENDED, "info": {"final_obs": [np.ones(5), None]}, "mode": AutoresetMode.SAME_STEP},
        r"info\['final_obs'\] of environment 0 is float64 \(5,\)",
    ),
]


@pytest.mark.parametrize("cut", ["stop", "cut"])
@pytest.mark.parametrize(("change", "sentence"), [case[1:] for case in VECTORS], ids=[case[0] for case in VECTORS])
def test_vector_environments_that_fail_are_sentences(change, sentence, cut, tmp_path):
    with pytest.raises(T3DError, match=sentence) as stopped:
        t3d.train(Vector(**change), out=tmp_path / "run", eval_env=Good, on_env_error=cut, **KNOBS)
    assert "resume" in str(stopped.value) and "--on-env-error cut" not in str(stopped.value)


@pytest.mark.parametrize("count", [3, 7, 16])
def test_random_steps_are_exact(count):
    """Whatever the number of environments, so many actions are random and the next one is the actor's."""
    config = Config(num_envs=count, random_steps=20, steps=200, hidden=(16, 16), batch_size=8, device="cpu", threads=1)
    config = resolve(config, "td3", "Good", 1)
    state = create_state(RunSetup(env_factory(Good), [0], config))
    actor = np.full((1, count, 2), 9.0, np.float32)
    learner = type("Learner", (), {"act": lambda self, obs, step: lambda: actor})()
    training, drawn = Trainer(state, learner, config), 0
    for state.step in range(0, 60, count):
        action = training.start_acting()()
        drawn += int((action[..., 0] != 9).sum())
    assert drawn == 20
    state.close()
