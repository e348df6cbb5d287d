"""Observations with images: what is seen, stored once, put together again, and learned from."""

import sys
from dataclasses import replace
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from safetensors.torch import load_file
from scripted import Dot, Lamp, Shown, Sweep

import t3d
from t3d.config import Config, resolve
from t3d.envs import env_factory
from t3d.errors import T3DError
from t3d.layout import describe, flatten
from t3d.learners import make_learner
from t3d.normalizer import normalize
from t3d.pixels.encoder import image_networks
from t3d.pixels.frame_stack import FrameStack
from t3d.pixels.frame_store import FrameStore
from t3d.replay import Replay
from t3d.run_state import RunSetup
from t3d.state_dict import state_dict, tensors
from t3d.trainer import Trainer

SMALL = {"hidden": (16,), "batch_size": 8, "random_steps": 10, "device": "cpu", "accelerate": "eager", "augment": "off"}


def begin(env, seeds=(3, 5), **settings):
    """A trainer in this environment; its actions are random at first."""
    config = resolve(Config(**{**SMALL, "steps": 300, **settings}), "td3", "x", len(seeds))
    return Trainer.in_memory(RunSetup(env_factory(env).seen(config.pixels, config.frame_stack), list(seeds), config))


def train(trainer):
    """To the last step."""
    while trainer.state.step < trainer.config.steps:
        trainer.step()
    trainer.state.close()


def memory_after(env, steps, **settings):
    """The replay memory after so many steps with random actions."""
    trainer = begin(env, **{"random_steps": 1999, "steps": 2000, **settings})
    for _ in range(steps):
        trainer.step()
    trainer.state.close()
    return trainer.state.learner.memory


# ------------------------------------------------------------------------------------------ what is seen


def test_pictures_are_told_from_tables():
    def kind(shape, dtype=np.uint8):
        return describe(spaces.Box(0, 255, shape, dtype), "x")["kind"]

    shapes = ((8, 9), (64, 48, 3), (3, 64, 48), (84, 84, 12), (9, 84, 84))
    assert [kind(shape) for shape in shapes] == ["image"] * 5
    assert FrameStack.of(describe(spaces.Box(0, 255, (9, 84, 80), np.uint8), "x"), 1).channels == 9
    assert kind((4, 4)) == kind((7, 2, 2)) == kind((84, 84), np.float32) == kind((100,)) == "array"
    for shape in ((4, 84, 84, 3), (8, 3, 84)):
        with pytest.raises(T3DError, match="one at a time"):
            kind(shape)


def test_channels_that_come_first_are_put_last():
    last = np.random.default_rng(0).integers(0, 256, (9, 11, 3), dtype=np.uint8)
    first = np.moveaxis(last, 2, 0)
    layouts = [describe(spaces.Box(0, 255, image.shape, np.uint8), "x") for image in (last, first)]
    assert (flatten(layouts[0], last) == flatten(layouts[1], first)).all()
    assert all((s.height, s.width, s.channels) == (9, 11, 3) for s in (FrameStack.of(layout, 2) for layout in layouts))


def test_pictures_of_one_observation_are_seen_on_top_of_each_other():
    both = spaces.Dict(
        {
            "a": spaces.Box(0, 255, (8, 8, 3), np.uint8),
            "b": spaces.Box(-1, 1, (2,)),
            "c": spaces.Box(0, 255, (8, 8), np.uint8),
        }
    )
    frame_stack = FrameStack.of(describe(both, "x"), 3)
    assert (frame_stack.channels, frame_stack.frame_size, len(frame_stack.numbers), frame_stack.dim) == (
        4,
        256,
        2,
        3 * 256 + 2,
    )
    both["c"] = spaces.Box(0, 255, (9, 8), np.uint8)
    with pytest.raises(T3DError, match="must have one size"):
        FrameStack.of(describe(both, "x"), 3)


def test_a_picture_in_floats_is_refused():
    layout = describe(spaces.Box(0, 255, (8, 8, 3), np.uint8), "x")
    with pytest.raises(ValueError, match="not uint8"):
        flatten(layout, np.zeros((8, 8, 3), np.float32))


# ------------------------------------------------------------------------------------------ what is stored


def told(frames):
    """Copy, episode and step of frames (…, 64) of `Shown`."""
    return frames[..., 0], frames[..., 1], frames[..., 2] + 256 * frames[..., 3]


def check_samples(memory, n, numbers=False):
    """Every row that can be drawn shows frames of one copy and one episode, one step apart, as they were seen."""
    bits = (torch.arange(1000) * 2**32 // 1000).expand(2, -1)
    batch = memory.sample(bits, 0.9)
    span = (torch.log(batch.discount) / np.log(0.9)).round()
    obs, next_obs = (part[..., : 3 * 64].view(2, 1000, 3, 64) for part in (batch.obs, batch.next_obs))
    copy, episode, time = told(obs)
    next_copy, next_episode, next_time = told(next_obs)
    now, ago = time[..., -1], torch.tensor([2, 1, 0])
    # Never across an episode's border.
    assert (copy == copy[..., -1:]).all() and (next_copy == copy[..., -1:]).all()
    assert (episode == episode[..., -1:]).all() and (next_episode == episode[..., -1:]).all()
    assert (time == (now[..., None] - ago).clamp(min=0)).all()
    assert (next_time == ((now + span)[..., None] - ago).clamp(min=0)).all()
    reward = sum(0.9**i * (now + i + 1) * (i < span) for i in range(n))
    assert torch.allclose(reward, batch.reward, atol=1e-4)
    if numbers:
        assert (batch.obs[..., -1] == now).all() and (batch.next_obs[..., -1] == next_time[..., -1]).all()
    return {(int(c), int(e), int(t)) for c, e, t in zip(copy[0, :, 0], episode[0, :, 2], now[0], strict=True)}


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize(
    "envs, n, capacity", [(1, 1, 2000), (1, 1, 17), (2, 3, 40), (3, 1, 30), (4, 1, 90), (4, 3, 90)]
)
@pytest.mark.parametrize("lengths", [(3, 5, 4), (1,), (1, 40), (1, 9, 2, 6)])
def test_samples_are_exactly_what_was_seen(envs, n, capacity, lengths, numbers):
    settings = {"num_envs": envs, "n_step": n, "buffer_size": capacity, "gamma": 0.9}
    trainer = begin(partial(Shown, lengths, numbers=numbers), random_steps=1999, steps=2000, **settings)
    memory = trainer.state.learner.memory
    for step in range(120):
        trainer.step()
        if step % 10 == 9:
            drawn = check_samples(memory, n, numbers)
            # All rows that are there can be drawn; where episodes are of one step, near half of what would have room.
            assert len(drawn) == memory.length[0] >= min(int(memory.stored[0]), capacity) // 2 - memory.frames.apart
    trainer.state.close()


@pytest.mark.parametrize("envs, n", [(1, 1), (3, 2)])
def test_a_run_that_is_made_longer_finds_its_frames_again(envs, n, tmp_path):
    settings = {"num_envs": envs, "n_step": n, "gamma": 0.9, "random_steps": 299}
    short, long = (begin(partial(Shown, (2, 5, 1)), steps=steps, **settings) for steps in (300, 500))
    while short.state.step < 297:
        short.step()
    old, new = (trainer.state.learner.memory for trainer in (short, long))
    assert new.frames.places > old.frames.places < old.frames.stored.min()  # it has gone round
    for name, saved in state_dict(old).items():
        state_dict(new)[name].copy_(saved)
    for before, after in zip(old.rings(), new.rings(), strict=True):
        oldest = max(0, int(before.stored[0]) - before.capacity)
        after.put(oldest, before.since(oldest))
    pending = short.state.collector.n_step.obs.copy()
    new.restored(pending)
    assert check_samples(new, n) == check_samples(old, n)
    places = {new: pending[..., :3], old: short.state.collector.n_step.obs[..., :3]}
    if n > 1:
        seen = [memory.frames.pixels[0, where.astype(int)[:, 0]] for memory, where in places.items()]
        assert (seen[0][-1] == seen[1][-1]).all()
    short.state.close(), long.state.close()


def test_a_transition_costs_one_frame():
    frame_stack = FrameStack.of(describe(spaces.Box(0, 255, (84, 84, 3), np.uint8), "x"), 3)
    frames = FrameStore(frame_stack, 10_000, (2, 1), n_step=1, augment=False, device="cpu")
    memory = Replay(2, 10_000, frame_stack.stack, 6, frames=frames)
    small = memory.rows.shape[-1] * 4
    assert memory.nbytes / memory.capacity / 2 <= 1.05 * 84 * 84 * 3 + small + 8
    memory = memory_after(partial(Shown, (100,), side=16), 1900, buffer_size=1000)
    assert (memory.stored - memory.frames.lost == 1000).all()  # and none of them is lost


def test_shifted_pictures_are_the_pictures_shifted():
    memory = memory_after(partial(Shown, (3,), side=40), 50, augment="on")
    bits = (torch.arange(400) * 2**32 // 400).expand(2, -1) | (torch.arange(400) * 2654435761 % 2**31 << 32)
    assert memory.frames.shift == 2
    shifted = memory.sample(bits, 0.9)
    memory.frames.shift = 0
    plain = memory.sample(bits, 0.9)
    seen = set()
    for which in ("obs", "next_obs"):
        moved = getattr(shifted, which).view(-1, 3, 40, 40)
        padded = np.pad(getattr(plain, which).view(-1, 3, 40, 40).numpy(), ((0, 0), (0, 0), (2, 2), (2, 2)), "edge")
        for one, whole in zip(moved.numpy(), padded, strict=True):
            found = [(y, x) for y in range(5) for x in range(5) if (whole[:, y : y + 40, x : x + 40] == one).all()]
            assert found
            seen |= set(found)
    assert len(seen) == 25


# ------------------------------------------------------------------------------------------ what is learned


@pytest.mark.parametrize("encoder", ["critic", "separate"])
@pytest.mark.parametrize("probe, stack", [(Lamp, 1), (Sweep, 2)])
def test_probes(probe, stack, encoder):
    settings = {"steps": 1500, "random_steps": 400, "hidden": (32, 32), "batch_size": 32, "tau": 0.05, "gamma": 0.9}
    rates = {"actor_lr": 2e-4, "critic_lr": 3e-3, "exploration_noise": 0.4}
    trainer = begin(probe, frame_stack=stack, encoder=encoder, **settings, **rates)
    train(trainer)
    env, agent = probe(), trainer.state.learner.agent
    for side in (-1, 1):
        frames = [env.lit(side)] + [np.full((12, 12, 3), 255, np.uint8)] * (stack - 1)
        seen = torch.tensor(np.stack(frames), dtype=torch.float32).reshape(1, 1, -1).expand(2, -1, -1)
        action = 2 * agent.networks.actor(agent.actor, seen)
        assert ((action - side).abs() < 0.5).all(), (side, action)


def test_the_actor_sees_through_the_first_critic_and_changes_nothing_there():
    trainer = begin(Lamp, steps=40, encoder="critic")
    agent = trainer.state.learner.agent
    start = {name: tensor.clone() for name, tensor in agent.actor.items()}
    train(trainer)
    encoder = [name for name in agent.actor if name.startswith("critic.encoder.")]
    assert len(encoder) == 4
    for name in encoder:
        assert torch.equal(agent.actor[name], agent.critic[name.removeprefix("critic.")][0])
        assert not torch.equal(agent.actor[name], start[name])
        assert not agent.actor_adam.m[name].any()


def test_compiled_and_recorded_are_the_same(graphs_on_cpu):
    ends = {}
    for mode in ("eager", "compile", "graph"):
        Shown.copies = 0
        settings = {"augment": "on", "normalize_obs": "on", "num_envs": 2, "n_step": 2, "buffer_size": 30}
        trainer = begin(partial(Shown, numbers=True, side=20), steps=60, **settings)
        state, config = trainer.state, replace(trainer.config, accelerate=mode)
        trainer.learner = make_learner(state.learner, config)
        train(trainer)
        trainer.learner.flush()
        frames, memory = state.learner.memory.frames, tensors(state.learner.memory)
        names = ("frames.begin", "length", "statistics.mean")
        ends[mode] = {**tensors(state.learner.agent), **{name: memory[name] for name in names}}
        pixels = memory["frames.pixels"][:, : frames.places].float()
        ends[mode] |= {"rows": memory["rows"][:, :30], "frames.pixels": pixels}
    assert frames.stored.min() > frames.places  # frames were overwritten
    for mode in ("compile", "graph"):
        for name, tensor in ends["eager"].items():
            torch.testing.assert_close(ends[mode][name], tensor, rtol=2e-3, atol=2e-3, msg=f"{mode} {name}")


def test_seeds_side_by_side_do_not_disturb_each_other():
    ends = []
    for seeds in ((3, 5), (5,)):
        trainer = begin(Lamp, seeds, steps=40)
        train(trainer)
        critic = trainer.state.learner.agent.critic
        ends.append({name: tensor[..., -1:, :, :] for name, tensor in critic.items()})
    for name, tensor in ends[0].items():
        torch.testing.assert_close(ends[1][name], tensor, rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------------------------------ what is used


def test_a_policy_sees_frame_by_frame_what_a_batch_of_environments_shows(tmp_path):
    settings = {**SMALL, "eval_every": 60, "eval_episodes": 2, "normalize_obs": "on"}
    run = t3d.train(Dot, steps=60, out=tmp_path / "run", progress=False, **settings)
    policy = t3d.load(run, which="last")
    assert policy.card.stack == 3 and policy.scaling is not None
    batch = env_factory(Dot).seen(0, 3).batch(1, lambda env, episode: episode)
    seen, one, actions = batch.reset(), Dot(), []
    for episode in range(3):
        policy.reset()
        obs, over = one.reset(seed=episode)[0], False
        while not over:
            stacked = normalize(torch.from_numpy(seen)[None], policy.scaling)
            expected = policy.networks.actor(policy.parameters, stacked)[0].numpy()
            actions.append(policy(obs))
            assert np.allclose(actions[-1], expected[0], atol=1e-6)
            seen = batch.step(expected).obs
            obs, _, _, over, _ = one.step(actions[-1])
    assert len(np.unique(np.round(actions, 4))) > 5  # what is seen makes a difference
    batch.close()


def test_a_policy_takes_whole_stacks_and_forgets_on_reset(tmp_path):
    run = t3d.train(Lamp, steps=20, out=tmp_path / "run", progress=False, **{**SMALL, "eval_every": 20})
    policy = t3d.load(run)
    frames = np.random.default_rng(0).integers(0, 256, (3, 12, 12, 3), dtype=np.uint8)
    one_by_one = [policy(frame) for frame in frames][-1]
    assert (one_by_one == policy(frames)).all() and (policy(frames[None])[0] == one_by_one).all()
    policy.reset()
    assert (policy(frames[0]) == policy(np.stack([frames[0]] * 3))).all()
    for wrong in (frames[:2], np.concatenate([frames, frames]), frames[:, None], frames[None, None]):
        with pytest.raises(T3DError, match="stacks of 3 images"):
            policy(wrong)
    with pytest.raises(T3DError, match="not uint8"):
        policy(frames[0] / 255)
    with pytest.raises(T3DError, match="shape"):
        policy(frames[0][:5])


def test_weights_are_those_of_torch_modules(tmp_path):
    run = t3d.train(Lamp, steps=20, out=tmp_path / "run", progress=False, **{**SMALL, "eval_every": 20})
    policy = t3d.load(run)
    layers = load_file(run.policy_path(0, "best"))
    assert layers["encoder_1.weight"].shape == (32, 9, 3, 3)
    frames = torch.randint(0, 256, (3, 12, 12, 3))
    x = (frames / 255 - 0.5).permute(0, 3, 1, 2).reshape(1, 9, 12, 12)
    x = torch.nn.functional.conv2d(x, layers["encoder_1.weight"], layers["encoder_1.bias"], stride=2)
    x = torch.relu(x).flatten(1)
    x = x @ layers["encoder_2.weight"].T + layers["encoder_2.bias"]
    x = torch.tanh(torch.nn.functional.layer_norm(x, (50,)))
    x = torch.relu(x @ layers["layer_1.weight"].T + layers["layer_1.bias"])
    x = torch.tanh(x @ layers["layer_2.weight"].T + layers["layer_2.bias"])
    assert np.allclose(policy(frames.numpy().astype(np.uint8)), 2 * x[0].numpy(), atol=1e-5)


def test_a_vector_environment_with_pictures(tmp_path):
    for mode in gymnasium.vector.AutoresetMode:
        vector = gymnasium.vector.SyncVectorEnv([partial(Shown, (4,))] * 2, autoreset_mode=mode)
        run = t3d.train(vector, steps=60, out=tmp_path / mode.name, progress=False, **{**SMALL, "eval_every": 60})
        assert run.evaluations


@pytest.mark.parametrize("mode", gymnasium.vector.AutoresetMode)
def test_a_vector_environment_with_its_channels_first(mode):
    class First(Shown):
        def __init__(self):
            super().__init__((4,))
            self.observation_space = spaces.Box(0, 255, (3, 8, 9), np.uint8)

        def _seen(self):
            return np.stack([np.full((8, 9), 10 * channel + self.time, np.uint8) for channel in range(3)])

    vector = gymnasium.vector.SyncVectorEnv([First] * 2, autoreset_mode=mode)
    envs = env_factory(vector, eval_env=First).seen(0, 1).training_batch(2, lambda env, episode: 0)
    obs = envs.reset()
    for _ in range(11):
        assert (obs[:, :3] - obs[:, :1] == [0, 10, 20]).all()
        moved = envs.step(np.zeros((2, 1), np.float32))
        assert (moved.final_obs[:, :3] - moved.final_obs[:, :1] == [0, 10, 20]).all()
        obs = moved.obs
    envs.close()


def test_pendulum_from_pixels(tmp_path):
    pytest.importorskip("pygame")
    settings = {"pixels": 24, "batch_size": 32, "hidden": (64, 64), "random_steps": 500, "eval_episodes": 1}
    run = t3d.train("Pendulum-v1", steps=2000, out=tmp_path / "run", progress=False, eval_every=1000, **settings)
    assert [row["step"] for row in run.evaluations] == [0, 1000, 2000]
    assert t3d.load(run).card.layout == {"kind": "image", "shape": [24, 24, 3]}


def test_what_cannot_be_rendered_is_said_at_once(tmp_path, monkeypatch):
    with pytest.raises(T3DError, match="Lamp cannot be rendered"):
        t3d.train(Lamp, pixels=24, out=tmp_path / "run", progress=False)
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(T3DError, match=r"t3d\[pixels\]"):
        t3d.train("Pendulum-v1", pixels=24, out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_relabelling_pictures_is_refused():
    parts = {"observation": Lamp.observation_space}
    parts |= dict.fromkeys(("achieved_goal", "desired_goal"), spaces.Box(-1, 1, (2,)))

    class Goal(Lamp):
        observation_space = spaces.Dict(parts)
        compute_reward = print

    with pytest.raises(T3DError, match="has images"):
        begin(Goal, her=4)


def test_small_and_narrow_pictures_have_encoders():
    for shape in ((8, 8, 1), (8, 200, 3), (300, 9, 1), (100, 100, 4)):
        frame_stack = FrameStack.of(describe(spaces.Box(0, 255, shape, np.uint8), "x"), 2)
        networks = image_networks(frame_stack, "separate")
        actor = networks.init_actor(torch.tensor([0, 1]), frame_stack.dim, 2, (8,), torch.float32)
        assert networks.actor(actor, torch.zeros(2, 3, frame_stack.dim)).shape == (2, 3, 2)
