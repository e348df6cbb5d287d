"""Tianshou: python tianshou_td3.py ENV"""

import sys

import gymnasium
from serving import BATCH, BUFFER, HIDDEN, LEARNING_STARTS, serve
from tianshou.algorithm import TD3
from tianshou.algorithm.modelfree.ddpg import ContinuousDeterministicPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.exploration import GaussianNoise
from tianshou.utils.net.common import Net
from tianshou.utils.net.continuous import ContinuousActorDeterministic, ContinuousCritic
from tianshou.utils.torch_utils import policy_within_training_step


def main(name):
    env = gymnasium.make(name)
    state, action = env.observation_space.shape, env.action_space.shape

    def critic():
        body = Net(state_shape=state, action_shape=action, hidden_sizes=HIDDEN, concat=True)
        return ContinuousCritic(preprocess_net=body)

    actor = ContinuousActorDeterministic(
        preprocess_net=Net(state_shape=state, hidden_sizes=HIDDEN), action_shape=action, max_action=1.0
    )
    policy = ContinuousDeterministicPolicy(
        actor=actor, exploration_noise=GaussianNoise(sigma=0.1), action_space=env.action_space
    )
    adam = AdamOptimizerFactory(lr=3e-4)
    algorithm = TD3(
        policy=policy,
        policy_optim=adam,
        critic=critic(),
        critic_optim=adam,
        critic2=critic(),
        critic2_optim=adam,
        policy_noise=0.2,
        update_actor_freq=2,
        noise_clip=0.5,
    )
    buffer = VectorReplayBuffer(BUFFER, 1)
    collector = Collector(algorithm, DummyVectorEnv([lambda: gymnasium.make(name)]), buffer, exploration_noise=True)
    collector.reset()
    collector.collect(n_step=LEARNING_STARTS, random=True)

    def take_steps(n):
        with policy_within_training_step(algorithm.policy):
            for _ in range(n):
                collector.collect(n_step=1)
                algorithm.update(buffer=buffer, sample_size=BATCH)

    serve(take_steps)


main(*sys.argv[1:])
