"""Environments from other suites, which are extras: a few steps of each, where it is installed."""

import sys

import pytest

import t3d
from t3d.envs import open_source

KNOBS = {
    "hidden": (16, 16),
    "batch_size": 16,
    "eval_episodes": 1,
    "eval_every": 1_000,
    "device": "cpu",
    "progress": False,
}


@pytest.mark.parametrize(
    ("env", "module", "extra"),
    [("HalfCheetahBulletEnv-v0", "pybullet_envs_gymnasium", "bullet"), ("dm_control/cheetah-run-v0", "shimmy", "dmc")],
)
def test_tasks_of_an_extra_train_and_come_back(env, module, extra, tmp_path):
    pytest.importorskip(module, reason=f"it is not installed: pip install 't3d[{extra}]'")
    run = t3d.train(env, 2_100, 2, tmp_path / "run", normalize_obs="on", **KNOBS)
    assert run.config["env"] == env and len(run.evaluations) == 2 * 4
    t3d.resume(run.path, 2_200, progress=False)
    assert max(row["step"] for row in run.evaluations) == 2_200


@pytest.mark.parametrize(
    ("env", "module", "extra"),
    [("AntBulletEnv-v0", "pybullet_envs_gymnasium", "bullet"), ("dm_control/cheetah-run-v0", "shimmy", "dmc")],
)
def test_what_is_missing_is_named_with_the_line_to_type(env, module, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(t3d.T3DError, match=rf"there is no module {module} to import. .*pip install 't3d\[{extra}\]'"):
        open_source(env).one()
