"""Real machines: there is one, it does nothing but what it is told, and nothing is replayed on it."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from killed import SMALL

import t3d
from t3d import T3DError
from t3d.cli import main

KNOBS = {**SMALL, "steps": 100, "batch_size": 4}
del KNOBS["eval_every"]


class Robot(gymnasium.Env):
    """Eight steps an episode; everything that is done to it is in `log`."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    log: list[str] = []  # noqa: RUF012
    fails_at = 0

    def __init__(self):
        self.log.append("made")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        self.log.append("reset")
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.time += 1
        self.log.append("step")
        if self.log.count("step") == self.fails_at:
            raise OSError("a cable came off")
        return np.full(2, self.time, np.float32), float(action[0]), False, self.time == 8, {}

    def close(self):
        self.log.append("closed")


class Declared(Robot):
    metadata = {"real": True, "render_modes": []}  # noqa: RUF012


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Nothing done yet, and an id for the command line."""
    Robot.log.clear()
    monkeypatch.setattr(Robot, "fails_at", 0)
    for name, made in (("Robot-v0", Robot), ("Declared-v0", Declared)):
        spec = gymnasium.envs.registration.EnvSpec(name, made, disable_env_checker=True)
        monkeypatch.setitem(gymnasium.registry, name, spec)


def episodes(log):
    """The log as a list: how many steps came after each reset; None for what was made or closed."""
    found = []
    for what in log:
        if what == "step":
            found[-1] += 1
        else:
            found.append(0 if what == "reset" else None)
    return found


@pytest.mark.parametrize("how", ["declared", "asked", "object"])
def test_it_is_made_once_and_only_trained_on(how, tmp_path):
    env = {"declared": Declared, "asked": Robot, "object": None}[how] or Robot()
    run = t3d.train(env, out=tmp_path / "run", **KNOBS, **({"real_env": True} if how == "asked" else {}))
    closed = [] if how == "object" else [None]  # an object belongs to whoever made it
    assert episodes(Robot.log) == [None, *[8] * 12, 4, *closed]
    assert run.config["real_env"] is True and run.config["eval_every"] == 0 and run.evaluations == []


def test_from_the_command_line(tmp_path, capsys):
    options = ["--steps", "100", "--random-steps", "20", "--hidden", "8", "--out", str(tmp_path / "run")]
    main(["train", "Robot-v0", "--real-env", *options])
    assert episodes(Robot.log) == [None, *[8] * 12, 4, None]
    assert "a real environment" in capsys.readouterr().out


def test_the_last_policy_is_written_at_every_checkpoint(tmp_path, monkeypatch):
    written = []
    save_policy = t3d.Run.save_policy
    monkeypatch.setattr(
        t3d.Run, "save_policy", lambda s, p, w: written.append((w, p.card.step)) or save_policy(s, p, w)
    )
    run = t3d.train(Declared, out=tmp_path / "run", **{**KNOBS, "checkpoint_every": "40"})
    assert written == [("last", step) for step in (0, 40, 80, 100)]
    policy = t3d.load(run)
    assert (policy.card.step, policy.card.returns, policy.card.lengths) == (100, [], [])
    assert policy(np.zeros(2)).shape == (1,) and "not evaluated" in repr(policy)
    assert (run.path / "report" / "learning-curve.png").exists()


@pytest.mark.parametrize("env", ["Pendulum-v1", None])
def test_without_evaluations_any_environment_has_its_last_policy(env, tmp_path, capsys):
    run = t3d.train(env or Robot, out=tmp_path / "run", eval_every=0, seeds=2, **KNOBS)
    assert t3d.load(run).card.step == 100 and t3d.load(run, 1).card.seed == 1 and not run.evaluations
    assert sorted(path.name for path in (run.path / "policies").glob("*.safetensors")) == [
        "last-seed-0.safetensors",
        "last-seed-1.safetensors",
    ]
    if env:
        main(["evaluate", str(run.path), "--episodes", "1"])
        assert "last policies" in capsys.readouterr().out


def test_evaluations_are_played_between_episodes_on_the_same_one(tmp_path):
    run = t3d.train(Declared, out=tmp_path / "run", **{**KNOBS, "eval_every": 40, "eval_episodes": 3})
    assert [row["step"] for row in run.evaluations] == [0, 40, 80, 100]
    assert Robot.log.count("made") == 1
    # A reset after which nothing was done is not done again; the last episode of training is cut by the run's end.
    assert episodes(Robot.log) == [None, *[8] * (3 + 12 + 2 * 3), 4, *[8] * 3, 0, None]
    assert all(len(row["returns"]) == 3 for row in run.evaluations) and t3d.load(run).card.returns


def test_resume_replays_nothing(tmp_path, capsys):
    run = t3d.train(Declared, out=tmp_path / "run", **KNOBS)  # it ends in the middle of an episode
    Robot.log.clear()
    capsys.readouterr()
    t3d.resume(run, steps=120, env=Declared)
    assert episodes(Robot.log) == [None, 8, 8, 4, None]
    said = capsys.readouterr().out
    assert "nothing is replayed" in said and "not bit for bit" in said and "Replaying" not in said


def test_resume_takes_the_object_too(tmp_path):
    robot = Robot()
    run = t3d.train(robot, out=tmp_path / "run", **KNOBS)
    with pytest.raises(T3DError, match="made by a function in Python"):
        t3d.resume(run, steps=120, progress=False)
    Robot.log.clear()
    t3d.resume(run, steps=120, env=robot, progress=False)
    assert episodes(Robot.log) == [8, 8, 4]


def test_its_cut_episode_is_stored_as_truncated(tmp_path, monkeypatch):
    seen, make = [], t3d.trainer.make_state
    monkeypatch.setattr(t3d.trainer, "make_state", lambda setup: seen.append(make(setup)) or seen[-1])
    run = t3d.train(Declared, out=tmp_path / "run", n_step=3, **KNOBS)
    t3d.resume(run, steps=120, env=Declared, progress=False)
    memory = seen[-1].learner.memory
    rows = memory.rows[0, : int(memory.length[0])].numpy()
    before, after, span = rows[:, 0], rows[:, 3], rows[:, 7]
    assert len(rows) > 100 and ((after - before) == span).all()  # no row leads from one episode into another


def test_other_environments_are_told_how_much_is_replayed(tmp_path, capsys):
    run = t3d.train("Pendulum-v1", out=tmp_path / "run", num_envs=2, **{**KNOBS, "steps": 150})
    t3d.resume(run, steps=160)
    assert "Replaying 150 actions to restore the environments." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"seeds": 2}, "more than one seed"),
        ({"num_envs": 2}, "--num-envs"),
        ({"workers": 1}, "--workers"),
        ({"her": 4}, "--her"),
        ({"async_eval": "on"}, "--async-eval"),
        ({"eval_values": "on"}, "--eval-values"),
    ],
)
@pytest.mark.parametrize("how", ["declared", "asked", "object"])
def test_what_needs_several_of_it_is_refused(how, settings, sentence, tmp_path):
    env = {"declared": Declared, "asked": Robot, "object": None}[how] or Robot()
    more = {"real_env": True} if how == "asked" else {}
    with pytest.raises(T3DError, match=f"a real environment exists once.*{sentence}"):
        t3d.train(env, out=tmp_path / "run", **KNOBS, **settings, **more)
    assert not (tmp_path / "run").exists()
    assert Robot.log.count("made") == (how != "asked") and "step" not in Robot.log and "reset" not in Robot.log


def test_pools_and_vectors_are_not_real():
    with pytest.raises(T3DError, match="which excludes --num-envs"):
        t3d.train(gymnasium.make_vec("Pendulum-v1", 2), real_env=True, steps=50)


def test_doctor_is_refused(capsys):
    with pytest.raises(SystemExit) as left:
        main(["doctor", "Declared-v0"])
    assert left.value.code == 2 and "is a real environment: doctor would" in capsys.readouterr().err
    assert episodes(Robot.log) == [None, None]  # made to be asked, and closed


def test_evaluate_plays_one_episode_at_a_time(tmp_path, capsys):
    main(["train", "Declared-v0", "--steps", "100", "--random-steps", "20", "--hidden", "8",
          "--out", str(tmp_path / "run")])  # fmt: skip
    Robot.log.clear()
    main(["evaluate", str(tmp_path / "run"), "--episodes", "3"])
    assert episodes(Robot.log) == [None, 8, 8, 8, 0, None]


def test_a_failing_step_only_resets_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Robot, "fails_at", 20)
    t3d.train(Declared, out=tmp_path / "run", **{**KNOBS, "on_env_error": "cut", "progress": True})
    assert episodes(Robot.log) == [None, 8, 8, 4, *[8] * 10, 0, None]
    assert "OSError: a cable came off" in capsys.readouterr().out


def test_after_a_failure_it_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(Robot, "fails_at", 20)
    with pytest.raises(T3DError, match=r"a cable came off .*on_env_error='cut'"):
        t3d.train(Declared, out=tmp_path / "run", **KNOBS)
    assert t3d.load(tmp_path / "run").card.step == 19
    Robot.log.clear()
    monkeypatch.setattr(Robot, "fails_at", 0)
    t3d.resume(tmp_path / "run", env=Declared, progress=False)
    assert episodes(Robot.log) == [None, *[8] * 10, 1, None]


def test_a_run_on_a_simulation_is_not_continued_on_a_machine(tmp_path):
    run = t3d.train(Robot, out=tmp_path / "run", **{**KNOBS, "eval_every": 0})
    for env in (Declared, Robot()):
        Robot.log.clear()
        with pytest.raises(T3DError, match="not begun on a real environment"):
            t3d.resume(run, steps=120, env=env, progress=False)
        assert "step" not in Robot.log and "reset" not in Robot.log


def test_policies_refuse_what_is_not_finite(tmp_path):
    policy = t3d.load(t3d.train(Declared, out=tmp_path / "run", **KNOBS))
    agent = t3d.T3D(2, 1, 1.0, hidden=(8,))
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(T3DError, match=r"observation\[1\] is"):
            policy([0.0, bad])
        with pytest.raises(T3DError, match=r"state\[1\] is"):
            agent.select_action([0.0, bad])
