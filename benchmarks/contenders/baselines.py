"""Stable-Baselines3 and SBX, which has the same interface: python baselines.py PACKAGE ENV"""

import sys
from importlib import import_module

import gymnasium
import numpy as np
from serving import BATCH, BUFFER, HIDDEN, LEARNING_STARTS, serve
from stable_baselines3.common.noise import NormalActionNoise


def main(package, name):
    env = gymnasium.make(name)
    dim = env.action_space.shape[0]
    model = import_module(package).TD3(
        "MlpPolicy",
        env,
        learning_rate=3e-4,
        buffer_size=BUFFER,
        learning_starts=LEARNING_STARTS,
        batch_size=BATCH,
        train_freq=1,
        gradient_steps=1,
        action_noise=NormalActionNoise(np.zeros(dim), np.full(dim, 0.1)),
        policy_kwargs={"net_arch": list(HIDDEN)},
        device="cpu",
        verbose=0,
    )

    def take_steps(n):
        model.learn(n, reset_num_timesteps=False, log_interval=1_000_000)

    serve(take_steps)


main(*sys.argv[1:])
