"""The documents' classes: names, shapes, argument order, and that a script written from them runs and learns."""

import copy
import pickle

import numpy as np
import pytest
import torch

from t3d import T3D, Actor, Critic, ReplayBuffer, T3DError
from t3d.state_dict import tensors


def filled_buffer(count=300, state_dim=3, action_dim=2, max_size=1e6):
    buffer, source = ReplayBuffer(max_size), np.random.default_rng(0)
    for i in range(count):
        s, s2 = source.normal(size=(2, state_dim))
        buffer.add((s, s2, source.uniform(-1, 1, action_dim), float(i), float(i % 5 == 0)))
    return buffer


def test_buffer_shapes_and_fields():
    states, next_states, actions, rewards, dones = filled_buffer().sample(7)
    assert states.shape == next_states.shape == (7, 3) and actions.shape == (7, 2)
    assert rewards.shape == dones.shape == (7, 1)
    assert all(isinstance(part, np.ndarray) for part in (states, next_states, actions, rewards, dones))
    assert ((rewards % 5 == 0) == (dones == 1)).all()


def test_buffer_keeps_transitions_together_and_precise():
    buffer = ReplayBuffer(max_size=50.0)
    for i in range(50):
        buffer.add(([i / 3, -i], [i / 3 + 1, i], [i / 7], i, False))
    states, next_states, actions, rewards, _ = buffer.sample(200)
    np.testing.assert_array_equal(states[:, :1], rewards / 3)
    np.testing.assert_array_equal(next_states[:, :1], rewards / 3 + 1)
    np.testing.assert_array_equal(actions, rewards / 7)
    assert len(np.unique(rewards)) > 40


def test_buffer_overwrites_the_oldest():
    buffer = filled_buffer(count=30, max_size=20)
    assert len(buffer) == 20
    assert set(buffer.sample(2000)[3].flatten()) == set(range(10, 30))


def test_buffer_is_drawn_by_numpys_generator():
    buffer = filled_buffer()
    np.random.seed(4)
    first = buffer.sample(9)
    np.random.seed(4)
    second = buffer.sample(9)
    assert all((a == b).all() for a, b in zip(first, second, strict=True))


def test_buffer_says_what_is_wrong():
    with pytest.raises(T3DError, match="empty"):
        ReplayBuffer().sample(1)
    with pytest.raises(T3DError, match="action of this transition has 3"):
        filled_buffer().add((np.zeros(3), np.zeros(3), np.zeros(3), 0.0, 0.0))
    buffer = ReplayBuffer()
    with pytest.raises(T3DError, match="next_state of this transition has 2 numbers; it should have 3"):
        buffer.add((np.zeros(3), np.zeros(2), np.zeros(3), 0.0, 0.0))
    with pytest.raises(T3DError, match="empty"):
        buffer.sample(1)
    with pytest.raises(T3DError, match="smaller max_size"):
        ReplayBuffer(2e9).add((np.zeros(84 * 84 * 4), np.zeros(84 * 84 * 4), np.zeros(1), 0.0, 0.0))
    with pytest.raises(T3DError, match="max_size"):
        ReplayBuffer(0)


def test_networks_are_modules_in_the_layout_of_linear():
    actor, critic = Actor(3, 2, 5.0), Critic(3, 2)
    assert {k: tuple(v.shape) for k, v in actor.state_dict().items()} == {
        "layer_1.weight": (400, 3), "layer_1.bias": (400,), "layer_2.weight": (300, 400),
        "layer_2.bias": (300,), "layer_3.weight": (2, 300), "layer_3.bias": (2,),
    }  # fmt: skip
    assert list(critic.state_dict())[::2] == [f"layer_{i}.weight" for i in range(1, 7)]
    state, action = torch.randn(6, 3), torch.randn(6, 2)
    q1, q2 = critic(state, action)
    assert q1.shape == q2.shape == (6, 1) and not torch.allclose(q1, q2)
    assert torch.equal(critic.Q1(state, action), q1)
    x = torch.cat([state, action], 1)
    for layer in (critic.layer_4, critic.layer_5):
        x = torch.relu(layer(x))
    torch.testing.assert_close(critic.layer_6(x), q2)
    assert actor(100 * state).abs().max() <= 5 and actor(state).shape == (6, 2)


def test_modules_can_be_differentiated():
    critic = Critic(3, 2)
    sum(q.mean() for q in critic(torch.randn(6, 3), torch.randn(6, 2))).backward()
    assert all(parameter.grad is not None for parameter in critic.parameters())


def test_state_dict_reads_and_writes_the_live_tensors():
    policy, buffer = T3D(3, 2, 1.0), filled_buffer()
    live = policy.actor.state_dict()["layer_2.weight"]
    before = live.clone()
    policy.train(buffer, 2)
    assert not torch.equal(live, before)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in policy.actor.state_dict().items()}
    policy.actor.load_state_dict(zeros)
    assert policy.select_action(np.ones(3)).tolist() == [0, 0]
    policy.critic_target.load_state_dict(policy.critic.state_dict())
    assert torch.equal(policy._agent.target_critic["w1"], policy._agent.critic["w1"])


def test_select_action():
    policy = T3D(3, 2, 4.0)
    one = policy.select_action(np.array([0.1, 0.2, 0.3]))
    assert one.shape == (2,) and one.dtype == np.float32
    assert (one == policy.select_action(np.array([[0.1, 0.2, 0.3]], np.float32))).all()
    assert (one == policy.select_action(np.array([0.1, 0.2, 0.3]))).all()
    assert np.abs(policy.select_action(1e6 * np.ones(3))).max() <= 4
    with pytest.raises(T3DError, match="one state of 3"):
        policy.select_action(np.ones(4))


def test_the_global_seed_decides():
    def trained(seed):
        torch.manual_seed(seed)
        np.random.seed(seed)
        policy = T3D(3, 2, 1.0)
        policy.train(filled_buffer(), 4)
        return policy.select_action(np.ones(3))

    assert (trained(1) == trained(1)).all() and (trained(1) != trained(2)).any()


def test_the_delay_counts_over_the_agents_life():
    policy, buffer = T3D(3, 2, 1.0), filled_buffer()
    actor = policy.actor.state_dict()
    before = actor["layer_1.weight"].clone()
    policy.train(buffer, 1)
    assert torch.equal(actor["layer_1.weight"], before) and policy.updates == 1
    policy.train(buffer, 1)
    assert not torch.equal(actor["layer_1.weight"], before) and policy.updates == 2


def test_load_restores_everything_and_training_goes_on_exactly(tmp_path):
    policy, buffer = T3D(3, 2, 1.0), filled_buffer()
    policy.train(buffer, 5)
    policy.save("agent", tmp_path / "models")
    other = T3D(3, 2, 1.0)
    other.load("agent", str(tmp_path / "models"))
    for name, tensor in tensors(policy._agent).items():
        assert torch.equal(tensor, tensors(other._agent)[name]), name
    for agent in (policy, other):
        np.random.seed(0)
        agent.train(buffer, 3)
    for name, tensor in tensors(policy._agent).items():
        assert torch.equal(tensor, tensors(other._agent)[name]), name
    assert (policy.select_action(np.ones(3)) == other.select_action(np.ones(3))).all()


def test_load_says_what_is_wrong_and_changes_nothing(tmp_path):
    T3D(4, 2, 1.0).save("other", tmp_path)
    (tmp_path / "broken.safetensors").write_bytes(b"not tensors")
    policy = T3D(3, 2, 1.0)
    before = {name: tensor.clone() for name, tensor in tensors(policy._agent).items()}
    for name, sentence in (("other", "another network"), ("broken", "damaged"), ("absent", "No such file")):
        with pytest.raises(T3DError, match=sentence):
            policy.load(name, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(policy._agent).items())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda policy: pickle.loads(pickle.dumps(policy))])
def test_a_copy_is_independent_and_whole(copied):
    policy, buffer = T3D(3, 2, 1.0), filled_buffer()
    twin = copied(policy)
    policy.train(buffer, 2)
    assert twin.updates == 0
    before = twin.actor.layer_1.weight.detach().clone()
    twin.train(buffer, 2)
    assert not torch.equal(twin.actor.layer_1.weight, before)


def test_a_network_is_not_cut_off_from_its_agent():
    policy = T3D(3, 2, 1.0)
    policy.actor.to("cpu").float()  # nothing to convert
    with pytest.raises(T3DError, match="T3D takes device and dtype"):
        policy.actor.double()


def test_wrong_numbers_are_sentences(tmp_path):
    policy = T3D(3, 2, 1.0)
    policy.save("agent", tmp_path)
    with pytest.raises(T3DError, match="another max_action than 7"):
        T3D(3, 2, 7.0).load("agent", tmp_path)
    with pytest.raises(T3DError, match="whole numbers from 1 up"):
        policy.train(filled_buffer(), 1, policy_freq=0)
    for make in (lambda: T3D(3, 2, -1.0), lambda: Actor(3, 1, float("nan")), lambda: T3D(3, 2, "x")):
        with pytest.raises(T3DError, match="max_action must be a positive, finite number"):
            make()
    for make in (
        lambda: T3D(0, 2, 1.0), lambda: T3D(2.7, 2, 1.0), lambda: T3D(3, 2, 1.0, hidden=[]), lambda: Critic(3, -1),
        lambda: policy.train(filled_buffer(), 1, batch_size=0), lambda: filled_buffer().sample(2.5),
    ):  # fmt: skip
        with pytest.raises(T3DError, match="whole numbers from 1 up"):
            make()
    with pytest.raises(T3DError, match="discount and tau"):
        policy.train(filled_buffer(), 1, discount=float("nan"))


def test_done_ends_the_value():
    """One state, reward 1, always done: both critics learn 1 and not 1 / (1 − discount)."""
    torch.manual_seed(0)
    policy, buffer = T3D(1, 1, 1.0, hidden=(32, 32)), ReplayBuffer()
    for action in np.linspace(-1, 1, 50):
        buffer.add((np.zeros(1), np.zeros(1), np.array([action]), 1.0, 1.0))
    policy.train(buffer, 300, 32)
    q1, q2 = policy.critic(torch.zeros(1, 1), torch.zeros(1, 1))
    assert abs(q1.item() - 1) < 0.1 and abs(q2.item() - 1) < 0.1
