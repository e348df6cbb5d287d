"""The worker process: makes environments and answers calls over a pipe.

The parent runs this file as a script and sends the environment through the pipe; the worker reads no file. The script
imports nothing from the package, so a worker starts fast and does not load PyTorch.
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
    """Make an environment from an id, an EnvSpec, a callable or itself; with `pixels` it observes images."""
    if pixels:
        if not os.environ.get("DISPLAY"):
            os.environ.setdefault("MUJOCO_GL", "egl")  # read when MuJoCo is first imported
        return with_pixels(make(env, {"render_mode": "rgb_array", **args} if has_spec(env) else args), pixels)
    import gymnasium

    if isinstance(env, gymnasium.Env):
        return env
    if not has_spec(env):
        return env(**args)
    spec = gymnasium.registry.get(env.rpartition(":")[2]) if isinstance(env, str) else env
    if spec is not None and str(spec.entry_point).startswith("gymnasium.envs.mujoco"):
        quiet_mujoco()
    return gymnasium.make(env, disable_env_checker=True, **args)


def has_spec(env: Any) -> bool:
    """Whether `gymnasium.make` accepts it: an id or an EnvSpec."""
    from gymnasium.envs.registration import EnvSpec

    return isinstance(env, str | EnvSpec)


def with_pixels(env: Any, pixels: int) -> Any:
    """Wrap the environment: its observations are with_pixels images of `pixels` × `pixels`."""
    import gymnasium
    import numpy as np
    from PIL import Image

    # Gymnasium renders with Pygame: open no window and print no banner.
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
                raise ValueError(f"render() gave {type(image).__name__}, not an image")
            resized = Image.fromarray(np.asarray(image, np.uint8)).resize((pixels, pixels), Image.Resampling.BOX)
            return np.asarray(resized)

    return Rendered(env)


def quiet_mujoco() -> None:
    """Keep MuJoCo's warnings from the terminal and from MUJOCO_LOG.TXT in the working directory.

    `self_resets` detects the one that matters: MuJoCo reset a diverged simulation.
    """
    try:
        import mujoco
    except ImportError:
        return  # gymnasium.make reports what is missing
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


# mjWARN_BADQPOS, mjWARN_BADQVEL and mjWARN_BADQACC; as numbers, because this script does not import mujoco
BAD_STATES = (3, 4, 5)


def said(problem: BaseException) -> str:
    """Describe an exception from foreign code in one line, with the file and line that raised it."""
    try:
        text = str.__str__(str(problem))[:1000]  # a str subclass can override slicing and printing
    except KeyboardInterrupt:
        raise
    except BaseException as second:
        text = f"its message cannot be read: {_class_name(second)} in __str__"
    frames = traceback.extract_tb(problem.__traceback__)
    return f"{_class_name(problem)}: {text}" + (f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else "")


def _class_name(value: Any) -> str:
    """The name of a value's class, also if its metaclass defines another `__name__`."""
    return str(type.__dict__["__name__"].__get__(type(value)))


def whole_traceback(problem: BaseException) -> str:
    """The full traceback of an exception."""
    try:
        return "".join(traceback.format_exception(problem))
    except KeyboardInterrupt:
        raise
    except BaseException:  # the exception breaks the formatting
        return "".join(traceback.format_tb(problem.__traceback__)) + said(problem)


def exit_with_parent(parent: int) -> None:
    """End this process when its parent ends for any reason, even in the middle of a step."""
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

    # On Linux too: the parent may have ended before the call, and the signal belongs to the thread that started us.
    threading.Thread(target=watch, daemon=True).start()


def end_only_with_parent(parent: int) -> None:
    """Ignore SIGINT and SIGTERM, which the parent handles; end when the parent ends.

    The handlers do nothing. SIG_IGN would be inherited by programs that an environment starts.
    """
    import signal

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    exit_with_parent(parent)


def serve(pipe: Connection) -> None:
    """Make the environments, answer calls until the pipe closes, then close the environments."""
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


def answer_calls(pipe: Connection, envs: dict[int, Any], make_env: Callable[[], Any]) -> None:
    """Run the calls that arrive until the pipe closes."""
    while True:
        call, index, argument = pipe.recv()
        try:
            if call == "step":
                before = self_resets(envs[index])
                result: Any = envs[index].step(argument)
                result = (result, self_resets(envs[index]) > before)
            elif call == "remake":
                with suppress(Exception):
                    envs[index].close()
                envs[index], result = make_env(), None
            else:
                result = envs[index].reset(seed=argument)
            message = ForkingPickler.dumps(("done", result))
        except SystemExit:
            raise  # the environment asked to end the process
        except BaseException as problem:
            message = ForkingPickler.dumps(("raised", (said(problem), whole_traceback(problem))))
        pipe.send_bytes(message)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    end_only_with_parent(int(sys.argv[2]))
    sys.path[:] = sys.argv[3:]  # the parent's module search path
    with suppress(OSError):  # the other end of the pipe is closed
        serve(Connection(int(sys.argv[1])))
