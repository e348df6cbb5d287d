"""Every option of a run once, with its help text; the presets; and what a option left open becomes.

The options that stand in the equations are `steps.Hyperparameters`; this adds those of the loop around them.
`config.json` in a run folder holds the values that were used, none of them open.
"""

import re
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import torch
from tyro.conf import arg

from t3d.errors import T3DError, nearest, shown
from t3d.limits import cores
from t3d.steps import Hyperparameters
from t3d.torch_private import has_avx512_bf16

Preset = Literal["td3", "paper", "documents"]

AUTO = -(2**62)  # a whole number left open, for `settle` to decide; nobody types it


_RANDOM_STEPS_DEFAULT = "(default: 25000; pendulums, Reacher: 1000; at most a tenth of the steps)"


@dataclass(frozen=True)
class Config(Hyperparameters):
    """How to train."""

    steps: Annotated[int, arg(metavar="INT", help_behavior_hint="(default: 1e6; Pendulum-v1: 1e4)")] = AUTO
    """Environment steps for each seed; 1e6 is fine."""
    random_steps: Annotated[int, arg(metavar="INT", help_behavior_hint=_RANDOM_STEPS_DEFAULT)] = AUTO
    """Actions drawn evenly from the whole range before the actor plays."""
    exploration_noise: float = 0.1
    """Standard deviation of the noise on the actor's actions, 1 being half the action range."""
    batch_size: int = 256
    """Transitions in a batch. [step 4]"""
    buffer_size: int = 1_000_000
    """Transitions the replay memory holds for each seed. [step 1]"""
    hidden: tuple[int, ...] = (256, 256)
    """Sizes of the hidden layers. [steps 2, 3]"""
    critics: int = 2
    """Critics, of whose values the smallest counts; 1 is a TD3 without clipped double Q. [steps 3, 8]"""
    critic_norm: Literal["none", "layer"] = "none"
    """Normalise the critics' hidden layers (LayerNorm), which steadies high learning and update rates. [step 3]"""
    updates_per_step: float = 1.0
    """Updates for each environment step."""
    n_step: int = 1
    """Rewards that a transition adds up before the value of what follows. [step 9]"""
    her: int = 0
    """Goal tasks: store each row so many times more, with goals that its episode reached later; 4 is usual. [step 1]"""
    pixels: Annotated[int, arg(metavar="INT")] = 0
    """Learn from images of the environment, so many pixels high and wide, not from its observations; 84 is usual."""
    frame_stack: int = 3
    """Frames that networks see at once, where observations are images. [step 4]"""
    augment: Literal["on", "off"] = "on"
    """Shift images by a few pixels at random when they are learned from. [step 4]"""
    encoder: Literal["critic", "separate"] = "critic"
    """Images: one eye that both critics train and the actor sees through, or one for each network. [steps 2, 3]"""
    num_envs: int = 1
    """Environments that each seed plays in at once; steps count in all of them."""
    workers: int = 0
    """Processes to step the environments in; 0 is this one. A process that dies or hangs is replaced."""
    worker_timeout: float = 60.0
    """How long a worker process may take for a step before it counts as hung."""
    normalize_obs: Literal["off", "on"] = "off"
    """Shift and scale observations by each seed's running mean and deviation before the networks see them."""
    reward_scale: float = 1.0
    """Factor on rewards when they are learned from; returns are recorded as they are."""
    train_freq: Literal["step", "episode"] = "step"
    """Update after each step once the random steps are over, or N times after an episode of N steps."""
    on_env_error: Literal["stop", "cut"] = "stop"
    """When a step of an environment fails: save and stop, or end its episode as truncated and go on."""
    max_env_errors: int = 100
    """Failed steps after which a run stops although they are cut."""
    real_env: bool = False
    """The environment is a machine: it exists once, is evaluated in only if asked, and is never replayed."""
    eval_every: Annotated[int, arg(metavar="INT", help_behavior_hint="(default: 5000; with --real-env: 0)")] = AUTO
    """Environment steps between evaluations; there is one at the start and at the end too. 0 is none at all."""
    eval_episodes: int = 10
    """Noise-free episodes in an evaluation."""
    eval_values: Literal["off", "on"] = "off"
    """Compare the first critic's values in evaluations with the returns that followed, if no time limit hides them."""
    async_eval: Literal["auto", "on", "off"] = "auto"
    """Play evaluations on the CPU, in a process of their own, while training goes on; auto does where a GPU learns."""
    log_every: int = 1_000
    """Environment steps between rows of losses and values in metrics.jsonl."""
    checkpoint_every: Annotated[str, arg(metavar="N | 60s")] = "60s"
    """Save the whole run every N environment steps, or every so many seconds, as in 60s."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to learn; auto takes a GPU if there is one."""
    threads: Annotated[int, arg(metavar="INT", help_behavior_hint="(default: by size)")] = AUTO
    """CPU threads for matrix products."""
    accelerate: Literal["auto", "eager", "compile", "graph"] = "auto"
    """Run the update as it stands, compiled (a minute, once), or recorded by a GPU; auto goes by length."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Learn while the environments move, so one update later; auto is on for GPUs."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Of matrix products alone: tf32 is for GPUs, bf16 for processors and GPUs that have it."""

    @property
    def eval_device(self) -> str:
        """Where evaluations are played: beside training on the CPU."""
        return "cpu" if self.async_eval == "on" else self.device


PRESETS: dict[Preset, Config] = {
    # The authors' code since 2019.
    "td3": Config(),
    # The TD3 paper of 2018.
    "paper": Config(hidden=(400, 300), actor_lr=1e-3, critic_lr=1e-3, batch_size=100, train_freq="episode"),
    # The five documents.
    "documents": Config(hidden=(400, 300), actor_lr=1e-3, critic_lr=1e-3, batch_size=100, train_freq="episode"),
}

# Random steps where none are given: a number, and another one for some tasks.
_SMALL_TASKS = ("Pendulum", "InvertedPendulum", "InvertedDoublePendulum", "Reacher")
_RANDOM_STEPS: dict[Preset, tuple[int, dict[str, int]]] = {
    "td3": (25_000, dict.fromkeys(_SMALL_TASKS, 1_000)),
    "paper": (1_000, {"HalfCheetah": 10_000, "Ant": 10_000}),
    "documents": (10_000, {}),
}

# Below this many updates a run is over before a compiler has paid for itself. A CPU gains something for each seed.
_UPDATES_WORTH_COMPILING = {"cpu": 12_000, "cuda": 5_000}

MOST_ENVS = 10_000
MOST_LAYERS = 64
MOST_PIXELS = 2**24  # that are seen at once

# The values a option may take: from and to, and whether the lower end itself is allowed.
_RANGES: dict[str, tuple[float, float, bool]] = {
    "gamma": (0, 1, True),
    "tau": (0, 1, False),
    "target_noise": (0, 10, True),
    "target_noise_clip": (0, 10, True),
    "policy_delay": (1, 1_000_000, True),
    "actor_lr": (0, 1, False),
    "critic_lr": (0, 1, False),
    "steps": (1, 1e12, True),
    "random_steps": (0, 1e12, True),
    "exploration_noise": (0, 10, True),
    "batch_size": (1, 1_000_000, True),
    "buffer_size": (1, 2**31 - 1, True),
    "hidden": (1, 65_536, True),
    "critics": (1, 100, True),
    "updates_per_step": (0, 1000, False),
    "n_step": (1, 1000, True),
    "her": (0, 1000, True),
    "num_envs": (1, 100_000, True),
    "pixels": (0, 4096, True),
    "frame_stack": (1, 64, True),
    "reward_scale": (0, 1e6, False),
    "workers": (0, 1024, True),
    "worker_timeout": (0, 1e6, False),
    "eval_every": (0, 1e12, True),
    "max_env_errors": (0, 1e12, True),
    "eval_episodes": (1, 10_000, True),
    "log_every": (1, 1e12, True),
    "threads": (1, 1024, True),
}


def flag(name: str) -> str:
    """A option as it is typed on the command line."""
    return "--" + name.replace("_", "-")


def from_values(values: dict[str, Any], base: Config, where: str) -> Config:
    """`base` with some options set from Python or JSON values; `where` they came from is named if one is off."""
    known = {field.name for field in fields(Config)}
    for name in values:
        if name not in known:
            raise T3DError(f"{where}: there is no setting '{name}'.{nearest(name, known)}")
    hints = get_type_hints(Config)  # Annotated is stripped
    return replace(base, **{name: _typed(where, name, value, hints[name]) for name, value in values.items()})


def _typed(where: str, name: str, value: Any, hint: Any) -> Any:
    """The value as the option's type, if it can be read as such: 1e6 is a whole number, [64, 64] a tuple."""
    wrong = T3DError(f"{where}: {name} cannot be {shown(value)}; {_expected(hint)}.")
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise wrong
        return value
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple | np.ndarray):
            raise wrong
        return tuple(_typed(where, name, item, int) for item in value)
    if hint is str:
        return str(value)
    if hint is bool:
        if not isinstance(value, bool):
            raise wrong
        return value
    if isinstance(value, bool) or not isinstance(value, Real):  # NumPy's numbers are Real too
        raise wrong
    try:
        if hint is int and not float(value).is_integer():
            raise wrong
        return hint(value)
    except OverflowError:
        raise wrong from None


def _expected(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "it is one of " + ", ".join(get_args(hint))
    if get_origin(hint) is tuple:
        return "it is a list of whole numbers"
    if hint is bool:
        return "it is true or false"
    return "it is a number" if hint is float else "it is a whole number"


def resolve(config: Config, preset: Preset, env: str, seeds: int) -> Config:
    """Decide what was left open, by fixed rules, and refuse what is out of range."""
    task = env.split(":")[-1].split("/")[-1].split("-")[0]
    steps = config.steps
    if steps == AUTO:
        steps = 10_000 if task == "Pendulum" else 1_000_000
    random_steps = config.random_steps
    if random_steps == AUTO:
        usual, by_task = _RANDOM_STEPS[preset]
        random_steps = min(by_task.get(task, usual), steps // 10)
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    config = replace(config, steps=steps, random_steps=random_steps, device=device)
    if config.eval_every == AUTO:
        config = replace(config, eval_every=0 if config.real_env else 5_000)
    if config.threads == AUTO:
        config = replace(config, threads=_threads(config, seeds))
    check_ranges(config)
    if config.accelerate == "auto":
        # A function of the run alone, so that the same run is always the same.
        updates = (steps - random_steps) * config.updates_per_step * (seeds if device == "cpu" else 1)
        long = updates >= _UPDATES_WORTH_COMPILING[device]
        config = replace(config, accelerate=("compile" if device == "cpu" else "graph") if long else "eager")
    if config.overlap == "auto":
        config = replace(config, overlap="on" if device == "cuda" and config.train_freq == "step" else "off")
    if config.overlap == "on" and config.train_freq == "episode":
        raise T3DError("--overlap on needs --train-freq step: after an episode there is nothing to overlap with.")
    if config.random_steps >= config.steps:
        raise T3DError(
            f"--random-steps {config.random_steps:,} leaves nothing to learn from in --steps {config.steps:,}:"
            " give fewer random steps or more steps."
        )
    if config.her and config.n_step > 1:
        raise T3DError("--her needs --n-step 1: with another goal the rewards in between would be others too.")
    if 0 < config.pixels < 8:
        raise T3DError(f"--pixels {config.pixels}: images are at least 8 pixels high and wide.")
    if config.num_envs * config.n_step > config.buffer_size:
        raise T3DError(
            f"--buffer-size {config.buffer_size:,} does not hold what one step can bring:"
            f" --num-envs {config.num_envs} times --n-step {config.n_step}."
        )
    refuse_hardware(config)
    refuse_too_many(config, seeds)
    if config.real_env:
        refuse_more_than_one(config, seeds)
    return config


def refuse_too_many(config: Config, seeds: int) -> None:
    """More environments than any machine has memory for are a mistake, or a file that means harm."""
    for name, each in (("num_envs", config.num_envs), ("eval_episodes", config.eval_episodes)):
        if seeds * each > MOST_ENVS:
            raise T3DError(
                f"{flag(name)} {each:,} and {seeds:,} seeds are {seeds * each:,} environments; at most"
                f" {MOST_ENVS:,} are made."
            )


def refuse_more_than_one(config: Config, seeds: int) -> None:
    """Say what a real environment cannot be, because it exists once and does nothing but what it is told."""
    asked = {
        "more than one seed": seeds > 1,
        "--num-envs": config.num_envs > 1,
        "--workers": config.workers > 0,
        "--her": config.her > 0,
        "--async-eval on": config.async_eval == "on",
        "--eval-values on": config.eval_values == "on",
    }
    if wrong := [name for name, given in asked.items() if given]:
        raise T3DError(f"a real environment exists once and is not copied: it cannot have {', '.join(wrong)}.")


def refuse_hardware(config: Config) -> None:
    """Say so where there is no such device, or it has no such numbers: it would pretend to, slowly."""
    precision, device = config.precision, config.device
    if device == "cuda" and not torch.cuda.is_available():
        raise T3DError("--device cuda: PyTorch finds no GPU on this machine; use --device cpu or auto.")
    if config.accelerate == "graph" and device != "cuda":
        raise T3DError("--accelerate graph is for NVIDIA GPUs; on a CPU use compile, eager or auto.")
    if precision == "tf32" and device != "cuda":
        raise T3DError("--precision tf32 is for NVIDIA GPUs; on a CPU use fp32, or bf16 where it has it.")
    if device == "cuda" and precision != "fp32" and torch.cuda.get_device_capability() < (8, 0):
        raise T3DError(f"--precision {precision}: this GPU has no such numbers; use fp32.")
    if device == "cpu" and precision == "bf16" and not has_avx512_bf16():
        raise T3DError("--precision bf16: this processor has no such numbers; use fp32.")


def _threads(config: Config, seeds: int) -> int:
    """More threads than cores never help; below a million multiplications one thread is as fast as two.

    Where a GPU multiplies, threads would only stand in the way of the environments.
    """
    if config.device == "cuda":
        return 1
    widest = max(config.hidden, default=1)
    return min(cores(), 8) if seeds * config.batch_size * widest * widest >= 1_000_000 else 1


def parse_every(text: str) -> tuple[float, int]:
    """60s is 60 seconds, 5000 or 5e3 that many steps: (seconds, steps), one of them 0."""
    number, seconds = (text[:-1], True) if text.endswith("s") else (text, False)
    value = float(number) if re.fullmatch(r"[0-9]{1,15}(\.[0-9]{0,15})?(e[0-9]{1,2})?", number) else 0.0
    if not 0 < value < 1e12 or not (seconds or value.is_integer()):
        raise T3DError(f"--checkpoint-every cannot be {text!r}: it is steps, as in 5000, or seconds, as in 60s.")
    return (value, 0) if seconds else (0.0, int(value))


def check_ranges(config: Config) -> None:
    """Refuse a option that is out of its range."""
    parse_every(config.checkpoint_every)
    for name, (low, high, closed) in _RANGES.items():
        value = getattr(config, name)
        for number in value if isinstance(value, tuple) else (value,):
            if not (low <= number <= high) or (number == low and not closed):
                between = f"between {low:g} and {high:g}" if closed else f"above {low:g} and at most {high:g}"
                raise T3DError(f"{flag(name)} must be {between}; it is {number:g}.")
    if len(config.hidden) > MOST_LAYERS:
        raise T3DError(f"--hidden has {len(config.hidden):,} layers; at most {MOST_LAYERS} are made.")
    if 3 * config.pixels**2 * config.frame_stack > MOST_PIXELS:
        raise T3DError(
            f"--pixels {config.pixels} and --frame-stack {config.frame_stack} are too many pixels: lower one of them."
        )
    if not config.hidden:
        raise T3DError("--hidden needs at least one layer, for example --hidden 256 256.")
