"""T3D: python ours.py MODE PRECISION SEEDS ENV"""

import sys

from serving import BATCH, BUFFER, HIDDEN, LEARNING_STARTS, serve

from t3d.config import Config, resolve
from t3d.display import Display
from t3d.envs import env_factory
from t3d.learners import hardware
from t3d.run_state import RunSetup
from t3d.trainer import Trainer


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
    setup = RunSetup(env_factory(env), list(range(int(seeds))), config)
    display = Display(config.steps, setup.seeds, quiet=True)
    with hardware(config.threads, config.precision):
        trainer = Trainer.in_memory(setup)

        def take_steps(n):
            for _ in range(n):
                trainer.step()
                display.advance(trainer.state.step)
                if trainer.state.step % config.log_every == 0:
                    trainer.training_rows(0.0)

        serve(take_steps, threads=config.threads)


main(*sys.argv[1:])
