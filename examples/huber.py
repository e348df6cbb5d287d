"""A variant of TD3 with a Huber loss in place of the squared error: ten seeds side by side, compiled.

python examples/huber.py        about a minute on two cores
"""

import torch

import t3d

SETTINGS = {"hidden": (64, 64), "batch_size": 128, "actor_lr": 1e-3, "critic_lr": 1e-3, "eval_every": 4_000}


def huber(q, y):
    """[step 11] The squared error where it is small, the distance where it is large: (S,)."""
    distance = (q - y).abs()
    return torch.where(distance < 1, distance**2 / 2, distance - 1 / 2).mean(-1).sum(0)


def main():
    variant = t3d.variant(squared_errors=huber)
    run = t3d.train("Pendulum-v1", 8_000, seeds=10, algorithm=variant, accelerate="compile", threads=1, **SETTINGS)
    for row in run.evaluations[-len(run.seeds) :]:
        print(f"seed {row['seed']}: mean return {row['mean']:.1f} over {len(row['returns'])} episodes")


if __name__ == "__main__":
    main()
