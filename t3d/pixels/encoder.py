"""[steps 2 and 3] Networks for image observations: a convolutional encoder in front of the MLP.

    frames -> encoder -> 50 features | numbers (| action) -> MLP

The encoder halves the frames with 3 × 3 convolutions of 32 channels until no side is longer than ten. A linear layer
follows, whose 50 outputs pass LayerNorm and tanh. There are two ways to train it:

    separate    the actor and each critic have an encoder of their own, as the documents draw it
    critic      there is one encoder, which both critics train; the actor uses a copy of it and cannot change it

Shapes: S seeds, B batch, F pixels of a stack. Weights are laid out as those of an MLP, (S, in, out), or with twins in
front; the `in` of a convolution is channels × 3 × 3. An encoder that the twins share keeps a 1 in their place.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import conv2d, layer_norm

from t3d.networks import SHARED, Init, Networks, Parameters, init_layer, init_mlp, mlp
from t3d.pixels.frame_stack import FrameStack
from t3d.rng import Purpose

Encoder = Literal["critic", "separate"]

CHANNELS, KERNEL, STRIDE = 32, 3, 2
SMALL = 10  # sides that are not halved any more
FEATURES = 50
ENCODER = "encoder."


def image_networks(frame_stack: FrameStack, encoder: Encoder, critics: int = 2, critic_norm: bool = False) -> Networks:
    """Networks for observations of this frame stack: pixels from 0 to 255 first, then numbers."""
    pixels = frame_stack.stack * frame_stack.frame_size

    def head(seeds: Tensor, purpose: Purpose, copies: int, sizes: Sequence[int], dtype: torch.dtype) -> Parameters:
        return init_mlp(seeds, purpose, copies, (FEATURES + sizes[0] - pixels, *sizes[1:]), dtype)

    def separate(seeds: Tensor, purpose: Purpose, copies: int, sizes: Sequence[int], dtype: torch.dtype) -> Parameters:
        own = init_encoder(seeds, purpose, copies, frame_stack, dtype)
        return head(seeds, purpose, copies, sizes, dtype) | prefixed(ENCODER, own)

    def shared(prefix: str) -> Init:
        def init(seeds: Tensor, purpose: Purpose, copies: int, sizes: Sequence[int], dtype: torch.dtype) -> Parameters:
            one = init_encoder(seeds, Purpose.CRITIC_WEIGHTS, 1, frame_stack, dtype)
            return head(seeds, purpose, copies, sizes, dtype) | prefixed(prefix, one)

        return init

    def apply(parameters: Parameters, x: Tensor) -> Tensor:
        own = without_prefix(ENCODER, parameters) or {
            name: tensor.detach() for name, tensor in without_prefix(SHARED + ENCODER, parameters).items()
        }
        features = encode(own, x[..., :pixels], frame_stack)
        rest = x[..., pixels:].expand(*features.shape[:-1], -1)
        mlp_parameters = {name: tensor for name, tensor in parameters.items() if "." not in name}
        return mlp(mlp_parameters, torch.cat([features, rest], -1))

    actor_weights: Init = separate
    critic_weights: Init = separate
    if encoder == "critic":
        actor_weights, critic_weights = shared(SHARED + ENCODER), shared(ENCODER)
    return Networks(actor_weights, critic_weights, apply, critics, critic_norm)


def encode(encoder: Parameters, pixels: Tensor, frame_stack: FrameStack) -> Tensor:
    """The features (…, S, B, 50) of frames (S, B, F), for every encoder there is: `…` are twins, or nothing."""
    last = len(encoder) // 2
    lead = encoder["w1"].shape[:-2]
    batch, channels = pixels.shape[1], frame_stack.stack * frame_stack.channels
    height, width = frame_stack.height, frame_stack.width
    x = pixels.reshape(-1, batch, frame_stack.stack, height, width, frame_stack.channels).permute(1, 0, 2, 5, 3, 4)
    x = (x / 255 - 0.5).reshape(batch, 1, -1, channels, height, width)
    # Each encoder is a group of channels, so that one convolution serves all.
    x = x.expand(-1, prod(lead[:-1]), -1, -1, -1, -1).reshape(batch, -1, height, width)
    for layer in range(1, last):
        weight, bias = encoder[f"w{layer}"].flatten(0, -3), encoder[f"b{layer}"].flatten()
        kernel = weight.mT.reshape(-1, weight.shape[1] // KERNEL**2, KERNEL, KERNEL)
        x = torch.relu(conv2d(x, kernel, bias, STRIDE, groups=len(weight)))
    x = x.reshape(batch, prod(lead), -1).transpose(0, 1).reshape(*lead, batch, -1)
    x = x @ encoder[f"w{last}"] + encoder[f"b{last}"]
    return torch.tanh(layer_norm(x.to(encoder["w1"].dtype), (FEATURES,)))


def init_encoder(
    seeds: Tensor, purpose: Purpose, copies: int, frame_stack: FrameStack, dtype: torch.dtype
) -> Parameters:
    """An encoder's initial weights, uniform as those of an MLP: (copies, S, in or 1, out)."""
    parameters = {}
    for layer, (fan_in, fan_out) in enumerate(encoder_sizes(frame_stack), start=1):
        made = init_layer(seeds, purpose, 1000 + layer, (copies, fan_in, fan_out), dtype)
        parameters[f"w{layer}"], parameters[f"b{layer}"] = made
    return parameters


def encoder_sizes(frame_stack: FrameStack) -> list[tuple[int, int]]:
    """The inputs and outputs of an encoder's layers."""
    sides = [(frame_stack.height, frame_stack.width)]
    while len(sides) == 1 or (max(sides[-1]) > SMALL and min(sides[-1]) >= KERNEL):
        height, width = ((side - KERNEL) // STRIDE + 1 for side in sides[-1])
        sides.append((height, width))
    channels = [frame_stack.stack * frame_stack.channels] + [CHANNELS] * (len(sides) - 1)
    convolutions = [(before * KERNEL**2, after) for before, after in pairwise(channels)]
    return [*convolutions, (CHANNELS * prod(sides[-1]), FEATURES)]


def prefixed(prefix: str, parameters: Parameters) -> Parameters:
    return {prefix + name: tensor for name, tensor in parameters.items()}


def without_prefix(prefix: str, parameters: Parameters) -> Parameters:
    return {name.removeprefix(prefix): t for name, t in parameters.items() if name.startswith(prefix)}
