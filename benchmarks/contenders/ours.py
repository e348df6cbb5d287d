"""T3D: python ours.py MODE PRECISION SEEDS ENV"""

import sys

from serving import BATCH, BUFFER, HIDDEN, LEARNING_STARTS, serve

from t3d import states, training
from t3d.accelerate import accelerate, hardware
from t3d.config import Config, settle
from t3d.display import Display
from t3d.envs import open_source


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
    config = settle(config, "td3", env, int(seeds))
    state = states.begin(open_source(env), list(range(int(seeds))), config)
    display = Display(config.steps, state.seeds, quiet=True)
    with hardware(config.threads, config.precision):
        verbs = accelerate(state.agent, state.memory, state.sums, config)

        def take_steps(n):
            for _ in range(n):
                training.turn(state, config, verbs)
                training.learn_owed(state, config, verbs)
                display.advance(state.step)
                if state.step % config.log_every == 0:
                    training.training_rows(state, config, 0.0)

        serve(take_steps, threads=config.threads)


main(*sys.argv[1:])
