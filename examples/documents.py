"""A script of the documents' form: fill a buffer by hand, play whole episodes, train after each, save, load.

python examples/documents.py [ENV] [STEPS] [SEED]        by default Pendulum-v1 for 12,000 steps
"""

import sys

import gymnasium
import numpy as np
import torch

from t3d import T3D, ReplayBuffer

env_name = sys.argv[1] if len(sys.argv) > 1 else "Pendulum-v1"
max_timesteps = int(float(sys.argv[2])) if len(sys.argv) > 2 else 12_000
seed = int(sys.argv[3]) if len(sys.argv) > 3 else 0
start_timesteps, eval_freq = 1_000, 3_000
expl_noise, batch_size, discount, tau, policy_noise, noise_clip, policy_freq = 0.1, 100, 0.99, 0.005, 0.2, 0.5, 2

env = gymnasium.make(env_name)
env.action_space.seed(seed)
torch.manual_seed(seed)
np.random.seed(seed)
state_dim, action_dim = env.observation_space.shape[0], env.action_space.shape[0]
max_action = float(env.action_space.high[0])

policy = T3D(state_dim, action_dim, max_action)
replay_buffer = ReplayBuffer()


def evaluate_policy(policy, episodes=10):
    eval_env, total = gymnasium.make(env_name), 0.0
    for episode in range(episodes):
        obs, _ = eval_env.reset(seed=1000 + episode)
        done = False
        while not done:
            obs, reward, terminated, truncated, _ = eval_env.step(policy.select_action(np.array(obs)))
            total += reward
            done = terminated or truncated
    return total / episodes


total_timesteps, timesteps_since_eval, episode_num = 0, 0, 0
print(f"step {total_timesteps:6,}   mean return {evaluate_policy(policy):8.1f}")
while total_timesteps < max_timesteps:
    obs, _ = env.reset(seed=seed if episode_num == 0 else None)
    done, episode_timesteps = False, 0
    while not done:
        if total_timesteps < start_timesteps:
            action = env.action_space.sample()
        else:
            action = policy.select_action(np.array(obs))
            noise = np.random.normal(0, expl_noise * max_action, size=action_dim)
            action = (action + noise).clip(env.action_space.low, env.action_space.high).astype(np.float32)
        new_obs, reward, terminated, truncated, _ = env.step(action)
        done = terminated or truncated
        # An episode cut by its time limit is not done: its last state still has a value.
        replay_buffer.add((obs, new_obs, action, reward, float(terminated)))
        obs = new_obs
        episode_timesteps += 1
        total_timesteps += 1
    episode_num += 1
    timesteps_since_eval += episode_timesteps
    policy.train(replay_buffer, episode_timesteps, batch_size, discount, tau, policy_noise, noise_clip, policy_freq)
    if timesteps_since_eval >= eval_freq:
        timesteps_since_eval = 0
        print(f"step {total_timesteps:6,}   mean return {evaluate_policy(policy):8.1f}", flush=True)

policy.save(f"T3D_{env_name}_{seed}", "pytorch_models")
again = T3D(state_dim, action_dim, max_action)
again.load(f"T3D_{env_name}_{seed}", "pytorch_models")
print(f"saved and loaded again: mean return {evaluate_policy(again):8.1f}")
