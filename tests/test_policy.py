"""Policies on the disk and in the hand; evaluations that can be had again."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import t3d
from t3d import Actor, T3DError
from t3d.cli import main

KNOBS = {
    "steps": 400, "random_steps": 100, "eval_every": 200, "eval_episodes": 3, "hidden": (16, 16), "batch_size": 16,
    "device": "cpu", "progress": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return t3d.train("Pendulum-v1", seeds=[3, 8], out=tmp_path_factory.mktemp("runs") / "run", **KNOBS)


def test_one_observation_or_a_batch_in_the_environments_units(run):
    policy = t3d.load(run.path, seed=8)
    one = policy([0.5, -0.5, 2.0])
    many = policy(np.array([[0.5, -0.5, 2.0], [1.0, 0.0, 0.0]]))
    assert one.shape == (1,) and one.dtype == np.float32 and many.shape == (2, 1)
    np.testing.assert_allclose(many[0], one, rtol=1e-5)
    assert np.abs(policy(1e6 * np.random.default_rng(0).normal(size=(500, 3)))).max() <= 2
    with pytest.raises(T3DError, match=r"shape \(3,\)"):
        policy([1.0, 2.0])


def test_files_hold_the_documents_actor(run):
    layers = load_file(run.path / "policies" / "best-seed-3.safetensors")
    actor = Actor(3, 1, 2.0, hidden=(16, 16))
    actor.load_state_dict(layers)
    obs = torch.tensor([[0.1, 0.2, 0.3]])
    np.testing.assert_allclose(actor(obs).detach().numpy()[0], run.policy(3)(obs.numpy()[0]), rtol=1e-5)


def test_load_takes_a_run_a_folder_or_a_file(run):
    path = run.path / "policies" / "last-seed-3.safetensors"
    obs = np.array([0.1, 0.2, 0.3])
    assert (t3d.load(path)(obs) == t3d.load(run, seed=3, which="last")(obs)).all()
    means = {seed: np.mean(run.policy(seed).card.returns) for seed in (3, 8)}
    assert t3d.load(str(run.path)).card.seed == max(means, key=means.get)
    with pytest.raises(T3DError, match="has no seed 4; it has 3, 8"):
        t3d.load(run, seed=4)


def test_no_time_and_no_host_in_a_policy(run):
    card = json.loads((run.path / "policies" / "best-seed-3.json").read_text())
    assert card.keys() == {
        "format", "env", "seed", "step", "returns", "lengths", "obs_shape", "action_low", "action_high",
        "action_dtype", "hidden",
    }  # fmt: skip


@pytest.mark.parametrize("which", ["best", "last"])
@pytest.mark.parametrize("seeds", [[], ["--seeds", "8"]])
@pytest.mark.parametrize("episodes", [[], ["--episodes", "2"], ["--episodes", "5"]])
def test_evaluate_gives_the_recorded_scores_again(run, which, seeds, episodes, capsys):
    main(["evaluate", str(run.path), "--policy", which, *seeds, *episodes])
    text = capsys.readouterr().out
    assert text.count("yes") == (1 if seeds else 2) and "no:" not in text


def test_evaluate_plays_more_episodes_than_were_recorded(run, capsys):
    main(["evaluate", str(run.path), "--episodes", "7"])
    assert "7 episodes" in capsys.readouterr().out


def test_evaluation_has_no_noise_and_its_own_seeds(run):
    evaluations = run.evaluations
    assert {row["step"] for row in evaluations} == {0, 200, 400}
    first = [row["returns"] for row in evaluations if row["step"] == 0]
    assert first[0] != first[1]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("best-seed-3.safetensors", b"", "damaged"),
        ("best-seed-3.safetensors", b"\x80\x04cos\nsystem\n", "damaged"),
        ("best-seed-3.json", b"{", "not valid JSON"),
        ("best-seed-3.json", b"[1]", "not an object"),
        ("best-seed-3.json", b'{"format": 99}', "format 99"),
        ("best-seed-3.json", b'{"format": 1}', "does not describe"),
        ("best-seed-3.json", None, "cannot read"),
    ],
)
def test_a_corrupt_policy_is_a_sentence(run, name, content, sentence):
    path = run.path / "policies" / name
    whole = path.read_bytes()
    try:
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(T3DError, match=sentence):
            t3d.load(run.path / "policies" / "best-seed-3.safetensors")
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize(("field", "value"), [("hidden", [16]), ("obs_shape", [4]), ("action_low", "x"), ("extra", 1)])
def test_a_card_that_does_not_fit_is_a_sentence(run, tmp_path, field, value):
    for suffix in ("safetensors", "json"):
        source = run.path / "policies" / f"best-seed-3.{suffix}"
        (tmp_path / f"p.{suffix}").write_bytes(source.read_bytes())
    card = json.loads((tmp_path / "p.json").read_text())
    (tmp_path / "p.json").write_text(json.dumps({**card, field: value}))
    with pytest.raises(T3DError, match="does not describe"):
        t3d.load(tmp_path / "p.safetensors")
