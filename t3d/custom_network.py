"""[steps 2 and 3] Networks of your own: written once for one network, run for every seed and twin.

    def init(sizes, generator):        # (inputs, *hidden, outputs) -> a dictionary of tensors, drawn from `generator`
    def apply(parameters, x):          # that dictionary and (batch, inputs) -> (batch, outputs)

    t3d.train("Pendulum-v1", network=t3d.Network(init, apply))
    t3d.train("Pendulum-v1", network=MyModule)     # an nn.Module made by MyModule(inputs, outputs)

The actor and the critics use the same pair of functions; the actor's outputs go through tanh afterwards. They are
slower than the networks of the package, because PyTorch cannot batch every layer over the seeds.

Shapes: S seeds, B batch. A tensor is kept flat, (S, 1, n) or for critics (twins, S, 1, n), as Adam and Polyak expect.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from t3d import rng
from t3d.errors import T3DError
from t3d.networks import Networks, Parameters, any_of
from t3d.rng import Purpose

Init = Callable[[tuple[int, ...], torch.Generator], Parameters]
Apply = Callable[[Parameters, Tensor], Tensor]


class Network:
    """A pair of functions for one network, run for many at once."""

    def __init__(self, init: Init, apply: Apply, name: str | None = None) -> None:
        self.name = name or getattr(init, "__name__", "network")
        self._init, self._apply = init, apply
        self._shapes: dict[Sizes, dict[str, torch.Size]] = {}  # of each tensor, by the sizes of all

    def networks(self, critics: int = 2) -> Networks:
        """Actor and critics made of it."""
        return Networks(self.init, self.init, self.apply, critics, name=self.name)

    def init(
        self, seeds: Tensor, purpose: Purpose, copies: int, sizes: Sequence[int], dtype: torch.dtype
    ) -> Parameters:
        """Initial weights for `copies` networks of each seed, each from its own random numbers."""
        networks = [
            [self._one(rng.integer(seed, purpose, 0, copy), sizes, dtype) for seed in seeds.tolist()]
            for copy in range(copies)
        ]
        return {
            name: torch.stack([torch.stack([one[name] for one in of_copy]) for of_copy in networks]).to(seeds.device)
            for name in networks[0][0]
        }

    def _one(self, seed: int, sizes: Sequence[int], dtype: torch.dtype) -> Parameters:
        made = self._init(tuple(sizes), torch.Generator().manual_seed(seed))
        if not isinstance(made, dict) or not made or not all(isinstance(tensor, Tensor) for tensor in made.values()):
            raise T3DError(f"{self.name}: init must give a dictionary of tensors; it gave {type(made).__name__}.")
        flat = {name: tensor.detach().to(dtype).reshape(1, -1) for name, tensor in made.items()}
        shapes = {name: tensor.shape for name, tensor in made.items()}
        if self._shapes.setdefault(_sizes(flat), shapes) != shapes:
            raise T3DError(f"{self.name}: two networks whose tensors have the same sizes must have the same shapes.")
        self._check(flat, sizes, dtype)
        return flat

    def _check(self, flat: Parameters, sizes: Sequence[int], dtype: torch.dtype) -> None:
        """Run it once as in training, to refuse now what would fail there."""

        def total(parameters: Parameters) -> tuple[Tensor, Tensor]:
            out = self.apply(parameters, torch.zeros(1, 3, sizes[0], dtype=dtype))
            return out.sum(), out

        try:
            _, out = grad(total, has_aux=True)({name: tensor[None] for name, tensor in flat.items()})
        except Exception as error:
            raise T3DError(f"{self.name}: apply does not work for many seeds at once ({error}).") from error
        if out.shape != (1, 3, sizes[-1]):
            raise T3DError(
                f"{self.name}: apply must give (batch, {sizes[-1]}); for a batch of 3 it gave {tuple(out.shape[1:])}."
            )

    def _single(self, flat: Parameters, x: Tensor) -> Tensor:
        shapes = self._shapes[_sizes(flat)]
        return self._apply({name: tensor.reshape(shapes[name]) for name, tensor in flat.items()}, x)

    def apply(self, parameters: Parameters, x: Tensor) -> Tensor:
        """Every seed's network, or both of its twins, on x (S, B, inputs)."""
        every_seed: Any = vmap(self._single)
        twins = any_of(parameters).dim() == 4
        out: Tensor = vmap(every_seed, (0, None))(parameters, x) if twins else every_seed(parameters, x)
        return out


Sizes = tuple[tuple[str, int], ...]


def _sizes(flat: Parameters) -> Sizes:
    return tuple(sorted((name, tensor.shape[-1]) for name, tensor in flat.items()))


def from_module(make: Callable[[int, int], nn.Module]) -> Network:
    """A network from `make(inputs, outputs)`, which returns an `nn.Module`."""
    skeletons: dict[tuple[int, int], nn.Module] = {}
    name = getattr(make, "__name__", type(make).__name__)

    def init(sizes: tuple[int, ...], generator: torch.Generator) -> Parameters:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator.initial_seed())
            try:
                module = make(sizes[0], sizes[-1])
            except TypeError as error:
                raise T3DError(f"{name} cannot be made from the numbers of inputs and outputs ({error}).") from error
        if not isinstance(module, nn.Module):
            raise T3DError(f"{name}(inputs, outputs) gave a {type(module).__name__}, not an nn.Module.")
        if any(True for _ in module.buffers()):
            raise T3DError(
                f"{name} has buffers, as BatchNorm does, which are not learned and would be lost: use LayerNorm."
            )
        skeletons[sizes[0], sizes[-1]] = module.train(False)
        return dict(module.named_parameters())

    def apply(parameters: Parameters, x: Tensor) -> Tensor:
        fitting = [module for (inputs, _), module in skeletons.items() if inputs == x.shape[-1]]
        shapes = {key: tensor.shape for key, tensor in parameters.items()}
        module = next(m for m in fitting if {k: p.shape for k, p in m.named_parameters()} == shapes)
        out: Tensor = functional_call(module, parameters, (x,))
        return out

    return Network(init, apply, name)


def as_network(given: Any) -> Network | None:
    """The network that a user gave, or None."""
    if given is None or isinstance(given, Network):
        return given
    if isinstance(given, nn.Module):
        raise T3DError("this is one module, and many are needed: give its class, or a function that makes one.")
    if callable(given):
        return from_module(given)
    raise T3DError(f"a network is t3d.Network(init, apply) or something that makes an nn.Module, not {given!r}.")


def own_network(name: str | None, given: Any, where: str) -> Network | None:
    """The user's own network that a run or policy was trained with, which only the user can give; or None."""
    network = as_network(given)
    if (name is None) != (network is None):
        what = (
            f"with a network of your own ({name}), which no file can bring back: give network=..."
            if name
            else ("with the networks of the package: leave network out")
        )
        raise T3DError(f"{where} was trained {what}.")
    return network
