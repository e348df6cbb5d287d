"""How the same text is run: as it stands, compiled, or recorded. The only place that knows these words.

`accelerate` gives the verbs that a loop spends its time in, tied to the tensors of one run. `eager` calls the functions
of `agent.py` as they are. `compile` has PyTorch translate them into a few fused loops around the matrix products: the
first time takes a minute, after that the translation is found in a cache on the disk. `graph` does so on a GPU, with
`kernels.py` for the networks, and has the GPU record what it is told once, to repeat it at a single word.

Shapes: S seeds, N environments a seed, B batch, O observation, A action.
"""

from collections.abc import Callable

from t3d import agent as agents
from t3d.config import Config
from t3d.learners.compiled import CompiledLearner
from t3d.learners.cudagraph import CudaGraphLearner
from t3d.learners.eager import CannotCompile, EagerLearner, Learner, LearnerState, Sums, hardware
from t3d.replay import Replay
from t3d.steps import Agent

__all__ = ["CannotCompile", "Learner", "accelerate", "hardware"]


def accelerate(agent: Agent, memory: Replay, sums: Sums, config: Config) -> Learner:
    """The verbs in the mode that the config names, compiled when this returns."""
    if config.train_freq == "episode":
        # Episodes end at different times, and then a seed learns by itself, also where all end at once: whether it is
        # stacked with others may change its rounding, and another seed's episodes must not.
        of_seed = ({name: total[k : k + 1] for name, total in sums.items()} for k in range(len(agent.seeds)))
        learners = [LearnerState(agents.one_seed(agent, k), memory.seed(k), part) for k, part in enumerate(of_seed)]
    else:
        learners = [LearnerState(agent, memory, sums)]
    modes: dict[str, Callable[[LearnerState, list[LearnerState], Config], Learner]]
    modes = {"eager": EagerLearner, "compile": CompiledLearner, "graph": CudaGraphLearner}
    return modes[config.accelerate](LearnerState(agent, memory, sums), learners, config)
