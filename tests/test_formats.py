"""Files that earlier releases wrote are still read. Every release adds its own folder to tests/fixtures/.

python tests/test_formats.py        writes tests/fixtures/VERSION, if it is not there
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import t3d

FIXTURES = Path(__file__).parent / "fixtures"
OBS, STATE = [0.6, -0.8, 0.5], [0.1, 0.2, 0.3]
SETTINGS = {
    "steps": 80,
    "random_steps": 20,
    "hidden": (8, 4),
    "batch_size": 8,
    "eval_every": 40,
    "eval_episodes": 1,
    "log_every": 20,
    "checkpoint_every": "30",
    "normalize_obs": "on",
    "n_step": 2,
    "device": "cpu",
    "threads": 1,
    "accelerate": "eager",
}


def agent():
    return t3d.T3D(3, 1, 2.0, hidden=(8, 4))


@pytest.fixture(params=sorted(FIXTURES.glob("*")), ids=lambda path: path.name)
def written(request, tmp_path):
    """A copy of what a release wrote, and the actions that its policies took."""
    shutil.copytree(request.param, tmp_path / "files")
    return tmp_path / "files", json.loads((tmp_path / "files" / "actions.json").read_text())


def test_policies_act_as_they_did(written):
    path, actions = written
    run = t3d.Run.open(path / "run")
    for which in ("best", "last"):
        np.testing.assert_allclose(t3d.load(run, 1, which)(OBS), actions[which], rtol=1e-5)
    file = path / "run" / "policies" / "last-seed-1.safetensors"
    np.testing.assert_allclose(t3d.load(file)(OBS), actions["last"], rtol=1e-5)


def test_a_run_is_resumed(written):
    path, _ = written
    run = t3d.resume(path / "run", steps=100, progress=False)
    assert [row["step"] for row in run.evaluations if row["seed"] == 0] == [0, 40, 80, 100]
    assert run.metrics[0]["kind"] == "evaluation" and run.config["steps"] == 100


def test_an_agent_of_the_documents_is_loaded(written):
    path, actions = written
    loaded = agent()
    loaded.load("agent", path)
    np.testing.assert_allclose(loaded.select_action(STATE), actions["agent"], rtol=1e-5)


def test_this_release_has_its_fixtures():
    assert (FIXTURES / t3d.__version__ / "run" / "config.json").exists()


@pytest.mark.parametrize("format_now", [None, 1, 99])
def test_other_formats_are_refused_in_a_sentence(tmp_path, format_now):
    newest = max(FIXTURES.glob("*"))
    shutil.copytree(newest / "run", tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    values = {name: value for name, value in config.items() if name not in ("format", t3d.files.SUM)}
    values |= {} if format_now is None else {"format": format_now}
    path.write_text(json.dumps(t3d.files.with_sum(values)))
    sentence = rf"has the format {format_now}; this version reads \d+\. Open it with the version that wrote it"
    with pytest.raises(t3d.T3DError, match=sentence):
        t3d.resume(tmp_path / "run", progress=False)


if __name__ == "__main__":
    folder = FIXTURES / t3d.__version__
    run = t3d.train("Pendulum-v1", seeds=2, out=folder / "run", progress=False, **SETTINGS)
    shutil.rmtree(run.path / "report")
    (run.path / ".lock").unlink()  # it names a machine
    torch.manual_seed(0)
    one = agent()
    one.save("agent", folder)
    known = {which: t3d.load(run, 1, which)(OBS).tolist() for which in ("best", "last")}
    (folder / "actions.json").write_text(json.dumps({**known, "agent": one.select_action(STATE).tolist()}, indent=2))
