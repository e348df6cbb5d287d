"""Enough beside a file to put it right again: one damaged block in each 64.

A file is cut into blocks. Block i, i + n, i + 2n, … are a group of 64, and its parity is their exclusive or: a block
that is lost is what the others and the parity leave over. A checksum of every block says which it is. Neighbours are in
different groups, so a whole stretch of a file may be lost. It costs a sixty-fourth of the file's size.
"""

import zlib

import numpy as np
from numpy.typing import NDArray

BLOCK, GROUP = 4096, 64


def parity(content: bytes) -> bytes:
    """What is needed to repair it: each group's parity, then each block's checksum."""
    blocks = _blocks(content)
    return bytes(np.bitwise_xor.reduce(blocks, 0)) + bytes(_checksums(blocks))


def parity_size(size: int) -> int:
    """Bytes of the parity of so many bytes."""
    return max(1, -(-size // (BLOCK * GROUP))) * (BLOCK + GROUP * 4)


def repaired(content: bytes, parity: bytes) -> bytes:
    """The content with every group that has one damaged block put right; whether that was enough, a hash must tell."""
    blocks = _blocks(content)
    groups = blocks.shape[1]
    if len(parity) != parity_size(len(content)):
        return content
    exclusive_or = np.frombuffer(parity, np.uint8, groups * BLOCK).reshape(groups, BLOCK)
    expected = np.frombuffer(parity, np.uint32, offset=groups * BLOCK).reshape(GROUP, groups)
    damaged = _checksums(blocks) != expected
    for group in np.flatnonzero(damaged.sum(0) == 1):
        lost = int(np.argmax(damaged[:, group]))
        others = np.bitwise_xor.reduce(np.delete(blocks[:, group], lost, 0), 0)
        blocks[lost, group] = others ^ exclusive_or[group]
    return blocks.tobytes()[: len(content)]


def _blocks(content: bytes) -> NDArray[np.uint8]:
    """(GROUP, groups, BLOCK), the last ones filled up with zeros."""
    groups = max(1, -(-len(content) // (BLOCK * GROUP)))
    padded = np.zeros(GROUP * groups * BLOCK, np.uint8)
    padded[: len(content)] = np.frombuffer(content, np.uint8)
    return padded.reshape(GROUP, groups, BLOCK)


def _checksums(blocks: NDArray[np.uint8]) -> NDArray[np.uint32]:
    flat = blocks.reshape(-1, BLOCK)
    return np.array([zlib.crc32(block.data) for block in flat], np.uint32).reshape(blocks.shape[:2])
