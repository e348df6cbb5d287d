"""What networks see of an observation with images: the last few frames, the newest behind, and then the numbers.

A frame is all the images of one observation, laid on top of each other: height × width × channels. What else is in
the observation joins behind the frames, of the newest observation alone.

    frame | … | frame | numbers
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from t3d.errors import T3DError
from t3d.layout import Layout, image_size, leaves, size

Floats = NDArray[np.float32]
LARGEST = 2**26  # numbers that are seen at once


@dataclass(frozen=True)
class FrameStack:
    """How many frames of which size are seen at once, and where pixels and numbers stand in an observation."""

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
            raise T3DError(f"{name} has images of several sizes, {sizes}; they must have one to be seen together.")
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
        """Numbers that are seen at once."""
        return self.stack * self.frame_size + len(self.numbers)

    def seen(self, frames: Floats, obs: Floats) -> Floats:
        """Frames (N, stack, F) and the numbers of observations (N, O) side by side: (N, dim)."""
        return np.concatenate([frames.reshape(len(obs), -1), obs[:, self.numbers]], 1)
