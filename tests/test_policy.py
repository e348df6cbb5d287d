"""Policies on the disk and in the hand; evaluations that can be had again."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scripted import Probe

import t3d
from t3d import Actor, T3DError, files, rng
from t3d.cli import main
from t3d.config import Config
from t3d.envs import env_factory
from t3d.errors import T3DWarning
from t3d.evaluate.evaluator import Evaluator, PolicySnapshot
from t3d.networks import MLP
from t3d.rng import Purpose

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


def resealed(source, path, remove=(), **changes):
    """A policy file with another card, and a checksum that fits it: somebody's work, not damage."""
    layers, about = files.unseal(source.read_bytes(), source)
    card = {**json.loads(about["card"]), **changes}
    layers = {name: tensor for name, tensor in layers.items() if name not in remove}
    path.write_bytes(files.seal(layers, {"card": json.dumps(card)}))
    return path


def test_the_card_is_in_the_file_and_the_json_beside_it_is_a_copy(run, tmp_path):
    source = run.path / "policies" / "best-seed-3.safetensors"
    (tmp_path / "p.safetensors").write_bytes(source.read_bytes())
    (tmp_path / "p.json").write_text("{")
    assert t3d.load(tmp_path / "p.safetensors").card == run.policy(3).card
    assert json.loads(source.with_suffix(".json").read_text())["returns"] == run.policy(3).card.returns


def test_another_seeds_policy_under_this_name(run):
    path, other = (run.policy_path(seed, "last") for seed in (3, 8))
    whole = path.read_bytes()
    try:
        path.write_bytes(other.read_bytes())
        with pytest.raises(T3DError, match="holds the policy of seed 8, not of seed 3"):
            run.policy(3, "last")
    finally:
        path.write_bytes(whole)
    with pytest.raises(T3DError, match="no 'worst' policy"):
        run.policy(3, "worst")


def test_a_torn_last_row_is_left_out_and_a_wrong_one_named(run, tmp_path):
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes((run.path / name).read_bytes())
    rows = len(run.metrics)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "evalu')
    with pytest.warns(T3DWarning, match="is cut off after 15 bytes"):
        assert len(t3d.Run(tmp_path).metrics) == rows
    (tmp_path / "metrics.jsonl").write_text("[1]\n")
    with pytest.raises(T3DError, match="line 1: the checksum does not match"):
        t3d.Run(tmp_path).evaluations  # noqa: B018


def test_no_time_and_no_host_in_a_policy(run):
    card = json.loads((run.path / "policies" / "best-seed-3.json").read_text())
    assert card.keys() == {
        "format", "env", "seed", "step", "returns", "lengths", "layout", "action_low", "action_high",
        "action_dtype", "hidden", "network", "stack", "run",
    }  # fmt: skip


@pytest.mark.parametrize("which", ["best", "last"])
@pytest.mark.parametrize("seeds", [[], ["--seed", "8"]])
@pytest.mark.parametrize("episodes", [[], ["--episodes", "2"], ["--episodes", "5"]])
def test_evaluate_gives_the_recorded_scores_again(run, which, seeds, episodes, capsys):
    main(["evaluate", str(run.path), "--policy", which, *seeds, *episodes])
    text = capsys.readouterr().out
    assert text.count("yes") == (1 if seeds else 2) and "no:" not in text


class Recorder(Probe):
    """Notes the seeds it is reset with and the actions it is given; an episode lasts four steps."""

    seeds, actions = [], []

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        self.time = 0
        return super().reset(seed=seed)

    def first(self):
        return self.random_sign() * self.np_random.random(dtype=np.float32)

    def step(self, action):
        self.actions.append(float(action[0]))
        self.time += 1
        return self.obs, float(self.obs[0]), self.time == 4, False, {}


@pytest.fixture
def recorded():
    """An evaluator over two seeds and three episodes each, and its actors."""
    Recorder.seeds, Recorder.actions = [], []
    evaluator = Evaluator(env_factory(Recorder), [3, 8], Config(eval_episodes=3))
    return evaluator, PolicySnapshot(MLP, MLP.init_actor(torch.tensor([3, 8]), 1, 1, (8,), torch.float32))


def test_an_evaluation_is_the_actor_without_noise(recorded):
    evaluator, snapshot = recorded
    obs = evaluator.envs.reset().reshape(2, 3, 1)
    Recorder.seeds.clear()
    evaluation = evaluator.run(snapshot)
    expected = 2 * MLP.actor(snapshot.actor, torch.from_numpy(obs)).flatten()
    assert Recorder.actions == pytest.approx(expected.tolist() * 4, abs=1e-6)
    np.testing.assert_allclose(evaluation.returns, 4 * obs[..., 0], rtol=1e-6)
    assert (evaluation.lengths == 4).all()


def test_evaluation_episodes_have_seeds_of_their_own(recorded):
    evaluator, snapshot = recorded
    evaluator.run(snapshot)
    expected = [rng.integer(seed, Purpose.EVALUATION, episode) for seed in (3, 8) for episode in range(3)]
    assert Recorder.seeds[:6] == expected
    training = {rng.integer(seed, Purpose.EPISODE, episode) for seed in (3, 8) for episode in range(50)}
    assert not training & set(expected)


def test_further_episodes_are_new_and_the_same_ones_are_the_same(recorded):
    evaluator, snapshot = recorded
    first, more, again = (evaluator.run(snapshot, start).returns for start in (0, 3, 0))
    assert (first == again).all() and not set(first.flatten()) & set(more.flatten())
    Recorder.seeds.clear()
    evaluator.run(snapshot, 3)
    assert Recorder.seeds[:3] == [rng.integer(3, Purpose.EVALUATION, episode) for episode in (3, 4, 5)]


def test_the_best_policy_is_the_best(run):
    for seed in (3, 8):
        rows = [row for row in run.evaluations if row["seed"] == seed]
        best = max(rows, key=lambda row: row["mean"])
        assert run.policy(seed).card.step == best["step"] and run.policy(seed).card.returns == best["returns"]
        assert run.policy(seed, "last").card.step == 400


def test_the_best_policy_stays_when_a_later_one_is_worse(tmp_path):
    class Worse(Probe):
        """Every evaluation scores less than the one before."""

        scores = iter(range(100, 0, -1))

        def step(self, action):
            return self.obs, float(next(self.scores)), True, False, {}

    run = t3d.train(Worse, out=tmp_path / "run", **{**KNOBS, "steps": 30, "random_steps": 3, "eval_every": 10})
    assert run.policy(0).card.step == 0 and run.policy(0, "last").card.step == 30


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "damaged"),
        (b"\x80\x04cos\nsystem\n", "damaged"),
        (b"\x02\0\0\0\0\0\0\0{}", "no checksum"),
        (None, "cannot read"),
    ],
)
def test_a_corrupt_policy_is_a_sentence(run, tmp_path, content, sentence):
    path = tmp_path / "p.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(T3DError, match=sentence):
        t3d.load(path)


def test_a_policy_of_another_format_is_named(run, tmp_path):
    with pytest.raises(T3DError, match="has the format 99; this version reads 4"):
        t3d.load(resealed(run.policy_path(3, "best"), tmp_path / "p.safetensors", format=99))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden", [16]), ("layout", {"kind": "array", "shape": [4]}),
        ("layout", {"kind": "image", "shape": [10**5, 10**5, 3]}), ("stack", 0), ("stack", 10**6),
        ("layout", {"kind": "tree"}), ("layout", [3]), ("action_low", "x"), ("extra", 1), ("returns", [1]),
        ("returns", None), ("returns", ["1", "2", "3"]), ("hidden", [2**70]), ("hidden", [65536, 65536]),
        ("step", None), ("seed", "3"), ("action_dtype", "int8"), ("action_dtype", 5), ("action_high", [-9.0]),
        ("lengths", [1]),
    ],
)  # fmt: skip
def test_a_card_that_does_not_fit_is_a_sentence(run, tmp_path, field, value):
    resealed(run.policy_path(3, "best"), tmp_path / "p.safetensors", **{field: value})
    with pytest.raises(T3DError, match="does not describe"):
        t3d.load(tmp_path / "p.safetensors")


def test_a_policy_brings_its_normalisation_with_it(tmp_path, capsys):
    run = t3d.train("Pendulum-v1", seeds=2, out=tmp_path / "run", normalize_obs="on", **KNOBS)
    policy = t3d.load(run, seed=1, which="last")
    obs = np.array([0.5, -0.5, 6.0], np.float32)
    shift, scale = (part.numpy().reshape(-1) for part in vars(policy.scaling).values())
    assert scale[2] < 0.5  # velocities are large
    seen = torch.tensor(((obs - shift) * scale).clip(-10, 10))[None, None]
    np.testing.assert_allclose(policy(obs), 2 * MLP.actor(policy.parameters, seen)[0, 0], rtol=1e-5)
    main(["evaluate", str(run.path), "--policy", "last"])
    assert capsys.readouterr().out.count("yes") == 2  # as recorded: the statistics were frozen, and are the same
    path = resealed(run.policy_path(1, "last"), tmp_path / "p.safetensors", remove=["obs.scale"])
    with pytest.raises(T3DError, match=r"instead of obs\.shift and obs\.scale"):
        t3d.load(path)


def test_what_is_not_finite_is_refused_by_policies(run):
    policy = t3d.load(run)
    for obs, told in (([0, np.nan, 0], r"observation\[1\] is nan"), ([[0, 0, 0], [0, 0, -np.inf]], "is -inf")):
        with pytest.raises(T3DError, match=told):
            policy(obs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(run, tmp_path, bad):
    source = run.policy_path(3, "best")
    layers, about = files.unseal(source.read_bytes(), source)
    layers["layer_2.weight"][1, 2] = bad
    (tmp_path / "p.safetensors").write_bytes(files.seal(layers, about))
    with pytest.raises(T3DError, match="not finite"):
        t3d.load(tmp_path / "p.safetensors")
