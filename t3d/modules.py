"""Networks of your own: one network written once, spread over seeds and twins. [steps 2 and 3]

    def init(sizes, generator):        # (inputs, *hidden, outputs) -> a dictionary of tensors, drawn from `generator`
    def apply(parameters, x):          # that dictionary and (batch, inputs) -> (batch, outputs)

    t3d.train("Pendulum-v1", network=t3d.Network(init, apply))
    t3d.train("Pendulum-v1", network=MyModule)     # an nn.Module made by MyModule(inputs, outputs)

The actor and the critics are made of the same pair; the actor's outputs go through tanh afterwards. It is slower than
the networks of the package, because every layer of every seed is computed by itself as far as PyTorch cannot join them.

Shapes: S seeds, B batch. A tensor is kept flat, (S, 1, n) or for critics (twins, S, 1, n), as Adam and Polyak expect.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from t3d import rng
from t3d.errors import T3DError
from t3d.networks import Parameters, any_of
from t3d.rng import Purpose

Init = Callable[[tuple[int, ...], torch.Generator], Parameters]
Apply = Callable[[Parameters, Tensor], Tensor]


class Network:
    """A pair of functions for one network, and what it takes to have many of them."""

    def __init__(self, init: Init, apply: Apply, name: str | None = None) -> None:
        self.name = name or getattr(init, "__name__", "network")
        self._init, self._apply = init, apply
        self._shapes: dict[tuple[str, int], torch.Size] = {}

    def init(
        self, seeds: Tensor, purpose: Purpose, copies: int, sizes: Sequence[int], dtype: torch.dtype
    ) -> Parameters:
        """First weights for `copies` networks of each seed, each from random numbers of its own."""
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
        for name, tensor in made.items():
            before = self._shapes.setdefault((name, tensor.numel()), tensor.shape)
            if before != tensor.shape:
                raise T3DError(
                    f"{self.name}: the tensor '{name}' is {tuple(before)} in one network and {tuple(tensor.shape)} in"
                    " another, and both have the same size: give them different names."
                )
        flat = {name: tensor.detach().to(dtype).reshape(1, -1) for name, tensor in made.items()}
        self._check(flat, sizes, dtype)
        return flat

    def _check(self, flat: Parameters, sizes: Sequence[int], dtype: torch.dtype) -> None:
        with torch.no_grad():
            out = self._single(flat, torch.zeros(3, sizes[0], dtype=dtype))
        if out.shape != (3, sizes[-1]):
            raise T3DError(
                f"{self.name}: apply must give (batch, {sizes[-1]}); for a batch of 3 it gave {tuple(out.shape)}."
            )

    def _single(self, flat: Parameters, x: Tensor) -> Tensor:
        return self._apply({name: t.reshape(self._shapes[name, t.numel()]) for name, t in flat.items()}, x)

    def apply(self, parameters: Parameters, x: Tensor) -> Tensor:
        """Every seed's network, and with twins both, on x (S, B, inputs)."""
        every_seed: Any = vmap(self._single)
        twins = any_of(parameters).dim() == 4
        out: Tensor = vmap(every_seed, (0, None))(parameters, x) if twins else every_seed(parameters, x)
        return out


def from_module(make: Callable[[int, int], nn.Module]) -> Network:
    """A network out of an `nn.Module`, which `make(inputs, outputs)` makes."""
    skeletons: dict[tuple[int, int], nn.Module] = {}
    name = getattr(make, "__name__", type(make).__name__)

    def init(sizes: tuple[int, ...], generator: torch.Generator) -> Parameters:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator.initial_seed())
            module = make(sizes[0], sizes[-1])
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
    """What a user handed over as a network."""
    if given is None or isinstance(given, Network):
        return given
    if callable(given):
        return from_module(given)
    raise T3DError(f"a network is t3d.Network(init, apply) or something that makes an nn.Module, not {given!r}.")


def own_network(name: str | None, given: Any, where: str) -> Network | None:
    """The network that something was trained with, if it was somebody's own: they have to bring it along."""
    network = as_network(given)
    if (name is None) != (network is None):
        what = (
            f"with a network of your own ({name}), which no file can bring back: give network=..."
            if name
            else ("with the networks of the package: leave network out")
        )
        raise T3DError(f"{where} was trained {what}.")
    return network
