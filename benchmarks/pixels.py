"""What an update costs with images: one encoder that the critics train, or one for each network.

    python benchmarks/pixels.py

Pendulum-v1 in three frames of 32 x 32 pixels, compiled; the median of five rounds, in turns.
"""

import time
from statistics import median

from machine import save

from t3d.config import Config, resolve
from t3d.envs import env_factory
from t3d.learners import hardware
from t3d.run_state import RunSetup
from t3d.trainer import Trainer

ROUNDS, UPDATES = 5, 20


def learner(encoder, batch_size):
    """A function that runs some updates and returns the time that one takes."""
    settings = {"steps": 1000, "random_steps": 50, "pixels": 32, "device": "cpu", "accelerate": "compile"}
    config = resolve(Config(**settings, batch_size=batch_size, encoder=encoder), "td3", "Pendulum-v1", 1)
    factory = env_factory("Pendulum-v1").seen(config.pixels, config.frame_stack)
    trainer = Trainer.in_memory(RunSetup(factory, [0], config))
    for _ in range(40):  # fewer than the random steps: no updates yet
        trainer.step()
    trainer.state.close()

    def milliseconds():
        with hardware(config.threads, config.precision):
            begin = time.perf_counter()
            for update in range(UPDATES):
                trainer.learner.update(0, policy_step=update % 2 == 0)
            return 1000 * (time.perf_counter() - begin) / UPDATES

    return milliseconds


def main():
    cases = {(encoder, batch): learner(encoder, batch) for batch in (32, 128) for encoder in ("critic", "separate")}
    rounds = [{case: run() for case, run in cases.items()} for _ in range(ROUNDS + 1)][1:]
    results = {f"{encoder}, batch {batch}": median(r[encoder, batch] for r in rounds) for encoder, batch in cases}
    for name, milliseconds in results.items():
        print(f"{name:24} {milliseconds:6.1f} ms an update")
    save("pixels", ("torch",), results)


if __name__ == "__main__":
    main()
