"""An algorithm of one's own: `t3d.steps` with functions replaced, or a module; trained, compiled, resumed, loaded."""

import functools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from killed import SMALL, end_of
from test_cli import failed
from test_steps import BATCH, filled_memory

import t3d
from t3d import algorithm, steps
from t3d.agent import one_seed
from t3d.cli import main
from t3d.config import Config, resolve
from t3d.envs import env_factory
from t3d.learners import CannotCompile, LearnerState, make_learner
from t3d.learners.compiled import is_steps_update
from t3d.run_state import RunSetup
from t3d.state_dict import tensors
from t3d.trainer import Trainer

SETTINGS = {**SMALL, "steps": 300, "seeds": (3, 8)}
CONFIG = Config(batch_size=BATCH, hidden=(24, 16), actor_lr=1e-3, critic_lr=1e-3, device="cpu")


def huber(q, y):
    distance = (q - y).abs()
    return torch.where(distance < 1, distance**2 / 2, distance - 1 / 2).mean(-1).sum(0)


HUBER = t3d.variant(squared_errors=huber)


def written_out():
    """The same variant as a module that a user wrote: `learn` in full, the other functions those of `t3d.steps`."""
    module = ModuleType("written_out")

    def learn(batch, agent, noise, hp, policy_step, limit=1.0):
        target_action = steps.act_target(agent, batch.next_obs, limit)
        next_action = steps.smooth(target_action, noise, hp.target_noise, hp.target_noise_clip, limit)
        target_q = steps.q_values(agent, agent.target_critic, batch.next_obs, next_action)
        smaller_q = steps.min_q(target_q)
        y = steps.bellman(batch.reward, batch.discount, batch.terminated, smaller_q)

        def critic_loss(critic):
            q = steps.q_values(agent, critic, batch.obs, batch.action)
            losses = huber(q, y)
            return losses.sum(), (losses, q)

        critic_update, actor_update = steps.update_critic(agent, critic_loss, hp.critic_lr), None
        if policy_step:
            actor_update = steps.update_actor(agent, batch.obs, hp.actor_lr, limit)
            steps.update_target_actor(agent, hp.tau)
            steps.update_target_critic(agent, hp.tau)
        parts = (batch, target_action, next_action, target_q, smaller_q, y, critic_update, actor_update)
        return steps.Update(*parts)

    def update(memory, agent, hp, batch_size, policy_step):
        bits, noise = steps.draw(agent, batch_size, memory.action_dim)
        return learn(memory.sample(bits, hp.gamma, hp.reward_scale), agent, noise, hp, policy_step)

    module.learn, module.update = learn, update
    for name in ("METRICS", "POLICY_METRICS", "init_agent", "draw", "is_policy_step"):
        setattr(module, name, getattr(steps, name))
    return module


def trained(module, seeds=(4, 9, 2), updates=50, accelerate="eager", dtype=torch.float64):
    """Agents after some updates on a filled replay memory."""
    agent = module.init_agent(torch.tensor(seeds), 4, 2, CONFIG.hidden, dtype)
    sums = {name: torch.zeros(len(seeds)) for name in module.METRICS + module.POLICY_METRICS}
    state = LearnerState(agent, filled_memory(seeds, dtype=dtype), sums, module)
    learner = make_learner(state, replace(CONFIG, accelerate=accelerate))
    for update in range(1, updates + 1):
        learner.update(0, module.is_policy_step(update, CONFIG.policy_delay))
    return agent, sums


def same(one, other):
    return all(torch.equal(tensor, tensors(other)[name]) for name, tensor in tensors(one).items())


# ------------------------------------------------------------------------------------------- what is given


def test_a_variant_is_the_steps_with_functions_replaced():
    q, y = torch.tensor([[[0.0, 3]], [[0, 0]]]), torch.tensor([[0.5, 0]])
    assert HUBER.squared_errors(q, y).tolist() == [(0.125 + 2.5) / 2 + 0.125 / 2]
    assert steps.squared_errors(q, y).tolist() == [(0.25 + 9) / 2 + 0.25 / 2]  # as it was
    assert HUBER.learn is not steps.learn and HUBER.learn.__globals__["squared_errors"] is huber
    assert HUBER.Update is steps.Update and HUBER.METRICS is steps.METRICS
    assert HUBER.__name__ == "t3d.steps with squared_errors=huber" and HUBER.__name__ not in sys.modules
    both = t3d.variant(squared_errors=huber, is_policy_step=lambda update, delay: True)
    assert both.is_policy_step(1, 2) and not HUBER.is_policy_step(1, 2)


def test_nothing_replaced_is_the_same_to_the_last_bit():
    assert same(trained(t3d.variant())[0], trained(steps)[0])


def test_what_is_no_algorithm_is_refused(tmp_path):
    with pytest.raises(t3d.T3DError, match=r"t3d.steps has no function 'square_errors'. Did you mean squared_errors"):
        t3d.variant(square_errors=huber)
    with pytest.raises(t3d.T3DError, match=r"t3d.steps has no function 'torch'"):
        t3d.variant(torch=huber)
    incomplete = ModuleType("incomplete")
    incomplete.update = incomplete.learn = None
    for given, sentence in (
        (incomplete, "it has no METRICS, POLICY_METRICS, init_agent, draw, is_policy_step. An algorithm is a module"),
        (huber, "it has no METRICS, POLICY_METRICS"),
        ("os", "algorithm='os': it has no METRICS"),
    ):
        with pytest.raises(t3d.T3DError, match=sentence) as problem:
            t3d.train("Pendulum-v1", out=tmp_path / "run", algorithm=given, **SETTINGS)
        assert "\n" not in str(problem.value)
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------- what it learns


def test_a_variant_learns_otherwise_and_the_same_written_out():
    variant, sums = trained(HUBER)
    plain, _ = trained(steps)
    assert not torch.equal(variant.critic["w1"], plain.critic["w1"])
    assert not torch.equal(variant.actor["w1"], plain.actor["w1"])
    other, other_sums = trained(written_out())
    assert same(variant, other) and all(torch.equal(sums[name], other_sums[name]) for name in sums)


@pytest.mark.parametrize("k", [0, 1, 2])
def test_a_seed_among_others_learns_as_if_alone(k):
    seeds = (4, 9, 2)
    together, alone = one_seed(trained(HUBER, seeds)[0], k), trained(HUBER, seeds[k : k + 1])[0]
    for name, tensor in tensors(alone).items():
        torch.testing.assert_close(tensors(together)[name], tensor, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("module", [HUBER, written_out()], ids=["variant", "module"])
def test_compiled_is_the_same_within_rounding(module):
    try:
        compiled, compiled_sums = trained(module, accelerate="compile", dtype=torch.float32)
    except CannotCompile as error:
        pytest.skip(str(error))
    eager, sums = trained(module, dtype=torch.float32)
    plain, plain_sums = trained(steps, dtype=torch.float32)
    for name in ("actor", "critic", "target_actor", "target_critic"):
        for key, tensor in getattr(eager, name).items():
            torch.testing.assert_close(getattr(compiled, name)[key], tensor, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(plain.critic["w2"], eager.critic["w2"], rtol=1e-3, atol=1e-4)
    for name, total in sums.items():
        torch.testing.assert_close(compiled_sums[name], total, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(plain_sums["critic_loss"], sums["critic_loss"], rtol=0.1)


def test_an_update_of_its_own_is_compiled_as_it_is():
    """Sampling is compiled by itself only where `update` is that of t3d.steps and calls what the module has."""
    reexported = ModuleType("reexported")
    vars(reexported).update(vars(steps), learn=HUBER.learn)  # its update calls t3d.steps.learn
    partial = ModuleType("partial")
    vars(partial).update(vars(steps), update=functools.partial(steps.update))
    found = [is_steps_update(module) for module in (steps, HUBER, written_out(), reexported, partial)]
    assert found == [True, True, False, False, False]
    assert not is_steps_update(t3d.variant(update=steps.update))


def test_its_own_metrics_and_rhythm_are_the_loops_too():
    module = written_out()
    module.METRICS = (*steps.METRICS, "y_mean")

    class Update(steps.Update):
        def metrics(self):
            return {**super().metrics(), "y_mean": self.y.mean(-1)}

    learn = module.learn
    module.update = lambda memory, agent, hp, size, policy_step: Update(
        *vars(_update(learn, memory, agent, hp, size, policy_step)).values()
    )
    module.is_policy_step = lambda update, delay: update % 5 == 0
    config = resolve(replace(CONFIG, steps=60, random_steps=10, accelerate="eager"), "td3", "Pendulum-v1", 1)
    trainer = Trainer.in_memory(RunSetup(env_factory("Pendulum-v1"), [3], config, algorithm=module))
    for _ in range(60):
        trainer.step()
    agent = trainer.state.learner.agent
    trainer.state.close()
    assert agent.critic_adam.count.tolist() == [50] and agent.actor_adam.count.tolist() == [10]
    assert trainer.training_rows(0.0)[0]["y_mean"] is not None


def _update(learn, memory, agent, hp, size, policy_step):
    bits, noise = steps.draw(agent, size, memory.action_dim)
    return learn(memory.sample(bits, hp.gamma, hp.reward_scale), agent, noise, hp, policy_step)


# ------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return t3d.train("Pendulum-v1", out=tmp_path_factory.mktemp("variant") / "run", algorithm=HUBER, **SETTINGS)


def test_a_run_names_it_and_is_another_run(run, tmp_path):
    assert run.config["algorithm"] == "t3d.steps with squared_errors=huber"
    plain = t3d.train("Pendulum-v1", out=tmp_path / "plain", **SETTINGS)
    assert plain.config["algorithm"] is None
    module = t3d.train("Pendulum-v1", out=tmp_path / "module", algorithm=written_out(), **SETTINGS)
    assert module.config["algorithm"] == "written_out"
    for which, equal in ((module, True), (plain, False)):
        theirs = [t3d.load(which, seed, "last").parameters for seed in (3, 8)]
        for seed, parameters in zip((3, 8), theirs, strict=True):
            ours = t3d.load(run, seed, "last").parameters
            assert all(torch.equal(tensor, parameters[name]) for name, tensor in ours.items()) == equal
    assert [row["returns"] for row in module.evaluations] == [row["returns"] for row in run.evaluations]


@pytest.mark.parametrize("settings", [{}, {"train_freq": "episode", "n_step": 3}], ids=["step", "episode"])
def test_stopped_and_resumed_is_undisturbed(settings, tmp_path, monkeypatch):
    whole = t3d.train("Pendulum-v1", out=tmp_path / "whole", algorithm=HUBER, **SETTINGS, **settings)
    start, left = Trainer.start_acting, [130]

    def start_and_stop(trainer):
        left[0] -= 1
        trainer.stop.requested |= left[0] <= 0
        return start(trainer)

    monkeypatch.setattr(Trainer, "start_acting", start_and_stop)
    parts = t3d.train("Pendulum-v1", out=tmp_path / "parts", algorithm=HUBER, **SETTINGS, **settings)
    assert max(int(path.name[5:]) for path in (parts.path / "checkpoints").iterdir()) == 130
    monkeypatch.setattr(Trainer, "start_acting", start)
    t3d.resume(parts, algorithm=t3d.variant(squared_errors=huber), progress=False)
    assert end_of(whole.path) == end_of(parts.path)


def test_without_it_nothing_goes_on(run, capsys, tmp_path):
    asked = (
        "was trained with the algorithm t3d.steps with squared_errors=huber, which files do not contain: use"
        " t3d.resume(run, algorithm=...) from Python."
    )
    with pytest.raises(t3d.T3DError) as problem:
        t3d.resume(run, 400, progress=False)
    assert asked in str(problem.value)
    assert asked in failed(capsys, "resume", run.path, "--steps", 400)
    assert "use t3d.train from Python" in failed(capsys, "train", "--config", run.path / "config.json")
    assert "algorithm=your_algorithm" in run.command("resume", steps=400)
    plain = t3d.train("Pendulum-v1", out=tmp_path / "plain", **SETTINGS)
    with pytest.raises(t3d.T3DError, match=r"was trained with t3d\.steps: leave algorithm out"):
        t3d.resume(plain, 400, algorithm=HUBER, progress=False)


def test_its_policies_are_loaded_and_played_without_it(run, capsys):
    policy = t3d.load(run)
    assert policy([1.0, 0, 0]).shape == (1,) and policy(np.zeros((5, 3))).shape == (5, 1)
    main(["evaluate", str(run.path), "--episodes", "1"])
    assert capsys.readouterr().out.count("yes") == 2  # both seeds as recorded


@pytest.mark.parametrize("name", ["os", "antigravity", "my.module:evil", ""])
def test_a_name_in_a_file_imports_nothing(name, capsys, tmp_path, monkeypatch):
    (tmp_path / "my").mkdir()
    for file in ("antigravity.py", "my/__init__.py", "my/module.py"):
        (tmp_path / file).write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    named = written_out()
    named.__name__ = name  # a whole run whose files say so, checksums and all
    whole = t3d.train("Pendulum-v1", out=tmp_path / "whole", algorithm=named, **SETTINGS)
    edited = t3d.train("Pendulum-v1", out=tmp_path / "edited", **SETTINGS)
    edited.write_config({**edited.config, "algorithm": name})
    for run, sentence in ((whole, "which files do not contain"), (edited, "no checkpoint of")):
        assert json.loads((run.path / "config.json").read_text())["algorithm"] == name
        with pytest.raises(t3d.T3DError, match=sentence):
            t3d.resume(run.path, 400, progress=False)
        assert sentence in failed(capsys, "resume", run.path, "--steps", 400)
        assert "which files do not contain" in failed(capsys, "train", "--config", run.path / "config.json")
    for seed in (3, 8):
        assert t3d.load(whole.path, seed)([1.0, 0, 0]).shape == (1,)
    assert not {"my", "my.module", "antigravity"} & sys.modules.keys()


def test_a_name_that_is_no_text_is_refused(tmp_path):
    run = t3d.train("Pendulum-v1", out=tmp_path / "run", **SETTINGS)
    run.write_config({**run.config, "algorithm": ["os"]})
    with pytest.raises(t3d.T3DError, match=r"algorithm cannot be \['os'\]"):
        t3d.resume(run.path, 400, progress=False)


def test_what_is_needed_is_what_the_package_uses():
    """Each name in NEEDED is used by the learners, the trainer or the run state; and no other one is."""
    used = set()
    for path in Path(t3d.__file__).parent.rglob("*.py"):
        used |= set(re.findall(r"\balgorithm\.([a-zA-Z]\w*)", path.read_text())) & set(vars(steps))
    assert used == set(algorithm.NEEDED)
