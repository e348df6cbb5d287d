"""What runs in a worker process: environments that answer over a pipe.

It is started as a script and imports nothing of the package, so that a worker starts fast and carries no PyTorch.
The parent starts it itself and hands it what to make; no file is ever read here.
"""

import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any


def make(env: Any, args: dict[str, Any], pixels: int = 0) -> Any:
    """One environment, from an id, its spec, what makes one when called, or itself; with `pixels` it shows images."""
    if pixels:
        if not os.environ.get("DISPLAY"):
            os.environ.setdefault("MUJOCO_GL", "egl")  # read when MuJoCo is first imported
        return rendered(make(env, {"render_mode": "rgb_array", **args} if of_id(env) else args), pixels)
    import gymnasium

    if isinstance(env, gymnasium.Env):
        return env
    if not of_id(env):
        return env(**args)
    spec = gymnasium.registry.get(env.rpartition(":")[2]) if isinstance(env, str) else env
    if spec is not None and str(spec.entry_point).startswith("gymnasium.envs.mujoco"):
        quiet_mujoco()
    return gymnasium.make(env, disable_env_checker=True, **args)


def of_id(env: Any) -> bool:
    """Whether Gymnasium makes it: an id, or what is registered under one."""
    from gymnasium.envs.registration import EnvSpec

    return isinstance(env, str | EnvSpec)


def rendered(env: Any, pixels: int) -> Any:
    """The environment with images of itself, so many pixels high and wide, in the place of its observations."""
    import gymnasium
    import numpy as np
    from PIL import Image

    # Pygame draws for Gymnasium: images, no window, and no word of its own.
    for name, value in (("SDL_VIDEODRIVER", "dummy"), ("PYGAME_HIDE_SUPPORT_PROMPT", "1")):
        os.environ.setdefault(name, value)
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.simplefilter("ignore")
        import pygame  # noqa: F401

    class Rendered(gymnasium.ObservationWrapper[Any, Any, Any]):
        def __init__(self, env: Any) -> None:
            super().__init__(env)
            self.observation_space = gymnasium.spaces.Box(0, 255, (pixels, pixels, 3), np.uint8)

        def observation(self, observation: Any) -> Any:
            image: Any = self.env.render()
            if np.ndim(image) != 3:
                raise ValueError(f"render() gave {type(image).__name__}, not a image")
            shrunk = Image.fromarray(np.asarray(image, np.uint8)).resize((pixels, pixels), Image.Resampling.BOX)
            return np.asarray(shrunk)

    return Rendered(env)


def quiet_mujoco() -> None:
    """MuJoCo's warnings would go to the terminal and into MUJOCO_LOG.TXT, wherever one stands.

    The one that matters, that a simulation went bad and reset itself, is seen by `self_resets`.
    """
    try:
        import mujoco
    except ImportError:
        return  # Gymnasium says what is missing
    mujoco.set_mju_user_warning(lambda message: None)


def counts_resets(env: Any) -> bool:
    """Whether the environment has MuJoCo data, which counts the times that MuJoCo reset a simulation itself."""
    return _warnings(env) is not None


def self_resets(env: Any) -> int:
    """How often MuJoCo reset the simulation because its state was not finite or beyond 1e10; 0 without MuJoCo."""
    counters = _warnings(env)
    return 0 if counters is None else sum(int(counters[kind].number) for kind in BAD_STATES)


def _warnings(env: Any) -> Any:
    return getattr(getattr(env.unwrapped, "data", None), "warning", None) if "mujoco" in sys.modules else None


# mjWARN_BADQPOS, mjWARN_BADQVEL and mjWARN_BADQACC; as numbers, because this script does without mujoco
BAD_STATES = (3, 4, 5)


def said(problem: BaseException) -> str:
    """An exception of somebody else's in one line, with the place it came from."""
    try:
        text = str.__str__(str(problem))[:1000]  # a subclass of str may do anything when it is cut or printed
    except KeyboardInterrupt:
        raise
    except BaseException as second:
        text = f"its message cannot be read: {type(second).__name__} in __str__"
    frames = traceback.extract_tb(problem.__traceback__)
    return f"{type(problem).__name__}: {text}" + (f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else "")


def whole_traceback(problem: BaseException) -> str:
    """The same with every line that led there."""
    try:
        return "".join(traceback.format_exception(problem))
    except KeyboardInterrupt:
        raise
    except BaseException:  # an exception that breaks the formatting
        return "".join(traceback.format_tb(problem.__traceback__)) + said(problem)


def end_with(parent: int) -> None:
    """End this process when its parent ends, however that ends, even in the middle of a step."""
    if sys.platform == "linux":
        import ctypes
        import signal

        with suppress(OSError, AttributeError):
            PR_SET_PDEATHSIG = 1
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    # Also on Linux: the parent may have ended before the call, or the thread that started this process did not end.
    threading.Thread(target=watch, daemon=True).start()


def end_only_with_parent(parent: int) -> None:
    """Leave Ctrl-C and a signal to the whole group to the parent, which saves first; end when it ends.

    The signals have handlers, because a program that an environment starts would inherit that they are ignored.
    """
    import signal

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    end_with(parent)


def serve(pipe: Connection) -> None:
    """Make the environments, then reset and step them as asked until the pipe closes; then close them."""
    import cloudpickle

    envs: dict[int, Any] = {}
    try:
        env, args, pixels, indices = cloudpickle.loads(pipe.recv_bytes())
        for index in indices:
            envs[index] = make(env, args, pixels)
    except Exception as problem:
        pipe.send(("raised", (said(problem), whole_traceback(problem))))
    else:
        pipe.send(("ready", None))
        with suppress(EOFError):
            answer_calls(pipe, envs, lambda: make(env, args, pixels))
    for made in envs.values():
        with suppress(Exception):
            made.close()


def answer_calls(pipe: Connection, envs: dict[int, Any], anew: Callable[[], Any]) -> None:
    """Do what is asked for until the pipe closes."""
    while True:
        call, index, argument = pipe.recv()
        try:
            if call == "step":
                before = self_resets(envs[index])
                answer: Any = envs[index].step(argument)
                answer = (answer, self_resets(envs[index]) > before)
            elif call == "remake":
                with suppress(Exception):
                    envs[index].close()
                envs[index], answer = anew(), None
            else:
                answer = envs[index].reset(seed=argument)
            content = ForkingPickler.dumps(("done", answer))
        except SystemExit:
            raise  # the process ends, as it was told to
        except BaseException as problem:
            content = ForkingPickler.dumps(("raised", (said(problem), whole_traceback(problem))))
        pipe.send_bytes(content)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    end_only_with_parent(int(sys.argv[2]))
    sys.path[:] = sys.argv[3:]  # the parent's, so that its modules are found
    with suppress(OSError):  # of a pipe whose other end is gone
        serve(Connection(int(sys.argv[1])))
