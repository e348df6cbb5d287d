"""The package against an independent TD3 (`oracle.py`): same weights, batches and noise, every tensor compared."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from oracle import Eye, Oracle, layers_of

from t3d import T3D, rng, steps
from t3d.layout import describe
from t3d.networks import Networks
from t3d.pixels.encoder import image_networks
from t3d.pixels.frame_stack import FrameStack
from t3d.replay import Batch
from t3d.rng import Purpose
from t3d.state_dict import tensors

OBS, ACTION, BATCH, HIDDEN = 5, 2, 32, (24, 16)
KNOBS = steps.Hyperparameters(gamma=0.97, tau=0.03, actor_lr=2e-3, critic_lr=3e-3)
ORACLE_KNOBS = {"gamma": 0.97, "tau": 0.03, "sigma": 0.2, "clip": 0.5, "delay": 2}


def draw_batch(source, limit=1.0):
    """s, a, r, s', done and standard normal noise, one agent's."""
    return (
        source.normal(size=(BATCH, OBS)),
        source.uniform(-limit, limit, size=(BATCH, ACTION)),
        source.normal(size=BATCH),
        source.normal(size=(BATCH, OBS)),
        (source.random(BATCH) < 0.3).astype(float),
        2 * source.normal(size=(BATCH, ACTION)),  # wide, so that both clips matter
    )


def as_batch(s, a, r, s2, done, dtype):
    """What the package samples, for one seed."""
    parts = [torch.tensor(x, dtype=dtype)[None] for x in (s, a, r, s2, done)]
    return Batch(*parts, torch.full_like(parts[2], KNOBS.gamma))


def train_both(updates, dtype, limit=1.0, critic_norm=False):
    """An agent and an oracle after the same updates."""
    networks = Networks(critic_norm=critic_norm)
    agent = steps.init_agent(torch.tensor([7]), OBS, ACTION, HIDDEN, dtype, networks)
    oracle = Oracle(
        layers_of(agent.actor, 0),
        [layers_of(agent.critic, 0, 0), layers_of(agent.critic, 1, 0)],
        actor_lr=KNOBS.actor_lr,
        critic_lr=KNOBS.critic_lr,
        max_action=limit,
    )
    source = np.random.default_rng(0)
    for update in range(1, updates + 1):
        *transitions, noise = draw_batch(source, limit)
        epsilon = torch.tensor(noise, dtype=dtype)[None]
        steps.learn(as_batch(*transitions, dtype), agent, epsilon, KNOBS, update % 2 == 0, limit)
        oracle.update(*transitions, noise, **ORACLE_KNOBS)
    return tensors(agent), oracle.tensors()


def distance(tensor, expected):
    """‖a − b‖ / ‖b‖, or ‖a‖ where b is zero."""
    norm = np.linalg.norm(expected)
    return np.linalg.norm(tensor.double().numpy() - expected) / (norm if norm else 1.0)


def assert_equal(ours, theirs, weights=1e-9, moments=1e-9):
    ours = {name: tensor for name, tensor in ours.items() if name != "seeds"}
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tuple(tensor.shape) == theirs[name].shape, name
        limit = moments if "adam" in name else weights
        assert distance(tensor, theirs[name]) <= limit, (name, distance(tensor, theirs[name]))


@pytest.mark.parametrize("limit", [1.0, 3.0])
@pytest.mark.parametrize("updates", [1, 2, 3, 50])
def test_float64(updates, limit):
    assert_equal(*train_both(updates, torch.float64, limit))


@pytest.mark.parametrize("updates", [1, 2, 50])
def test_critics_with_normalised_layers(updates):
    ours, theirs = train_both(updates, torch.float64, critic_norm=True)
    assert "critic.gain2" in ours and (updates == 1 or not (ours["target_critic.gain1"] == 1).all())
    assert_equal(ours, theirs)


def test_float32_after_one_update():
    assert_equal(*train_both(1, torch.float32), weights=1e-5, moments=1e-5)


def test_float32_after_fifty_updates():
    assert_equal(*train_both(50, torch.float32), weights=1e-3, moments=2e-2)


@pytest.mark.parametrize("max_action", [1.0, 3.0])
@pytest.mark.parametrize(
    ("updates", "dtype", "weights", "moments"),
    [
        (1, torch.float64, 1e-9, 1e-9),
        (2, torch.float64, 1e-9, 1e-9),
        (3, torch.float64, 1e-9, 1e-9),
        (50, torch.float64, 1e-9, 1e-9),
        (1, torch.float32, 1e-5, 1e-5),
        (50, torch.float32, 1e-3, 2e-2),
    ],
)
def test_documents_class(updates, dtype, weights, moments, max_action):
    torch.manual_seed(3)
    policy = T3D(OBS, ACTION, max_action, hidden=HIDDEN, actor_lr=2e-3, critic_lr=3e-3, dtype=dtype)
    agent = policy._agent
    oracle = Oracle(
        layers_of(agent.actor, 0),
        [layers_of(agent.critic, 0, 0), layers_of(agent.critic, 1, 0)],
        actor_lr=2e-3,
        critic_lr=3e-3,
        max_action=max_action,
    )
    source = np.random.default_rng(1)
    batches = [draw_batch(source, max_action)[:5] for _ in range(updates)]

    class Buffer:
        def __init__(self):
            self.queue = list(batches)

        def sample(self, batch_size):
            s, a, r, s2, done = self.queue.pop(0)
            return s, s2, a, r[:, None], done[:, None]

    # In two calls: the delay and the noise go on where the first one stopped.
    buffer, first = Buffer(), updates // 3
    for iterations in (first, updates - first):
        policy.train(buffer, iterations, BATCH, 0.97, 0.03, 0.9, 1.1, 2)
    for i, transitions in enumerate(batches):
        noise = rng.normal(agent.seeds, Purpose.SMOOTHING, i, (BATCH, ACTION), dtype)[0].double().numpy()
        oracle.update(*transitions, noise, gamma=0.97, tau=0.03, sigma=0.9, clip=1.1, delay=2)
    assert_equal(tensors(agent), oracle.tensors(), weights, moments)


@pytest.mark.parametrize("numbers", [0, 2])
@pytest.mark.parametrize("encoder", ["separate", "critic"])
def test_networks_that_see(encoder, numbers):
    """Two layers of convolutions over two frames, with and without numbers beside them: every tensor, five updates."""
    parts = {"camera": spaces.Box(0, 255, (13, 22, 3), np.uint8), "numbers": spaces.Box(-1, 1, (numbers,))}
    frame_stack = FrameStack.of(describe(spaces.Dict(parts), "x"), 2)
    networks = image_networks(frame_stack, encoder)
    agent = steps.init_agent(torch.tensor([7]), frame_stack.dim, ACTION, HIDDEN, torch.float64, networks)
    whose = "critic.encoder." if encoder == "critic" else "encoder."
    of_critics = [encoder_of(agent.critic, "encoder.", twin, 0) for twin in (0, -1)]
    eyes = [encoder_of(agent.actor, whose, 0), *of_critics]
    heads = [head_of(agent.actor, 0), head_of(agent.critic, 0, 0), head_of(agent.critic, 1, 0)]
    actor, *critics = (eye + head for eye, head in zip(eyes, heads, strict=True))
    eye = Eye(len(eyes[0]), 2, 13, 22, 3, shared=encoder == "critic")
    rates = {"actor_lr": KNOBS.actor_lr, "critic_lr": KNOBS.critic_lr}
    oracle = Oracle(actor, critics, eye=eye, **rates)
    source = np.random.default_rng(0)
    for update in range(1, 6):
        s, a, r, s2, done, noise = draw_batch(source)
        s, s2 = (np.concatenate([source.integers(0, 256, (BATCH, eye.pixels)), x[:, :numbers]], 1) for x in (s, s2))
        epsilon = torch.tensor(noise)[None]
        steps.learn(as_batch(s, a, r, s2, done, torch.float64), agent, epsilon, KNOBS, update % 2 == 0)
        oracle.update(s, a, r, s2, done, noise, **ORACLE_KNOBS)
    ours, theirs = tensors(agent), oracle.tensors()
    assert ours.keys() - {"seeds"} == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_allclose(ours[name].numpy(), tensor, rtol=1e-8, atol=1e-10, err_msg=name)


def encoder_of(parameters, prefix, *index):
    return layers_of(
        {name.removeprefix(prefix): t for name, t in parameters.items() if name.startswith(prefix)}, *index
    )


def head_of(parameters, *index):
    return layers_of({name: tensor for name, tensor in parameters.items() if "." not in name}, *index)
