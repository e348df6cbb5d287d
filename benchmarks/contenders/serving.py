"""A contender in a race: it gets ready, then takes `n` steps whenever it is told to, and says what they cost.

One line in, a number of steps; one line out, JSON with the seconds on the clock and on the processors.
"""

import json
import os
import sys
import time

LEARNING_STARTS, BATCH, HIDDEN, BUFFER = 1_000, 256, (256, 256), 100_000


def serve(take_steps, **about):
    """`take_steps(n)`: environment steps, with an update after each."""
    out, sys.stdout = sys.stdout, sys.stderr  # what a library prints is not an answer
    take_steps(LEARNING_STARTS + 200)
    print(json.dumps(about), file=out, flush=True)
    for line in sys.stdin:
        clock, processors = time.perf_counter(), sum(os.times()[:2])
        take_steps(int(line))
        spent = {"wall": time.perf_counter() - clock, "cpu": sum(os.times()[:2]) - processors}
        print(json.dumps(spent), file=out, flush=True)
    os._exit(0)
