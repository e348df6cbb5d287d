"""T3D: python ours.py MODE PRECISION SEEDS ENV"""

import sys

from serving import BATCH, BUFFER, HIDDEN, LEARNING_STARTS, serve

from t3d import run_state, trainer
from t3d.config import Config, resolve
from t3d.display import Display
from t3d.envs import env_factory
from t3d.learners import accelerate, hardware


def main(mode, precision, seeds, env):
    config = Config(
        steps=10_000_000,
        buffer_size=BUFFER,
        random_steps=LEARNING_STARTS,
        batch_size=BATCH,
        hidden=HIDDEN,
        accelerate=mode,
        precision=precision,
        device="cpu",
    )
    config = resolve(config, "td3", env, int(seeds))
    state = run_state.begin(env_factory(env), list(range(int(seeds))), config)
    display = Display(config.steps, state.seeds, quiet=True)
    with hardware(config.threads, config.precision):
        learner = accelerate(state.agent, state.memory, state.sums, config)

        def take_steps(n):
            for _ in range(n):
                trainer.turn(state, config, learner)
                trainer.learn_owed(state, config, learner)
                display.advance(state.step)
                if state.step % config.log_every == 0:
                    trainer.training_rows(state, config, 0.0)

        serve(take_steps, threads=config.threads)


main(*sys.argv[1:])
