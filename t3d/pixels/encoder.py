"""[steps 2 and 3] Networks that see: convolutions look at the frames, and a mlp takes it from there.

    frames -> eye -> 50 numbers | numbers (| action) -> mlp

The eye halves the frames with 3 × 3 convolutions of 32 channels until no side is longer than ten, and ends in a linear
layer whose 50 outputs are normalised and squashed. Whose eyes those are, there are two ways:

    separate    the actor and each critic has its own, as the documents draw it
    critic      there is one, trained by both critics; the actor sees through a copy of it, which it cannot change

Shapes: S seeds, B batch, F pixels of a stack. Weights lie as those of mlps do, (S, in, out), or with twins in
front; the `in` of a convolution is channels × 3 × 3. An eye that twins share keeps a 1 in their place.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import conv2d, layer_norm

from t3d.networks import SHARED, Pair, Parameters, init_layer, init_mlp, mlp
from t3d.pixels.frame_stack import FrameStack
from t3d.rng import Purpose

Encoder = Literal["critic", "separate"]

CHANNELS, KERNEL, STRIDE = 32, 3, 2
SMALL = 10  # sides that need no more halving
FEATURES = 50
ENCODER = "encoder."


def seeing(frame_stack: FrameStack, encoder: Encoder) -> Pair:
    """Networks for what this sight shows: pixels from 0 to 255 first, then anything."""
    pixels = frame_stack.stack * frame_stack.frame_size

    def init(seeds: Tensor, purpose: Purpose, copies: int, sizes: Sequence[int], dtype: torch.dtype) -> Parameters:
        head = init_mlp(seeds, purpose, copies, (FEATURES + sizes[0] - pixels, *sizes[1:]), dtype)
        if encoder == "separate":
            return head | named(ENCODER, init_encoder(seeds, purpose, copies, frame_stack, dtype))
        eye = init_encoder(seeds, Purpose.CRITIC_WEIGHTS, 1, frame_stack, dtype)
        return head | named(ENCODER if purpose == Purpose.CRITIC_WEIGHTS else SHARED + ENCODER, eye)

    def apply(parameters: Parameters, x: Tensor) -> Tensor:
        eye = of_name(ENCODER, parameters) or {
            name: tensor.detach() for name, tensor in of_name(SHARED + ENCODER, parameters).items()
        }
        seen = look(eye, x[..., :pixels], frame_stack)
        rest = x[..., pixels:].expand(*seen.shape[:-1], -1)
        head = {name: tensor for name, tensor in parameters.items() if "." not in name}
        return mlp(head, torch.cat([seen, rest], -1))

    return Pair(init, apply)


def look(eye: Parameters, pixels: Tensor, frame_stack: FrameStack) -> Tensor:
    """The features (…, S, B, 50) of frames (S, B, F), for every eye there is: `…` are twins, or nothing."""
    last = len(eye) // 2
    eyes = eye["w1"].shape[:-2]
    batch, channels = pixels.shape[1], frame_stack.stack * frame_stack.channels
    x = pixels.reshape(
        -1, batch, frame_stack.stack, frame_stack.height, frame_stack.width, frame_stack.channels
    ).permute(1, 0, 2, 5, 3, 4)
    x = (x / 255 - 0.5).reshape(batch, 1, -1, channels, frame_stack.height, frame_stack.width)
    # Each eye is a group of channels, so that one convolution does for all.
    x = x.expand(-1, prod(eyes[:-1]), -1, -1, -1, -1).reshape(batch, -1, frame_stack.height, frame_stack.width)
    for layer in range(1, last):
        weight, bias = eye[f"w{layer}"].flatten(0, -3), eye[f"b{layer}"].flatten()
        kernel = weight.mT.reshape(-1, weight.shape[1] // KERNEL**2, KERNEL, KERNEL)
        x = torch.relu(conv2d(x, kernel, bias, STRIDE, groups=len(weight)))
    x = x.reshape(batch, prod(eyes), -1).transpose(0, 1).reshape(*eyes, batch, -1)
    x = x @ eye[f"w{last}"] + eye[f"b{last}"]
    return torch.tanh(layer_norm(x.to(eye["w1"].dtype), (FEATURES,)))


def init_encoder(
    seeds: Tensor, purpose: Purpose, copies: int, frame_stack: FrameStack, dtype: torch.dtype
) -> Parameters:
    """An eye's first weights, uniform as a mlp's: (copies, S, in or 1, out)."""
    parameters = {}
    for layer, (fan_in, fan_out) in enumerate(encoder_sizes(frame_stack), start=1):
        made = init_layer(seeds, purpose, 1000 + layer, copies, fan_in, fan_out, dtype)
        parameters[f"w{layer}"], parameters[f"b{layer}"] = made
    return parameters


def encoder_sizes(frame_stack: FrameStack) -> list[tuple[int, int]]:
    """The inputs and outputs of an eye's layers."""
    sides = [(frame_stack.height, frame_stack.width)]
    while len(sides) == 1 or (max(sides[-1]) > SMALL and min(sides[-1]) >= KERNEL):
        height, width = ((side - KERNEL) // STRIDE + 1 for side in sides[-1])
        sides.append((height, width))
    channels = [frame_stack.stack * frame_stack.channels] + [CHANNELS] * (len(sides) - 1)
    convolutions = [(before * KERNEL**2, after) for before, after in pairwise(channels)]
    return [*convolutions, (CHANNELS * prod(sides[-1]), FEATURES)]


def named(prefix: str, parameters: Parameters) -> Parameters:
    return {prefix + name: tensor for name, tensor in parameters.items()}


def of_name(prefix: str, parameters: Parameters) -> Parameters:
    return {name.removeprefix(prefix): t for name, t in parameters.items() if name.startswith(prefix)}
