"""The frame stack: networks see the last few frames of an observation with images, the newest last, then the numbers.

A frame is all the images of one observation, stacked along the channels: height × width × channels. The other parts of
the newest observation follow the frames.

    frame | … | frame | numbers
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from t3d.errors import T3DError
from t3d.layout import Layout, image_size, leaves, size

Floats = NDArray[np.float32]
LARGEST = 2**26  # numbers in a stacked observation


@dataclass(frozen=True)
class FrameStack:
    """How many frames of which size are stacked, and which columns of an observation are pixels and numbers."""

    stack: int
    height: int
    width: int
    channels: int  # of one frame
    pixels: NDArray[np.int64]  # (F,) columns
    numbers: NDArray[np.int64]  # (V,) columns

    @staticmethod
    def of(layout: Layout, stack: int, name: str = "the observation") -> "FrameStack | None":
        """Of observations of this layout; none if they have no images."""
        images, numbers, end = [], [np.zeros(0, np.int64)], 0
        for leaf in leaves(layout):
            columns, end = np.arange(end, end + size(leaf)), end + size(leaf)
            if leaf["kind"] == "image":
                images.append(columns.reshape(image_size(leaf)))
            else:
                numbers.append(columns)
        if not images:
            return None
        sizes = sorted({image.shape[:2] for image in images})
        if len(sizes) > 1:
            raise T3DError(f"{name} has images of the sizes {sizes}; they must have one size.")
        together = np.concatenate(images, 2)
        height, width, channels = together.shape
        if stack * together.size > LARGEST:
            raise T3DError(
                f"{stack} frames of {height} x {width} are too many pixels: lower --pixels or --frame-stack."
            )
        return FrameStack(stack, height, width, channels, together.reshape(-1), np.concatenate(numbers))

    @property
    def frame_size(self) -> int:
        """Numbers in a frame."""
        return len(self.pixels)

    @property
    def dim(self) -> int:
        """Numbers in a stacked observation."""
        return self.stack * self.frame_size + len(self.numbers)

    def join(self, frames: Floats, obs: Floats) -> Floats:
        """Frames (N, stack, F) and the numbers of observations (N, O) side by side: (N, dim)."""
        return np.concatenate([frames.reshape(len(obs), -1), obs[:, self.numbers]], 1)
