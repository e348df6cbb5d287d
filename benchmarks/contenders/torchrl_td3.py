"""TorchRL's TD3 loss, buffer and environment in the plainest loop: python torchrl_td3.py ENV"""

import sys

import torch
from serving import BATCH, BUFFER, HIDDEN, LEARNING_STARTS, serve
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import DoubleToFloat, GymEnv, TransformedEnv, step_mdp
from torchrl.modules import MLP, AdditiveGaussianModule, TanhModule, ValueOperator
from torchrl.objectives import SoftUpdate, TD3Loss


def main(name):
    env = TransformedEnv(GymEnv(name), DoubleToFloat())
    dim = env.action_spec.shape[-1]
    body = MLP(in_features=env.observation_spec["observation"].shape[-1], out_features=dim, num_cells=list(HIDDEN))
    actor = TensorDictSequential(
        TensorDictModule(body, in_keys=["observation"], out_keys=["param"]),
        TanhModule(in_keys=["param"], out_keys=["action"], low=-1.0, high=1.0),
    )
    critic = ValueOperator(MLP(out_features=1, num_cells=list(HIDDEN)), in_keys=["observation", "action"])
    with torch.no_grad():
        critic(actor(env.reset()))
    loss = TD3Loss(actor, critic, action_spec=env.action_spec, loss_function="l2")
    loss.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss, tau=0.005)
    explore = TensorDictSequential(
        actor, AdditiveGaussianModule(spec=env.action_spec, sigma_init=0.1, sigma_end=0.1, annealing_num_steps=1)
    )
    critic_adam = torch.optim.Adam(list(loss.qvalue_network_params.flatten_keys().values()), 3e-4)
    actor_adam = torch.optim.Adam(list(loss.actor_network_params.flatten_keys().values()), 3e-4)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(BUFFER), batch_size=BATCH)
    now = {"obs": env.reset(), "step": 0}

    def take_steps(n):
        for _ in range(n):
            now["step"] += 1
            with torch.no_grad():
                acted = explore(now["obs"]) if now["step"] > LEARNING_STARTS else env.rand_action(now["obs"])
                moved = env.step(acted)
            buffer.add(moved)
            now["obs"] = env.reset() if moved["next", "done"].any() else step_mdp(moved)
            if now["step"] <= LEARNING_STARTS:
                continue
            batch = buffer.sample()
            q_loss, _ = loss.value_loss(batch)
            critic_adam.zero_grad()
            q_loss.backward()
            critic_adam.step()
            if now["step"] % 2 == 0:
                a_loss, _ = loss.actor_loss(batch)
                actor_adam.zero_grad()
                a_loss.backward()
                actor_adam.step()
                target.step()

    serve(take_steps)


main(*sys.argv[1:])
