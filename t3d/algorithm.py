"""The algorithm is a module: `t3d.steps`, or another one with the same functions.

    t3d.train("Pendulum-v1", algorithm=t3d.variant(squared_errors=huber))     # some functions replaced
    t3d.train("Pendulum-v1", algorithm=my_module)                             # a module of your own

Seeds, compilation and exact resume work as for `t3d.steps`. A file never names a module to import: `resume` takes
`algorithm=` again.
"""

from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from t3d import steps
from t3d.errors import T3DError, nearest, shown, warn

NEEDED = ("METRICS", "POLICY_METRICS", "init_agent", "draw", "update", "learn", "is_policy_step")


def variant(**functions: Callable[..., Any]) -> ModuleType:
    """`t3d.steps` with some of its functions replaced, as a module of its own: `variant(squared_errors=huber)`."""
    own = {name for name, value in vars(steps).items() if isinstance(value, FunctionType)}
    own = {name for name in own if vars(steps)[name].__module__ == steps.__name__}
    for name in functions:
        if name not in own:
            raise T3DError(f"variant(): t3d.steps has no function '{name}'.{nearest(name, own)}")
    replaced = (f"{name}={getattr(function, '__name__', 'function')}" for name, function in functions.items())
    module = ModuleType(f"t3d.steps with {', '.join(replaced)}")
    names, title = vars(module), module.__name__
    names.update(vars(steps), __name__=title)
    for name in own:
        function = names[name]  # copied, so that it finds the replaced functions by name
        names[name] = FunctionType(function.__code__, names, name, function.__defaults__, function.__closure__)
    names.update(functions)
    return module


def as_algorithm(given: Any) -> ModuleType:
    """The module that a user gave, or `t3d.steps`; refused where functions are missing."""
    if given is None:
        return steps
    missing = [name for name in NEEDED if not hasattr(given, name)]
    if missing or not isinstance(given, ModuleType):
        what = f"it has no {', '.join(missing)}" if missing else "it is no module"
        raise T3DError(f"algorithm={shown(given)}: {what}. An algorithm is a module with the functions of t3d.steps.")
    return given


def algorithm_name(algorithm: ModuleType) -> str | None:
    """Its name in config.json; None for `t3d.steps`."""
    return None if algorithm is steps else algorithm.__name__


def saved_algorithm(name: str | None, given: Any, where: str) -> ModuleType:
    """The algorithm that a run was trained with; any but `t3d.steps` must be given again."""
    algorithm = as_algorithm(given)
    if (name is None) != (algorithm is steps):
        what = "t3d.steps: leave algorithm out."
        if name is not None:
            what = f"the algorithm {name}, which files do not contain: use t3d.resume(run, algorithm=...) from Python."
        raise T3DError(f"{where} was trained with {what}")
    if algorithm_name(algorithm) != name:
        warn(f"{where} was trained with the algorithm {name}; this one is {algorithm_name(algorithm)}.")
    return algorithm
