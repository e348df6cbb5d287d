"""Parity data that repairs one damaged block in each group of 64.

A file is divided into blocks. Blocks i, i + n, i + 2n, … form a group of 64, and the parity is their XOR: a damaged
block is the XOR of the parity and the other blocks. A checksum per block identifies the damaged one. Adjacent blocks
are in different groups, so a long damaged range can be repaired. The parity takes 1/64 of the file's size.
"""

import zlib

import numpy as np
from numpy.typing import NDArray

BLOCK, GROUP = 4096, 64


def parity(content: bytes) -> bytes:
    """The parity data: the XOR of each group, then the checksum of each block."""
    blocks = _blocks(content)
    return bytes(np.bitwise_xor.reduce(blocks, 0)) + bytes(_checksums(blocks))


def parity_size(size: int) -> int:
    """The size of the parity data for a file of `size` bytes."""
    return max(1, -(-size // (BLOCK * GROUP))) * (BLOCK + GROUP * 4)


def repaired(content: bytes, parity: bytes) -> bytes:
    """Repair every group with one damaged block. The caller must check the hash of the result."""
    blocks = _blocks(content)
    groups = blocks.shape[1]
    if len(parity) != parity_size(len(content)):
        return content
    xor = np.frombuffer(parity, np.uint8, groups * BLOCK).reshape(groups, BLOCK)
    expected = np.frombuffer(parity, np.uint32, offset=groups * BLOCK).reshape(GROUP, groups)
    damaged = _checksums(blocks) != expected
    for group in np.flatnonzero(damaged.sum(0) == 1):
        bad = int(np.argmax(damaged[:, group]))
        others = np.bitwise_xor.reduce(np.delete(blocks[:, group], bad, 0), 0)
        blocks[bad, group] = others ^ xor[group]
    return blocks.tobytes()[: len(content)]


def _blocks(content: bytes) -> NDArray[np.uint8]:
    """The blocks (GROUP, groups, BLOCK), padded with zeros."""
    groups = max(1, -(-len(content) // (BLOCK * GROUP)))
    padded = np.zeros(GROUP * groups * BLOCK, np.uint8)
    padded[: len(content)] = np.frombuffer(content, np.uint8)
    return padded.reshape(GROUP, groups, BLOCK)


def _checksums(blocks: NDArray[np.uint8]) -> NDArray[np.uint32]:
    flat = blocks.reshape(-1, BLOCK)
    return np.array([zlib.crc32(block.data) for block in flat], np.uint32).reshape(blocks.shape[:2])
