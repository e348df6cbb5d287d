"""Attacks that once ended in a traceback, in wrong data or in a long wait. Each now ends in a sentence."""

import json
import os
import resource
import shlex
import shutil
import types
from pathlib import Path

import crafted
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

import t3d
from t3d import T3DError, api, files
from t3d.bench import returns, tables
from t3d.bench.suites import Task
from t3d.cli import main
from t3d.envs import factory, gym
from t3d.envs.factory import env_factory, unsafe_arg
from t3d.envs.vector import VectorBatch
from t3d.errors import plain, shown
from t3d.layout import DEEPEST, describe
from t3d.policy import policy_of_bytes
from t3d.runs import folder as folders
from t3d.runs import manifest as manifests
from t3d.runs import metrics
from t3d.runs.folder import Run, claim

# What other test files call SMALL, with fewer steps.
SMALL = {
    "steps": 60, "random_steps": 20, "hidden": (8,), "batch_size": 8, "eval_every": 30, "eval_episodes": 1,
    "checkpoint_every": "30", "accelerate": "eager", "threads": 1, "device": "cpu", "progress": False,
}  # fmt: skip
BOX, ACTIONS = spaces.Box(-1, 1, (2,), np.float32), spaces.Box(-1, 1, (1,), np.float32)
pytestmark = pytest.mark.filterwarnings("ignore::t3d.errors.T3DWarning")


def failed(capsys, *arguments):
    """The output of a command that must end with exit code 2."""
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and "Traceback" not in err
    return out + err


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return t3d.train("Pendulum-v1", out=tmp_path_factory.mktemp("source") / "run", **SMALL).path


@pytest.fixture
def run(source, tmp_path):
    shutil.copytree(source, tmp_path / "run")
    return tmp_path / "run"


# ---------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("step", [float("nan"), float("inf"), 60.0])
def test_the_step_of_a_state_is_a_whole_number(step, run):
    crafted.older_checkpoints_removed(run)
    crafted.state(run, lambda tensors: tensors.update(step=torch.tensor(step, dtype=torch.float64)))
    with pytest.raises(T3DError, match="the state is from a different step"):
        t3d.resume(run, steps=70, progress=False)


@pytest.mark.parametrize("size", [50, 2**52])
def test_a_mark_without_rows_wipes_no_metrics(size, run, capsys):
    before = (run / "metrics.jsonl").read_bytes()
    crafted.older_checkpoints_removed(run)
    crafted.manifest(run, lambda values: values.update(metrics={"size": size, "rows": 0, "chain": "0" * 16}))
    assert "metrics have no rows" in failed(capsys, "resume", run, "--steps", "70")
    assert (run / "metrics.jsonl").read_bytes() == before


def add_checkpoints(run, count, change):
    """Copies of the newest checkpoint at later steps, each as `change` leaves its manifest."""
    for _ in range(count):
        last = crafted.newest(run)
        step = int(last.name.removeprefix("step-")) + 1
        shutil.copytree(last, last.with_name(f"step-{step}"))
        crafted.manifest(run, lambda values, step=step: change(values) or values.update(step=step))


def test_the_metrics_are_read_once_for_many_checkpoints(run, monkeypatch, capsys):
    add_checkpoints(run, 7, lambda values: values["metrics"].update(chain="0" * 16))
    read, real = [], metrics._chained

    def counted(lines, path):
        read.append(path)
        return real(lines, path)

    positions, real_positions = [], metrics.Metrics.positions
    monkeypatch.setattr(metrics, "_chained", counted)
    monkeypatch.setattr(metrics.Metrics, "positions", lambda self: positions.append(len(read)) or real_positions(self))
    with monkeypatch.context() as patch:  # nothing is read after the checkpoints were searched
        patch.setattr(metrics.Metrics, "after", lambda self, mark: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            t3d.resume(run, steps=70)
    assert len(read) == 1 and positions == [0]
    assert capsys.readouterr().out.count("checksum does not match") == 7


def test_a_manifest_of_many_lists_is_not_parsed(run, capsys):
    crafted.older_checkpoints_removed(run)
    (crafted.newest(run) / "manifest.json").write_text('{"a": [' + ",".join(["[]"] * 5000) + "]}")
    assert "holds more than 4,000 objects and lists" in failed(capsys, "resume", run, "--steps", "70")


def test_only_the_newest_checkpoints_are_examined(run, capsys):
    for step in range(1000, 1040):
        (run / "checkpoints" / f"step-{step}").mkdir()
        (run / "checkpoints" / f"step-{step}" / "manifest.json").write_text("{}")
    said = failed(capsys, "resume", run, "--steps", "70")
    assert said.count("is skipped") == manifests.MOST_CANDIDATES
    there = len(list((run / "checkpoints").iterdir()))
    assert said.count(f"{there - manifests.MOST_CANDIDATES} older checkpoints were not examined") == 1


def test_a_file_with_many_names_is_hashed_once(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"rows")
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    hashed, real = [], files.hashlib.file_digest
    monkeypatch.setattr(files.hashlib, "file_digest", lambda *given: hashed.append(given) or real(*given))
    known = {}
    with files.Folder.open(tmp_path) as folder:
        assert folder.sha256("a", known) == folder.sha256("b", known) and len(hashed) == 1
        (tmp_path / "a").write_bytes(b"others")
        folder.sha256("a", known)
    assert len(hashed) == 2


def test_a_sparse_file_of_two_mebibytes_is_refused(tmp_path):
    (tmp_path / "a").touch()
    os.truncate(tmp_path / "a", 2**21)
    with files.Folder.open(tmp_path) as folder, pytest.raises(T3DError, match="is a sparse file"):
        folder.sha256("a")


def test_segments_do_not_overlap(run, capsys):
    crafted.older_checkpoints_removed(run)
    crafted.manifest(
        run, lambda values: values["segments"].append({**values["segments"][-1], "file": "step-999.safetensors"})
    )
    assert "step-999.safetensors has rows of" in failed(capsys, "resume", run, "--steps", "70")


def test_the_identity_of_a_run_is_computed_once(run, monkeypatch):
    opened, dumped = Run(run), []
    counted = types.SimpleNamespace(dumps=lambda *given, **how: dumped.append(given) or json.dumps(*given, **how))
    monkeypatch.setattr(folders, "json", counted)
    first = opened.identity
    assert opened.identity == first and len(dumped) == 1
    opened.update_config({"steps": 70})
    assert opened.identity == first
    opened.update_config({"gamma": 0.5})
    assert opened.identity != first


def test_lost_checkpoints_are_refused_before_environments_are_made(run, monkeypatch):
    shutil.rmtree(run / "checkpoints")
    rows = (run / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(api, "env_factory", lambda *given: pytest.fail("an environment was made"))
    with pytest.raises(T3DError, match="no checkpoint: they were removed"):
        t3d.resume(run, steps=70, progress=False)
    assert (run / "metrics.jsonl").read_bytes() == rows


# --------------------------------------------------------------------------------------- settings and names


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device": "auto"}, "device cannot be 'auto'"),
        ({"accelerate": "auto"}, "accelerate cannot be 'auto'"),
        ({"real_env": True, "seeds": [0, 1]}, "excludes more than one seed"),
    ],
)
def test_open_and_conflicting_options_of_a_file_are_refused(changes, said, run, capsys):
    crafted.config(run, **changes)
    assert said in failed(capsys, "resume", run)


def test_rows_of_seed_0_in_a_run_of_seed_1(tmp_path):
    run = t3d.train("Pendulum-v1", seeds=(1,), out=tmp_path / "run", **SMALL)
    crafted.metrics(run.path, lambda rows: rows[0].update(seed=0))
    with pytest.raises(T3DError, match="has a row of seed 0"):
        Run(run.path).metrics  # noqa: B018


def test_a_file_opens_no_window():
    assert unsafe_arg({"render_mode": "human"}) == ("render_mode", "human")
    assert unsafe_arg({"nested": {"render_mode": "human"}}) and not unsafe_arg({"render_mode": "rgb_array"})


def test_no_window_without_a_display(monkeypatch, capsys):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(factory.sys, "platform", "linux")
    said = failed(capsys, "train", "Pendulum-v1", "--env.render_mode", "human")
    assert "opens a window, and there is no display" in said


def test_the_compiler_is_imported_before_an_environment_renders(monkeypatch):
    imported = []
    monkeypatch.setattr(factory, "import_compiler", lambda: imported.append(1))
    env_factory("Pendulum-v1").seen(0, 1)
    assert not imported
    env_factory("Pendulum-v1", {"render_mode": "rgb_array"}).seen(0, 1)
    assert imported


def test_commands_are_quoted_for_the_shell(run, tmp_path, monkeypatch, capsys):
    with pytest.raises(T3DError, match=r"--allow-module 'a; b'\."):
        env_factory("a; b:X-v0", allowed_modules=())
    monkeypatch.chdir(tmp_path)
    run.rename("run $(touch PWNED) '")
    main(["resume", "run $(touch PWNED) '"])
    *_, evaluate, load = capsys.readouterr().out.rstrip().splitlines()
    assert "run $(touch PWNED) '" in shlex.split(evaluate)
    assert len(shlex.split(load)) == 3 and "$(touch PWNED)" in shlex.split(load)[2]


def test_keys_of_arguments_are_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("weights").touch()
    assert unsafe_arg({"/etc/shadow": 1}) and unsafe_arg({"files": {"/etc/passwd": 1}})
    assert unsafe_arg({"files": [{"os:system": 1}]}) and unsafe_arg({"files": {"weights": 1}})
    assert not unsafe_arg({"weights": 1.0, "goal": {"x": [0.5]}, "name": "a b"})


@pytest.mark.parametrize(
    "character", ["\u206a", "\u206f", "\u200b", "\u200d", "\xad", "\ufff9", "\ufffb", "\U000e0041", "\u2060"]
)
def test_invisible_characters_are_escaped(character):
    assert plain(f"a{character}b").isascii() and str(T3DError(f"a{character}b")).isascii()


def test_a_dangling_link_named_runs(tmp_path):
    (tmp_path / "runs").symlink_to("/nowhere/disk")
    with pytest.raises(T3DError, match="cannot make the folder runs"):
        claim(None, "Pendulum-v1", tmp_path)


def test_a_lock_on_a_full_disk(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with files.Folder.open(tmp_path) as folder:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            folder.lock(".lock", "{}").close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_null_byte_in_a_name(tmp_path):
    with pytest.raises(T3DError, match="null byte"):
        t3d.T3D(3, 1, 2.0, hidden=(8,)).save("\0", tmp_path)


# ------------------------------------------------------------------------------------------------ environments


class Good(gymnasium.Env):
    """Ten steps an episode."""

    observation_space, action_space = BOX, ACTIONS

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.zeros(2, np.float32), 0.0, False, self.time == 10, {}


def with_spaces(**changed):
    return type("Changed", (Good,), changed)


@pytest.mark.parametrize("absent", [False, True])
def test_an_environment_that_changes_the_working_directory(absent, tmp_path, monkeypatch):
    """Its first reset: from then on, relative paths mean something else."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")

    class Moves(Good):
        def reset(self, *, seed=None, options=None):
            os.chdir(tmp_path / "there")
            return super().reset(seed=seed)

    out = None if absent else "run"
    path = t3d.train(Moves, out=out, **SMALL).path
    assert (tmp_path / "here" / path / "policies" / "best-seed-0.safetensors").exists()
    assert not list((tmp_path / "there").iterdir())


def test_metadata_that_raise():
    class Raises(Good):
        @property
        def metadata(self):
            raise RuntimeError("no metadata")

    with pytest.raises(T3DError, match="metadata cannot be read: RuntimeError: no metadata"):
        t3d.train(Raises, **SMALL)


class OddTuple(tuple):
    __slots__ = ()

    def fail(self, *_):
        raise RuntimeError("not this way")

    __len__ = __iter__ = __getitem__ = fail


class OddTuples(Good):
    def reset(self, *, seed=None, options=None):
        return OddTuple(super().reset(seed=seed))

    def step(self, action):
        return OddTuple(super().step(action))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_tuple_is_read_without_its_own_methods(workers):
    envs = env_factory(OddTuples).batch(1, lambda env, episode: 0, workers)
    try:
        envs.reset()
        assert envs.step(np.zeros((1, 1))).valid.all()
    finally:
        envs.close()


def test_a_tuple_of_a_vector_environment():
    class Odd(SyncVectorEnv):
        def reset(self, **options):
            return OddTuple(super().reset(**options))

        def step(self, actions):
            return OddTuple(super().step(actions))

    envs = VectorBatch("odd", Odd([Good]), lambda env, episode: 0)
    envs.reset()
    assert envs.step(np.zeros((1, 1))).valid.all()
    envs.close()


class Nameless(type):
    @property
    def __name__(cls):
        raise RuntimeError("no name")


class NamelessError(Exception, metaclass=Nameless):
    def __repr__(self):
        raise self


def test_an_exception_without_a_name():
    class Raises(Good):
        def step(self, action):
            raise NamelessError("what happened")

    envs = env_factory(Raises).batch(1, lambda env, episode: 0)
    envs.reset()
    with pytest.raises(T3DError, match=r"step\(\) raised NamelessError: what happened"):
        envs.step(np.zeros((1, 1)))
    assert shown(NamelessError()) == "a NamelessError"


def nested(levels, leaf=BOX):
    for _ in range(levels):
        leaf = spaces.Tuple((leaf,))
    return leaf


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (spaces.Dict({("a", 1): BOX, ("b", 2): BOX}), r"the key \('a', 1\); keys must be strings"),
        (spaces.Dict({1: BOX, 2: BOX}), "the key 1; keys must be strings"),
        (spaces.Discrete(2 * 10**9), "2,000,000,000 numbers; at most 16,777,216"),
        (spaces.Discrete(10**14), "at most 16,777,216"),
        (spaces.Discrete(2**62), "at most 16,777,216"),
        (nested(DEEPEST + 1), "nested deeper than 30 levels"),
        (nested(1500), "nested deeper than 30 levels"),
    ],
)
def test_an_observation_that_no_policy_can_hold_is_refused(space, said, monkeypatch):
    monkeypatch.setattr(gym.GymBatch, "__init__", lambda *given: pytest.fail("memory was allocated"))
    with pytest.raises(T3DError, match=said):
        t3d.train(with_spaces(observation_space=space), **SMALL)


@pytest.mark.parametrize("leaf", [BOX, spaces.MultiDiscrete([2, 3])])
def test_the_policy_of_the_deepest_observation_can_be_read(leaf, source):
    policy = t3d.load(source)
    policy.card.layout.clear()
    policy.card.layout.update(describe(nested(DEEPEST, leaf), "x"))
    with pytest.raises(T3DError, match=r"does not describe its weights \(layer_1"):  # so the card was read
        policy_of_bytes(policy.to_bytes(), Path("x"))


def test_actions_of_a_type_that_no_policy_can_hold():
    wide = with_spaces(action_space=spaces.Box(-1, 1, (1,), np.longdouble))
    if np.dtype(np.longdouble) != np.float64:
        with pytest.raises(T3DError, match="it must be float16, float32, float64"):
            t3d.train(wide, **SMALL)


class CloseFails(Good):
    def close(self):
        raise SystemExit(3)


class SecondResetFails(Good):
    resets = 0

    def reset(self, *, seed=None, options=None):
        SecondResetFails.resets += 1
        if SecondResetFails.resets > 3:
            raise RuntimeError("the arm is stuck")
        return super().reset(seed=seed)


def test_doctor_and_environments_that_fail(monkeypatch, capsys):
    for kind in (CloseFails, SecondResetFails):
        monkeypatch.setitem(
            gymnasium.registry, f"{kind.__name__}-v0", gymnasium.envs.registration.EnvSpec(f"{kind.__name__}-v0", kind)
        )
    main(["doctor", "CloseFails-v0", "--steps", "20"])
    assert "bit-identical" in capsys.readouterr().out
    assert "RuntimeError: the arm is stuck" in failed(capsys, "doctor", "SecondResetFails-v0", "--steps", "20")


# ---------------------------------------------------------------------------------------------------- benchmarks


def result(**changes):
    values = {
        "env": "Hopper-v5", "suite": "ablation", "variant": "td3", "config": {"eval_every": 10, "eval_episodes": 1},
        "steps": [0, 10], "returns": [[[0.0], [1.0]], [[0.0], [2.0]]], "wall_seconds": 60.0, "versions": {"torch": "2"},
        "hardware": {"processor": "P", "cores": 2, "gpu": None},
        "q_predicted": [[1.0, 2.0], [1.0, 2.0]], "discounted_return": [[1.0, 2.0], [1.0, 2.0]],
    }  # fmt: skip
    return json.dumps(values | changes)


RESULTS = {
    "nothing": "{}",
    "seeds alone": '{"seeds": 1}',
    "no steps": result(steps=[]),
    "text for steps": result(steps=["a", "b"]),
    "no processor": result(hardware={"cores": 2, "gpu": None}),
    "a list for the GPU": result(hardware={"processor": "P", "cores": 2, "gpu": [1]}),
    "a surrogate": result(hardware={"processor": "\ud800", "cores": 2, "gpu": None}),
    "versions that are objects": result(versions={"torch": {"a": 1}}),
    "a short discounted return": result(discounted_return=[1.0]),
    "no variant": result(variant=""),
    "an unknown task": result(env="Foo-v5"),
    "mathtext": result(env=r"$\frac{$"),
    "no episodes": result(returns=[[[], []], [[], []]]),
    "numbers whose square is not finite": result(returns=[[[1e200], [1.0]], [[0.0], [2.0]]]),
}
NAME = "ablation-td3-Hopper-v5.json"
TASK = Task("ablation", "Hopper-v5", {}, "td3")


@pytest.mark.parametrize("case", RESULTS)
def test_result_files_are_checked(case, tmp_path, capsys):
    (tmp_path / NAME).write_text(RESULTS[case])
    assert f"{NAME} is not a file of t3d bench returns" in failed(capsys, "bench", "table", "--results", tmp_path)
    with pytest.raises(T3DError, match="is not a file of t3d bench returns"):
        returns.train_suite([TASK], 1, {}, tmp_path, tmp_path, print)


def test_a_discounted_return_of_zero(tmp_path):
    (tmp_path / NAME).write_text(result(discounted_return=[[0.0, 0.0], [0.0, 0.0]]))
    (sentence,) = tables.overestimation(tables.read_results(tmp_path)["ablation"])
    assert sentence.endswith("predicted 1.50, discounted return 0.00.")
    (tmp_path / NAME).write_text(result(discounted_return=[[None, None], [None, None]]))
    assert tables.overestimation(tables.read_results(tmp_path)["ablation"]) == []


def test_a_result_that_is_a_dangling_link(tmp_path):
    (tmp_path / NAME).symlink_to(tmp_path / "nowhere")
    with pytest.raises(T3DError, match="link"):
        returns.train_suite([TASK], 1, {}, tmp_path, tmp_path, print)


@pytest.mark.parametrize("turns", [5, [1], [[1.0]], [["a", "b"]], [[1.0, None]], None])
def test_the_file_of_a_clock_is_checked(turns, tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "clock.json").write_text(json.dumps({"turns": turns}))
    with pytest.raises(T3DError, match=r"clock.json does not hold the times of a run"):
        returns.Clock(tmp_path / "clock.json", tmp_path / "metrics.jsonl")
