"""The documents' interface: `ReplayBuffer`, `Actor`, `Critic` and `T3D`, with their names and shapes.

A thin layer over the functions of `steps`, so that a script written from the documents runs unchanged and
runs the same algorithm as `t3d train`. Here states, actions and noise are in the environment's own units,
and actions lie within ±max_action.
"""

from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from t3d import files, rng, steps
from t3d.errors import T3DError
from t3d.networks import MLP, Parameters
from t3d.replay import Batch, Replay, Transitions
from t3d.rng import Purpose
from t3d.state_dict import state_dict

FORMAT = 1  # of the files that `T3D.save` writes
Transition = tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike, ArrayLike]
Arrays = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]


class ReplayBuffer:
    """[step 1] The replay memory, filled with (state, next_state, action, reward, done)."""

    def __init__(self, max_size: float = 1e6) -> None:
        if not (isinstance(max_size, Real) and 1 <= float(max_size) < 2**31):
            raise T3DError(f"a replay buffer holds between 1 and 2^31 transitions; max_size is {max_size!r}.")
        self.max_size: int = int(max_size)
        self._replay: Replay | None = None

    def __len__(self) -> int:
        return 0 if self._replay is None else int(self._replay.length)

    def add(self, transition: Transition) -> None:
        """[step 1] Store one transition; when the buffer is full, over the oldest."""
        names = ("state", "next_state", "action", "reward", "done")
        if len(transition) != len(names):
            raise T3DError(f"a transition is ({', '.join(names)}); this one has {len(transition)} parts.")
        parts = [np.asarray(part).reshape(1, 1, -1) for part in transition]
        first = self._replay is None
        obs_dim = parts[0].size if self._replay is None else self._replay.obs_dim
        action_dim = parts[2].size if self._replay is None else self._replay.action_dim
        sizes = (obs_dim, obs_dim, action_dim, 1, 1)
        for name, part, size in zip(names, parts, sizes, strict=True):
            if part.size != size:
                expected = "it should have" if first else "those before it had"
                raise T3DError(f"the {name} of this transition has {part.size} numbers; {expected} {size}.")
        replay = self._replay = self._replay or self._new_replay(parts)
        state, next_state, action, reward, done = parts
        one = np.ones((1, 1), bool)
        replay.add(Transitions(state, action, reward[..., 0], next_state, done[..., 0], 1, one))

    def _new_replay(self, parts: list[NDArray[Any]]) -> Replay:
        """The first transition tells the sizes, and whether states come in single or double precision."""
        dtype = torch.float64 if np.result_type(*parts[:3]).itemsize > 4 else torch.float32
        try:
            return Replay(1, self.max_size, parts[0].size, parts[2].size, dtype=dtype)
        except RuntimeError as error:
            raise T3DError(
                f"{self.max_size:,} transitions with states of {parts[0].size:,} numbers do not fit into memory;"
                " make the ReplayBuffer with a smaller max_size."
            ) from error

    def sample(self, batch_size: int) -> Arrays:
        """[step 4] states, next_states, actions, rewards (n, 1), dones (n, 1), drawn with `np.random`."""
        if self._replay is None:
            raise T3DError("the replay buffer is empty: add transitions before sampling.")
        bits = np.random.randint(0, 2**32, size=(1, *_sizes(batch_size)), dtype=np.int64)
        batch = self._replay.sample(torch.from_numpy(bits), gamma=1.0)
        scalars = (batch.reward[..., None], batch.terminated[..., None])
        states, next_states, actions, rewards, dones = (
            part[0].numpy() for part in (batch.obs, batch.next_obs, batch.action, *scalars)
        )
        return states, next_states, actions, rewards, dones


class Samples(Protocol):
    """Anything that samples as the documents' buffer does."""

    def sample(self, batch_size: int) -> Any: ...


class _Network(nn.Module):
    """Layers `layer_1`, `layer_2`, … in the layout of `nn.Linear` that are views of live parameters.

    Weights are transposed views, so `safetensors` wants `.contiguous()` copies of what `state_dict` gives.
    """

    def __init__(self, parameters: Parameters, twins: int) -> None:
        super().__init__()
        self.depth = len(parameters) // 2
        for twin in range(twins):
            for i in range(1, self.depth + 1):
                w, b = parameters[f"w{i}"], parameters[f"b{i}"]
                # (1, in, out) for an actor, (2, 1, in, out) for critics -> (out, in) and (out,), the same memory.
                w, b = w.reshape(-1, *w.shape[-2:])[twin], b.reshape(-1, b.shape[-1])[twin]
                layer = nn.Linear(w.shape[0], w.shape[1], device="meta")
                layer.weight, layer.bias = nn.Parameter(w.T), nn.Parameter(b)
                self.add_module(f"layer_{twin * self.depth + i}", layer)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`.to`, `.double` and the like: they may not cut a network off from the agent that it shows."""
        if any(fn(parameter.data).data_ptr() != parameter.data_ptr() for parameter in self.parameters()):
            raise T3DError(
                "this network shares its weights with others and cannot be converted; T3D takes device and dtype."
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def parameters_of(self, twin: int) -> Parameters:
        """One network as the functions of `networks` take it, still tied to this module's parameters."""
        parameters = {}
        for i in range(1, self.depth + 1):
            layer = self.get_submodule(f"layer_{twin * self.depth + i}")
            assert isinstance(layer, nn.Linear)
            parameters[f"w{i}"], parameters[f"b{i}"] = layer.weight.T, layer.bias[None]
        return parameters


class Actor(_Network):
    """[step 2] `actor(state)` -> actions within ±max_action."""

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        max_action: float,
        *,
        hidden: Sequence[int] = (400, 300),
        parameters: Parameters | None = None,
    ) -> None:
        if parameters is None:
            obs_dim, act_dim = _sizes(state_dim, action_dim)
            parameters = MLP.init_actor(_new_seed(), obs_dim, act_dim, _sizes(*hidden), torch.get_default_dtype())
        super().__init__(parameters, twins=1)
        self.max_action = _positive("max_action", max_action)

    def forward(self, state: Tensor) -> Tensor:
        return MLP.actor(self.parameters_of(0), state, self.max_action)


class Critic(_Network):
    """[step 3] `critic(state, action)` -> Q1 (n, 1) and Q2 (n, 1); `critic.Q1(state, action)` the first alone."""

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        *,
        hidden: Sequence[int] = (400, 300),
        parameters: Parameters | None = None,
    ) -> None:
        if parameters is None:
            obs_dim, act_dim = _sizes(state_dim, action_dim)
            parameters = MLP.init_critic(_new_seed(), obs_dim, act_dim, _sizes(*hidden), torch.get_default_dtype())
        super().__init__(parameters, twins=2)

    def forward(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        return self.Q1(state, action), self._q(1, state, action)

    def Q1(self, state: Tensor, action: Tensor) -> Tensor:
        return self._q(0, state, action)

    def _q(self, twin: int, state: Tensor, action: Tensor) -> Tensor:
        return MLP.critic(self.parameters_of(twin), state, action)[..., None]


class T3D:
    """The documents' agent: four objects that hold six networks, and the training process."""

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        max_action: float,
        *,
        hidden: Sequence[int] = (400, 300),
        actor_lr: float = 1e-3,
        critic_lr: float = 1e-3,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.state_dim, self.action_dim = _sizes(state_dim, action_dim)
        self.max_action = _positive("max_action", max_action)
        self.actor_lr, self.critic_lr = _positive("actor_lr", actor_lr), _positive("critic_lr", critic_lr)
        hidden = _sizes(*hidden)
        self._show(steps.init_agent(_new_seed().to(device), self.state_dim, self.action_dim, hidden, dtype))

    def _show(self, agent: steps.Agent) -> None:
        """Make the four objects of the documents around the agent's own tensors."""
        self._agent = agent
        sizes = (self.state_dim, self.action_dim)
        self.actor = Actor(*sizes, self.max_action, parameters=agent.actor)
        self.actor_target = Actor(*sizes, self.max_action, parameters=agent.target_actor)
        self.critic = Critic(*sizes, parameters=agent.critic)
        self.critic_target = Critic(*sizes, parameters=agent.target_critic)

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes its four objects anew: a module copied by itself would lose its tie to the agent's tensors."""
        return {name: value for name, value in vars(self).items() if not isinstance(value, nn.Module)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._show(self._agent)

    @property
    def updates(self) -> int:
        """How often the critics were updated in the agent's life."""
        return int(self._agent.updates)

    @torch.no_grad()
    def select_action(self, state: ArrayLike) -> NDArray[np.float32]:
        """The actor's action for one state, without noise: float32 (action_dim,)."""
        obs = np.asarray(state, dtype=np.float64)
        if obs.size != self.state_dim:
            raise T3DError(f"select_action takes one state of {self.state_dim} numbers; this has {obs.size}.")
        if not np.isfinite(obs).all():
            column = int(np.flatnonzero(~np.isfinite(obs))[0])
            raise T3DError(f"select_action: state[{column}] is {obs.flat[column]}, not a finite number.")
        action = MLP.actor(self._agent.actor, self._tensor(obs.reshape(1, -1)), self.max_action)
        return np.asarray(action.flatten().cpu().numpy(), dtype=np.float32)

    def train(
        self,
        replay_buffer: Samples,
        iterations: int,
        batch_size: int = 100,
        discount: float = 0.99,
        tau: float = 0.005,
        policy_noise: float = 0.2,
        noise_clip: float = 0.5,
        policy_freq: int = 2,
    ) -> None:
        """Steps 4 to 15, `iterations` times; the delay counts over the agent's life: updates 2, 4, ..."""
        (policy_freq, batch_size), tau = _sizes(policy_freq, batch_size), _positive("tau", tau)
        if not (0 <= discount <= 1 and tau <= 1 and policy_noise >= 0 and noise_clip >= 0):
            raise T3DError("discount and tau are between 0 and 1, policy_noise and noise_clip are not negative.")
        agent = self._agent
        hp = steps.Hyperparameters(
            gamma=discount,
            tau=tau,
            target_noise=policy_noise,
            target_noise_clip=noise_clip,
            policy_delay=policy_freq,
            actor_lr=self.actor_lr,
            critic_lr=self.critic_lr,
        )
        for update in range(self.updates + 1, self.updates + int(iterations) + 1):
            parts = (self._tensor(part)[None] for part in replay_buffer.sample(batch_size))  # one seed: (1, n, …)
            obs, next_obs, action, reward, done = parts
            reward, done = reward.flatten(1), done.flatten(1)
            batch = Batch(obs, action, reward, next_obs, done, torch.full_like(reward, discount))
            noise = rng.normal(agent.seeds, Purpose.SMOOTHING, agent.updates, action.shape[1:], action.dtype)
            policy_step = steps.is_policy_step(update, policy_freq)
            steps.learn(batch, agent, noise, hp, policy_step, self.max_action)

    def save(self, filename: str, directory: str | Path) -> None:
        """Everything that learns, in `directory/filename.safetensors`."""
        folder = files.make_folder(Path(directory))
        files.write_bytes(folder / f"{filename}.safetensors", files.seal(self._saved(), {"format": str(FORMAT)}))

    def load(self, filename: str, directory: str | Path) -> None:
        """Restore networks, targets, optimizers and counters; the agent goes on as if it had never stopped."""
        path = Path(directory) / f"{filename}.safetensors"
        live = self._saved()
        most = sum(tensor.nbytes for tensor in live.values()) * 2 + 2**20  # at most in twice the precision
        given, header = files.unseal(files.read_bytes(path, most, tensors=True), path)
        files.refuse_format(path, header.get("format", "0"), str(FORMAT))
        files.refuse_numbers(path, given, lambda name, tensor: False)
        if "max_action" in given and not torch.equal(given["max_action"], live["max_action"]):
            raise T3DError(f"{path} holds an agent with another max_action than {self.max_action:g}.")
        files.copy_tensors(path, given, live)

    def _saved(self) -> dict[str, Tensor]:
        return {**state_dict(self._agent), "max_action": torch.tensor(self.max_action, dtype=torch.float64)}

    def _tensor(self, array: ArrayLike) -> Tensor:
        live = self._agent.actor["w1"]
        return torch.as_tensor(np.asarray(array), dtype=live.dtype, device=live.device)


def _sizes(*sizes: Any) -> tuple[int, ...]:
    """Whole numbers from 1 up; 3.0 is one."""
    if not sizes or not all(isinstance(size, Real) and float(size) >= 1 and float(size).is_integer() for size in sizes):
        raise T3DError(f"sizes and counts are whole numbers from 1 up; these are {sizes}.")
    return tuple(int(size) for size in sizes)


def _positive(name: str, number: Any) -> float:
    if not (isinstance(number, Real) and 0 < float(number) < float("inf")):
        raise T3DError(f"{name} must be a positive, finite number; it is {number!r}.")
    return float(number)


def _new_seed() -> Tensor:
    """A seed from torch's global generator, so that `torch.manual_seed` decides what follows."""
    return torch.randint(2**62, (1,))
