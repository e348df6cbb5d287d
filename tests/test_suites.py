"""Environments from other suites, which are extras: a few steps of each, where it is installed."""

import sys

import pytest

import t3d
from t3d.cli import main
from t3d.envs import env_factory

KNOBS = {
    "hidden": (16, 16),
    "batch_size": 16,
    "eval_episodes": 1,
    "eval_every": 1_000,
    "device": "cpu",
    "progress": False,
}


# First, because suites that were imported once have registered their ids.
@pytest.mark.parametrize(
    ("env", "module", "extra"),
    [
        ("AntBulletEnv-v0", "pybullet_envs_gymnasium", "bullet"),
        ("dm_control/cheetah-run-v0", "shimmy", "dmc"),
        ("envpool/HalfCheetah-v5", "envpool", "envpool"),
    ],
)
def test_what_is_missing_is_named_with_the_line_to_type(env, module, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(t3d.T3DError, match=rf"there is no module {module}\. .*pip install 't3d\[{extra}\]'"):
        env_factory(env).batch(1, lambda env, episode: 0)


@pytest.mark.parametrize(
    ("env", "module", "extra"),
    [
        ("AntBulletEnv-v0", "pybullet_envs_gymnasium", "bullet"),
        ("dm_control/cheetah-run-v0", "shimmy", "dmc"),
        ("envpool/HalfCheetah-v5", "envpool", "envpool"),
    ],
)
def test_tasks_of_an_extra_train_and_come_back(env, module, extra, tmp_path):
    pytest.importorskip(module, reason=f"it is not installed: pip install 't3d[{extra}]'")
    run = t3d.train(env, 2_100, 2, tmp_path / "run", normalize_obs="on", **KNOBS)
    assert run.config["env"] == env and len(run.evaluations) == 2 * 4
    t3d.resume(run.path, 2_200, progress=False)
    assert max(row["step"] for row in run.evaluations) == 2_200


def test_a_pool_cannot_be_taken_apart():
    source = env_factory("envpool/HalfCheetah-v5")
    with pytest.raises(t3d.T3DError, match="makes batches only"):
        source.one()
    with pytest.raises(t3d.T3DError, match="leave out --workers and --pixels"):
        source.batch(2, lambda env, episode: 0, workers=2)


def test_a_pool_gives_the_same_evaluations_each_time(tmp_path, capsys):
    pytest.importorskip("envpool", reason="it is not installed: pip install 't3d[envpool]'")
    run = t3d.train("envpool/Pendulum-v1", 300, 2, tmp_path / "run", num_envs=2, **{**KNOBS, "eval_every": 100})
    for _ in range(2):
        main(["evaluate", str(run.path)])
        assert capsys.readouterr().out.count("yes") == 2
    with pytest.raises(t3d.T3DError, match=r"EnvPool has no environment Pendulum-v7. Did you mean"):
        t3d.train("envpool/Pendulum-v7", 300, out=tmp_path / "other", **KNOBS)
