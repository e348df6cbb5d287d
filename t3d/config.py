"""Every option of a training run, with its help text; the presets; the choice of options left open.

`steps.Hyperparameters` holds the options of the update equations. `Config` adds those of the training loop.
`config.json` in a run folder records the values that were used. None of them is left open.
"""

import re
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import torch

from t3d.errors import T3DError, nearest, shown
from t3d.limits import cores
from t3d.options import Group, Shown, flag, same_option, takes
from t3d.steps import Hyperparameters
from t3d.torch_private import has_avx512_bf16

Preset = Literal["td3", "paper", "documents"]

AUTO = -(2**62)  # an integer left open: `resolve` chooses it

_RANDOM_STEPS_DEFAULT = "with td3: 25000; pendulums, Reacher: 1000; at most a tenth of the steps"


@dataclass(frozen=True)
class Config(Hyperparameters):
    """The options of a training run."""

    steps: Annotated[int, Group.COMMON, Shown(default="1e6; Pendulum-v1: 1e4")] = AUTO
    """Environment steps per seed, as in 1000000 or 1e6."""
    num_envs: Annotated[int, Group.COMMON] = 1
    """Environments per seed that are stepped together. --steps counts the steps of all of them."""
    batch_size: Annotated[int, Group.COMMON] = 256
    """Transitions per batch. [step 4]"""
    hidden: Annotated[tuple[int, ...], Group.COMMON] = (256, 256)
    """Sizes of the hidden layers of the actor and the critics. [steps 2, 3]"""
    actor_lr: Annotated[float, Group.COMMON] = Hyperparameters.actor_lr
    critic_lr: Annotated[float, Group.COMMON] = Hyperparameters.critic_lr
    device: Annotated[Literal["auto", "cpu", "cuda"], Group.COMMON] = "auto"
    """Device for training. auto uses a GPU if one is available."""

    buffer_size: Annotated[int, Group.ALGORITHM] = 1_000_000
    """Replay buffer capacity per seed, in transitions. [step 1]"""
    updates_per_step: Annotated[float, Group.ALGORITHM] = 1.0
    """Updates per environment step."""
    train_freq: Annotated[Literal["step", "episode"], Group.ALGORITHM] = "step"
    """step: update after every environment step once the random steps are over. episode: update N times after an
    episode of N steps."""
    n_step: Annotated[int, Group.ALGORITHM] = 1
    """Rewards summed in a transition before the target bootstraps (n-step returns). [step 9]"""
    her: Annotated[int, Group.ALGORITHM] = 0
    """Hindsight experience replay for goal tasks: copies stored of each transition, with goals that its episode
    reached later. 0 disables it; 4 is common. [step 1]"""
    augment: Annotated[Literal["on", "off"], Group.ALGORITHM] = "on"
    """Random shifts of image observations in batches. [step 4]"""

    critics: Annotated[int, Group.NETWORKS] = 2
    """Number of critics. The target uses their minimum; 1 disables clipped double Q-learning. [steps 3, 8]"""
    critic_norm: Annotated[Literal["none", "layer"], Group.NETWORKS] = "none"
    """Layer normalization in the critics. It stabilizes high learning rates and many updates per step. [step 3]"""
    encoder: Annotated[Literal["critic", "separate"], Group.NETWORKS] = "critic"
    """Image encoder: one that both critics train and the actor shares, or one per network. [steps 2, 3]"""

    pixels: Annotated[int, Group.ENVIRONMENT] = 0
    """Height and width of rendered images that replace the observations. 0 disables them; 84 is common."""
    frame_stack: Annotated[int, Group.ENVIRONMENT] = 3
    """Frame stack: number of images per observation. [step 4]"""
    normalize_obs: Annotated[Literal["off", "on"], Group.ENVIRONMENT] = "off"
    """Observation normalization with each seed's running mean and standard deviation."""
    workers: Annotated[int, Group.ENVIRONMENT] = 0
    """Worker processes that step the environments. 0 steps them in the main process. A worker process that dies or
    hangs is replaced."""
    worker_timeout: Annotated[float, Group.ENVIRONMENT] = 60.0
    """Seconds for one step of a worker process before it counts as hung."""
    on_env_error: Annotated[Literal["stop", "cut"], Group.ENVIRONMENT] = "stop"
    """When an environment step fails: stop saves the run and exits; cut truncates the episode and continues."""
    max_env_errors: Annotated[int, Group.ENVIRONMENT] = 100
    """Failed steps that --on-env-error cut tolerates. One more stops the run."""
    real_env: Annotated[bool, Group.ENVIRONMENT] = False
    """The environment is physical hardware. It exists once, is evaluated only on request, and its episodes are not
    replayed on resume."""

    random_steps: Annotated[int, Group.EXPLORATION, Shown(default=_RANDOM_STEPS_DEFAULT)] = AUTO
    """Environment steps with uniformly random actions before the actor is used."""
    exploration_noise: Annotated[float, Group.EXPLORATION] = 0.1
    """Standard deviation of the Gaussian noise on actions; 1 is half the action range."""

    eval_every: Annotated[int, Group.EVALUATION, Shown(default="5000; with --real-env: 0")] = AUTO
    """Environment steps between evaluations. The run is also evaluated at its start and end. 0 disables evaluation."""
    eval_episodes: Annotated[int, Group.EVALUATION] = 10
    """Episodes per evaluation, without exploration noise."""
    eval_values: Annotated[Literal["off", "on"], Group.EVALUATION] = "off"
    """Compare the first critic's Q-values in evaluations with the returns that followed, where no time limit hides
    them."""
    async_eval: Annotated[Literal["auto", "on", "off"], Group.EVALUATION] = "auto"
    """Async evaluation: evaluate on the CPU, in a separate process, while training continues. auto enables it where
    training uses a GPU, a quarter of the cores is free, and actors are small and see no images."""

    checkpoint_every: Annotated[str, Group.SAVING, Shown("N | 60s")] = "60s"
    """Environment steps between checkpoints, or seconds, as in 60s."""
    log_every: Annotated[int, Group.SAVING] = 1_000
    """Environment steps between the rows of losses and Q-values in metrics.jsonl."""

    threads: Annotated[int, Group.HARDWARE, Shown(default="by batch size and layer sizes")] = AUTO
    """CPU threads for matrix products."""
    accelerate: Annotated[Literal["auto", "eager", "compile", "graph"], Group.HARDWARE] = "auto"
    """How updates run: eager, compiled, or captured as CUDA graphs. auto compiles long runs on a CPU and captures them
    on a GPU. Compiling takes about a minute."""
    overlap: Annotated[Literal["auto", "on", "off"], Group.HARDWARE] = "auto"
    """Run updates while the environments step. Actions then use the parameters of one update earlier. auto enables it
    on GPUs with --train-freq step."""
    precision: Annotated[Literal["fp32", "tf32", "bf16"], Group.HARDWARE] = "fp32"
    """Precision of matrix products. tf32 needs a GPU; bf16 needs a GPU or a CPU with AVX512-BF16."""

    @property
    def eval_device(self) -> str:
        """The device of evaluations. Async evaluation uses the CPU."""
        return "cpu" if self.async_eval == "on" else self.device


PRESETS: dict[Preset, Config] = {
    # The authors' code since 2019.
    "td3": Config(),
    # The TD3 paper of 2018.
    "paper": Config(hidden=(400, 300), actor_lr=1e-3, critic_lr=1e-3, batch_size=100, train_freq="episode"),
    # The five documents.
    "documents": Config(hidden=(400, 300), actor_lr=1e-3, critic_lr=1e-3, batch_size=100, train_freq="episode"),
}

# Default of random_steps: a number, and other numbers for some tasks.
_SMALL_TASKS = ("Pendulum", "InvertedPendulum", "InvertedDoublePendulum", "Reacher")
_RANDOM_STEPS: dict[Preset, tuple[int, dict[str, int]]] = {
    "td3": (25_000, dict.fromkeys(_SMALL_TASKS, 1_000)),
    "paper": (1_000, {"HalfCheetah": 10_000, "Ant": 10_000}),
    "documents": (10_000, {}),
}

# With fewer updates, compiling takes longer than it saves. On a CPU the updates of every seed count.
_UPDATES_WORTH_COMPILING = {"cpu": 12_000, "cuda": 5_000}

MOST_ENVS = 10_000
MOST_LAYERS = 64
MOST_PIXELS = 2**24  # per observation, with the frame stack

# The range of each numeric option: lowest, highest, and whether the lowest value itself is allowed.
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


def from_values(values: dict[str, Any], base: Config, where: str) -> Config:
    """`base` with options replaced by Python or JSON values. Errors name `where` the values came from."""
    known = {field.name for field in fields(Config)}
    for name in values:
        if name not in known:
            raise T3DError(f"{where}: there is no option '{name}'.{same_option(name) or nearest(name, known)}")
    hints = get_type_hints(Config)  # Annotated is stripped
    return replace(base, **{name: _typed(where, name, value, hints[name]) for name, value in values.items()})


def _typed(where: str, name: str, value: Any, hint: Any) -> Any:
    """The value, converted to the type of the option: 1e6 is a whole number, [64, 64] is a tuple."""
    wrong = T3DError(f"{where}: {name} cannot be {shown(value)}: it takes {_expected(hint)}.")
    if get_origin(hint) is Literal:
        if isinstance(value, bool) and "on" in get_args(hint):
            return "on" if value else "off"
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
    return "a list of whole numbers" if get_origin(hint) is tuple else takes(hint)


def resolve(config: Config, preset: Preset, env: str, seeds: int) -> Config:
    """Choose the options left open, by fixed rules, and refuse values that are out of range or conflict."""
    config = _choose_schedule(config, preset, env)
    if config.device == "auto":
        config = replace(config, device="cuda" if torch.cuda.is_available() else "cpu")
    if config.threads == AUTO:
        config = replace(config, threads=_threads(config, seeds))
    check_ranges(config)
    config = _choose_speed(config, seeds)
    refuse_unusable(config, seeds)
    return config


def refuse_unusable(config: Config, seeds: int) -> None:
    """Refuse what `resolve` would not have chosen; a config.json may have been edited."""
    check_ranges(config)
    refuse_conflicts(config)
    refuse_hardware(config)
    refuse_too_many(config, seeds)
    if config.real_env:
        refuse_more_than_one(config, seeds)


def refuse_open(config: Config, where: str) -> None:
    """Refuse options that are still open in the config.json of a run."""
    for field in fields(config):
        value = getattr(config, field.name)
        if value == AUTO or (value == "auto" and field.name != "precision"):
            raise T3DError(f"{where}: {field.name} cannot be {shown(value)}; a run keeps the value that was chosen.")


def _choose_schedule(config: Config, preset: Preset, env: str) -> Config:
    """Choose the number of steps, of random steps, and of steps between evaluations."""
    task = env.split(":")[-1].split("/")[-1].split("-")[0]
    if config.steps == AUTO:
        config = replace(config, steps=10_000 if task == "Pendulum" else 1_000_000)
    if config.random_steps == AUTO:
        usual, by_task = _RANDOM_STEPS[preset]
        config = replace(config, random_steps=min(by_task.get(task, usual), config.steps // 10))
    if config.eval_every == AUTO:
        config = replace(config, eval_every=0 if config.real_env else 5_000)
    return config


def _choose_speed(config: Config, seeds: int) -> Config:
    """Choose how updates run. The choice depends on the options alone, so equal runs are computed equally."""
    device = config.device
    if config.accelerate == "auto":
        updates = (config.steps - config.random_steps) * config.updates_per_step * (seeds if device == "cpu" else 1)
        long = updates >= _UPDATES_WORTH_COMPILING[device]
        config = replace(config, accelerate=("compile" if device == "cpu" else "graph") if long else "eager")
    if config.overlap == "auto":
        config = replace(config, overlap="on" if device == "cuda" and config.train_freq == "step" else "off")
    return config


def refuse_conflicts(config: Config) -> None:
    """Refuse options that exclude each other."""
    if config.overlap == "on" and config.train_freq == "episode":
        raise T3DError(
            "--overlap on needs --train-freq step: with --train-freq episode no environment steps during the updates."
        )
    if config.random_steps >= config.steps:
        raise T3DError(
            f"--random-steps {config.random_steps:,} must be less than --steps {config.steps:,}: the other steps are"
            " for the actor."
        )
    if config.her and config.n_step > 1:
        raise T3DError("--her needs --n-step 1: the rewards within an n-step return depend on the goal.")
    if 0 < config.pixels < 8:
        raise T3DError(f"--pixels {config.pixels}: images are at least 8 pixels high and wide.")
    if config.num_envs * config.n_step > config.buffer_size:
        raise T3DError(
            f"--buffer-size {config.buffer_size:,} is smaller than --num-envs {config.num_envs} times --n-step"
            f" {config.n_step}, the transitions that one step can add."
        )


def refuse_too_many(config: Config, seeds: int) -> None:
    """Refuse more environments than any machine has memory for, also when a config.json asks for them."""
    for name, each in (("num_envs", config.num_envs), ("eval_episodes", config.eval_episodes)):
        if seeds * each > MOST_ENVS:
            raise T3DError(
                f"{flag(name)} {each:,} with {seeds:,} seeds needs {seeds * each:,} environments; the limit is"
                f" {MOST_ENVS:,}."
            )


def refuse_more_than_one(config: Config, seeds: int) -> None:
    """Refuse the options that need more than one instance of a real environment."""
    asked = {
        "more than one seed": seeds > 1,
        "--num-envs": config.num_envs > 1,
        "--workers": config.workers > 0,
        "--her": config.her > 0,
        "--async-eval on": config.async_eval == "on",
        "--eval-values on": config.eval_values == "on",
    }
    if wrong := [name for name, given in asked.items() if given]:
        raise T3DError(f"a real environment exists once, which excludes {', '.join(wrong)}.")


def refuse_hardware(config: Config) -> None:
    """Refuse a device or a precision that this machine does not have. PyTorch would emulate some of them slowly."""
    precision, device = config.precision, config.device
    if device == "cuda" and not torch.cuda.is_available():
        raise T3DError("--device cuda: PyTorch finds no GPU on this machine; use --device cpu or auto.")
    if config.accelerate == "graph" and device != "cuda":
        raise T3DError("--accelerate graph is for NVIDIA GPUs; on a CPU use compile, eager or auto.")
    if precision == "tf32" and device != "cuda":
        raise T3DError("--precision tf32 is for NVIDIA GPUs; on a CPU use fp32, or bf16 if the CPU has AVX512-BF16.")
    if device == "cuda" and precision != "fp32" and torch.cuda.get_device_capability() < (8, 0):
        raise T3DError(f"--precision {precision}: this GPU is older than compute capability 8.0; use fp32.")
    if device == "cpu" and precision == "bf16" and not has_avx512_bf16():
        raise T3DError("--precision bf16: this CPU has no AVX512-BF16; use fp32.")


def _threads(config: Config, seeds: int) -> int:
    """One thread on a GPU and for small networks; else one per core, at most eight.

    Below a million multiplications per layer, one thread is as fast as two.
    """
    if config.device == "cuda":
        return 1
    widest = max(config.hidden, default=1)
    return min(cores(), 8) if seeds * config.batch_size * widest * widest >= 1_000_000 else 1


def parse_every(text: str) -> tuple[float, int]:
    """(seconds, steps), one of them 0: 60s is 60 seconds; 5000 and 5e3 are 5000 steps."""
    number, seconds = (text[:-1], True) if text.endswith("s") else (text, False)
    value = float(number) if re.fullmatch(r"[0-9]{1,15}(\.[0-9]{0,15})?(e[0-9]{1,2})?", number) else 0.0
    if not 0 < value < 1e12 or not (seconds or value.is_integer()):
        raise T3DError(f"--checkpoint-every cannot be {text!r}: it takes steps, as in 5000, or seconds, as in 60s.")
    return (value, 0) if seconds else (0.0, int(value))


def check_ranges(config: Config) -> None:
    """Refuse an option that is out of its range."""
    parse_every(config.checkpoint_every)
    for name, (low, high, closed) in _RANGES.items():
        value = getattr(config, name)
        for number in value if isinstance(value, tuple) else (value,):
            if not (low <= number <= high) or (number == low and not closed):
                between = f"between {low:g} and {high:g}" if closed else f"above {low:g} and at most {high:g}"
                raise T3DError(f"{flag(name)} must be {between}; it is {number:g}.")
    if len(config.hidden) > MOST_LAYERS:
        raise T3DError(f"--hidden has {len(config.hidden):,} layers; the limit is {MOST_LAYERS}.")
    if 3 * config.pixels**2 * config.frame_stack > MOST_PIXELS:
        raise T3DError(
            f"--pixels {config.pixels} with --frame-stack {config.frame_stack} is more than {MOST_PIXELS:,} numbers per"
            " observation: lower one of them."
        )
    if not config.hidden:
        raise T3DError("--hidden needs at least one layer, for example --hidden 256 256.")
