"""One text, several ways to run it: each agrees with the independent TD3 in float64, and the choice is written down."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import Oracle, layers_of
from test_oracle import assert_equal

import t3d
from t3d import networks, steps
from t3d.agent import explore, one_seed
from t3d.config import Config, resolve
from t3d.learners import CannotCompile, LearnerState, make_learner
from t3d.learners.compiled import first_working
from t3d.networks import MLP, Networks
from t3d.normalizer import Scaling
from t3d.replay import Replay, Transitions
from t3d.state_dict import tensors, with_tensors
from t3d.steps import init_agent
from t3d.torch_private import has_avx512_bf16

OBS, ACTION, BATCH, HIDDEN, SEEDS = 5, 2, 32, (24, 16), [7, 3]
CONFIG = Config(
    gamma=0.97, tau=0.03, actor_lr=2e-3, critic_lr=3e-3, batch_size=BATCH, hidden=HIDDEN, num_envs=3, device="cpu"
)


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
MODES = pytest.mark.parametrize(
    "mode, device",
    [("eager", "cpu"), ("compile", "cpu")]
    + [pytest.param(mode, "cuda", marks=NO_GPU) for mode in ("eager", "compile", "graph")],
)


def filled_memory(device="cpu", normalize=False):
    source = np.random.default_rng(0)
    memory = Replay(len(SEEDS), 200, OBS, ACTION, device=device, normalize=normalize)
    shape = (len(SEEDS), 150)
    obs, next_obs = source.normal(size=(2, *shape, OBS))
    action, reward = source.uniform(-1, 1, (*shape, ACTION)), source.normal(size=shape)
    terminated, span = source.random(shape) < 0.3, source.integers(1, 4, shape)
    memory.add(Transitions(obs, action, reward, next_obs, terminated, span, np.ones(shape, bool)))
    return memory


def learner_of(agent, memory, config):
    sums = {name: torch.zeros(len(SEEDS), device=config.device) for name in steps.METRICS + steps.POLICY_METRICS}
    try:
        return make_learner(LearnerState(agent, memory, sums), config), sums
    except CannotCompile as error:
        pytest.skip(str(error))


def on_cpu(agent):
    return with_tensors(agent, {name: tensor.cpu() for name, tensor in tensors(agent).items()})


def oracle_of(agent):
    twins = [layers_of(agent.critic, 0, 0), layers_of(agent.critic, 1, 0)]
    return Oracle(layers_of(agent.actor, 0), twins, actor_lr=2e-3, critic_lr=3e-3, max_action=1.0)


@pytest.mark.parametrize("train_freq", ["step", "episode"])
@MODES
def test_fifty_updates_agree_with_the_oracle(mode, device, train_freq):
    whole = train_freq == "step"  # with normalised observations; by themselves with normalised layers
    networks = MLP if whole else Networks(critic_norm=True)
    agent = init_agent(torch.tensor(SEEDS, device=device), OBS, ACTION, HIDDEN, networks=networks)
    memory = filled_memory(device, normalize=whole)
    config = replace(CONFIG, accelerate=mode, device=device, train_freq=train_freq)
    learner, sums = learner_of(agent, memory, config)
    before = {name: tensor.clone() for name, tensor in tensors(agent).items()}
    oracles = [oracle_of(on_cpu(one_seed(agent, k))) for k in range(len(SEEDS))]
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in tensors(agent).items()
    )  # getting ready changes none
    for update in range(1, 51):
        bits, noise = steps.draw(agent, BATCH, ACTION)
        batch = memory.sample(bits, config.gamma)
        for k, oracle in enumerate(oracles):
            parts = (batch.obs, batch.action, batch.reward, batch.next_obs, batch.terminated, noise, batch.discount)
            s, a, r, s2, done, epsilon, discount = (part[k].double().cpu().numpy() for part in parts)
            oracle.update(s, a, r, s2, done, epsilon, gamma=discount, tau=0.03, sigma=0.2, clip=0.5, delay=2)
        for k in range(1 if train_freq == "step" else len(SEEDS)):
            learner.update(k, policy_step=update % 2 == 0)
    for k, oracle in enumerate(oracles):
        assert_equal(tensors(on_cpu(one_seed(agent, k))), oracle.tensors(), weights=1e-3, moments=2e-2)
    assert (sums["critic_loss"] > 0).all() and (sums["q_mean"] != 0).all() and (sums["actor_loss"] != 0).all()


@MODES
def test_exploring_is_the_same_in_every_mode(mode, device):
    agent, memory = init_agent(torch.tensor(SEEDS, device=device), OBS, ACTION, HIDDEN), filled_memory(device, True)
    learner, _ = learner_of(agent, memory, replace(CONFIG, accelerate=mode, device=device))
    agent, scaling = on_cpu(agent), Scaling(*(part.cpu() for part in vars(memory.scaling()).values()))
    obs = np.random.default_rng(1).normal(size=(len(SEEDS), 3, OBS)).astype(np.float32)
    first, second = learner.act(obs, 4)(), learner.act(2 * obs, 5)()
    assert first.dtype == np.float32 and first.shape == (len(SEEDS), 3, ACTION)
    np.testing.assert_allclose(first, explore(agent, torch.tensor(obs), 4, 0.1, scaling), atol=1e-5)
    np.testing.assert_allclose(second, explore(agent, torch.tensor(2 * obs), 5, 0.1, scaling), atol=1e-5)


@MODES
def test_storing_is_the_same_in_every_mode(mode, device):
    memory, simple = Replay(2, 7, OBS, ACTION, device=device), Replay(2, 7, OBS, ACTION)
    for tensor in (memory.rows, simple.rows):
        tensor.zero_()
    agent = init_agent(torch.tensor(SEEDS, device=device), OBS, ACTION, HIDDEN)
    learner, _ = learner_of(agent, memory, replace(CONFIG, accelerate=mode, device=device))
    source = np.random.default_rng(2)
    for _ in range(9):
        rows = some_rows(source, 3, source.normal(size=(2, 3, ACTION)))
        learner.store(rows)
        simple.add(rows)
    learner.flush()
    assert memory.stored.tolist() == simple.stored.tolist() and memory.length.tolist() == simple.length.tolist()
    assert torch.equal(memory.rows[:, :7].cpu(), simple.rows[:, :7])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which records by itself")
def test_recording_as_far_as_it_goes_without_a_gpu(graphs_on_cpu, monkeypatch):
    """The same order of things, without the kernels for GPUs."""
    plain = {"plain layers": lambda _: networks.mlp}
    monkeypatch.setattr("t3d.learners.cudagraph.gpu_backends", lambda state, config: plain)
    ends = {}
    for mode in ("eager", "graph"):
        config = replace(CONFIG, accelerate=mode, n_step=2)
        agent, memory = init_agent(torch.tensor(SEEDS), OBS, ACTION, HIDDEN), filled_memory(normalize=True)
        learner, sums = learner_of(agent, memory, config)
        assert memory.length.tolist() == [150, 150] and not agent.updates.any()  # getting ready changes none
        source = np.random.default_rng(5)
        for step in range(8):
            action = learner.act(source.normal(size=(2, 3, OBS)).astype(np.float32), step)
            if step % 3:
                learner.update(0, policy_step=step % 2 == 0)
            learner.store(some_rows(source, 6, action()[:, [0, 1, 2, 0, 1, 2]]))
            if step == 5:
                learner.store(some_rows(source, 6, action()[:, [0, 1, 2, 0, 1, 2]]))  # before the last were sent
            if step == 6:  # what is stored already is not stored again with the next observations
                learner.flush()
                memory.add(some_rows(source, 20, source.normal(size=(2, 20, ACTION))))
        learner.flush()
        rows = torch.cat([memory.rows[k, : memory.length[k]] for k in range(len(SEEDS))])
        ends[mode] = {**tensors(agent), **sums, **tensors(memory), "rows": rows}
    for name, tensor in ends["eager"].items():  # by their norms: Adam makes much of a small gradient's rounding
        assert (ends["graph"][name] - tensor).double().norm() <= 1e-4 * tensor.double().norm() + 1e-6, name


def test_where_kernels_do_not_work_plain_layers_do():
    def compile_with(backend):
        return backend() + 1

    def broken():
        raise ValueError("no such thing\nat line 7")

    with pytest.warns(UserWarning, match=r"^kernels do not work on this machine \(ValueError: no such thing\)\.$"):
        assert first_working(compile_with, {"kernels": broken, "plain layers": lambda: 1}) == 2
    with pytest.raises(CannotCompile, match="ValueError: no such thing"):  # said once, by whoever goes on without
        first_working(compile_with, {"plain layers": broken})


def some_rows(source, count, action):
    obs, next_obs = source.normal(size=(2, 2, count, OBS))
    numbers = source.normal(size=(3, 2, count))
    return Transitions(obs, action, numbers[0], next_obs, numbers[1] > 0, numbers[2], numbers[0] > -1)


def test_bfloat16_is_for_products_alone():
    if not has_avx512_bf16():
        pytest.skip("this processor has no bfloat16")
    agents_after = {}
    for precision in ("fp32", "bf16"):
        agent = init_agent(torch.tensor(SEEDS), OBS, ACTION, HIDDEN)
        learner, _ = learner_of(agent, filled_memory(), replace(CONFIG, accelerate="eager", precision=precision))
        for update in range(1, 11):
            learner.update(0, policy_step=update % 2 == 0)
        agents_after[precision] = tensors(agent)
    exact, rounded = agents_after["fp32"], agents_after["bf16"]
    for name, tensor in rounded.items():
        assert tensor.dtype == exact[name].dtype, name
        if "adam" not in name and name != "seeds":
            assert 0 < (tensor - exact[name]).norm() / exact[name].norm() < 0.05, name


def test_short_runs_never_wait_for_a_compiler():
    def mode(**settings):
        return resolve(Config(device="cpu", **settings), "td3", "HalfCheetah-v5", 1).accelerate

    assert mode(steps=10_000) == "eager" and mode(steps=1_000_000) == "compile"
    assert mode(steps=10_000, updates_per_step=20) == "compile"
    assert mode(steps=1_000_000, accelerate="eager") == "eager"


def test_what_the_hardware_cannot_is_refused(monkeypatch):
    with pytest.raises(t3d.T3DError, match="--accelerate graph is for NVIDIA GPUs"):
        resolve(Config(device="cpu", accelerate="graph"), "td3", "Pendulum-v1", 1)
    with pytest.raises(t3d.T3DError, match="tf32 is for NVIDIA GPUs"):
        resolve(Config(device="cpu", precision="tf32"), "td3", "Pendulum-v1", 1)
    monkeypatch.setattr("t3d.config.has_avx512_bf16", lambda: False)
    with pytest.raises(t3d.T3DError, match="bf16: this CPU has no AVX512-BF16"):
        resolve(Config(device="cpu", precision="bf16"), "td3", "Pendulum-v1", 1)


def test_without_a_compiler_it_says_so_once_and_goes_on(tmp_path):
    command = ["-m", "t3d", "train", "Pendulum-v1", "--steps", "250", "--accelerate", "compile", "--out", "run"]
    command += ["--hidden", "8", "--batch-size", "8", "--eval-episodes", "1", "--device", "cpu"]
    environment = {**os.environ, "CXX": "/bin/false", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cannot be compiled here") == 1
    assert json.loads((tmp_path / "run" / "config.json").read_text())["accelerate"] == "eager"


def test_the_algorithm_knows_nothing_of_how_it_is_run():
    text = (Path(t3d.__file__).parent / "steps.py").read_text().lower()
    assert not re.search(r"compil|\bgraph|device|stream|cuda|autocast", text)
