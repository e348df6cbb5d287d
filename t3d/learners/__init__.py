"""How an agent acts, stores transitions and updates: uncompiled, compiled, or in CUDA graphs.

eager.py       the functions as they are; what every learner offers
compiled.py    the same functions compiled by PyTorch
cudagraph.py   the same functions compiled and captured in CUDA graphs
cpu_mlp.py     the MLP in C++ for CPUs with AVX-512
triton_mlp.py  the MLP in Triton for GPUs
"""

from collections.abc import Callable

from t3d.config import Config
from t3d.learners.compiled import CompiledLearner
from t3d.learners.cudagraph import CudaGraphLearner
from t3d.learners.eager import EagerLearner, Learner, LearnerState, hardware
from t3d.torch_private import CannotCompile

__all__ = ["CannotCompile", "Learner", "LearnerState", "hardware", "make_learner"]

LEARNERS: dict[str, Callable[[LearnerState, list[LearnerState], Config], Learner]] = {
    "eager": EagerLearner,
    "compile": CompiledLearner,
    "graph": CudaGraphLearner,
}


def make_learner(state: LearnerState, config: Config) -> Learner:
    """The learner that the config names, compiled when this returns."""
    # With whole episodes each seed is updated by itself, also where several end at once: stacking seeds may change
    # rounding, and one seed may not depend on when the episodes of another end.
    by_seed = config.train_freq == "episode"
    parts = [state.seed(k) for k in range(len(state.agent.seeds))] if by_seed else [state]
    return LEARNERS[config.accelerate](state, parts, config)
