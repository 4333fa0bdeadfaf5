"""CRC-32C (Castagnoli, RFC 3720 appendix B.4), by NumPy: TensorFlow exposes none to Python.

A checksum is linear: that of a block is the exclusive or of one table entry for each of its bytes,
which NumPy looks up together. A long text is a chain of blocks.
"""

import functools

import numpy as np

_POLYNOMIAL = 0x82F63B78  # bits reversed
_BLOCK = 1024  # bytes; the tables of all its positions take 1 MB
_TOGETHER = 4 * _BLOCK  # bytes looked up at once, so that what lies between stays in the cache
_SHORT = 64  # bytes, below which NumPy takes longer than Python
_OFFSETS = np.arange(0, _BLOCK * 256, 256)  # of each place's table
_MASK_DELTA = 0xA282EAD8


def crc32c(data: bytes) -> int:
    """The CRC-32C of some bytes."""
    tables = _tables()
    if len(data) < _SHORT:
        crc, of_byte = 0xFFFFFFFF, _of_byte()
        for byte in data:
            crc = crc >> 8 ^ of_byte[(crc ^ byte) & 0xFF]
        return crc ^ 0xFFFFFFFF
    # Zeros in front change nothing once the register's initial ones are in the first four bytes.
    blocks = np.zeros(-(-len(data) // _BLOCK) * _BLOCK, np.uint8)
    start = len(blocks) - len(data)
    blocks[start:] = np.frombuffer(data, np.uint8)
    blocks[start : start + 4] ^= 0xFF
    a, b, c, d = _shift_tables()
    crc = 0
    for first in range(0, len(blocks), _TOGETHER):
        some = blocks[first : first + _TOGETHER].reshape(-1, _BLOCK)
        entries = tables.take(some + _OFFSETS)
        for of_block in np.bitwise_xor.reduce(entries, axis=1).tolist():
            # The register after a block of zeros more, which is linear in its four bytes.
            crc = a[crc & 0xFF] ^ b[crc >> 8 & 0xFF] ^ c[crc >> 16 & 0xFF] ^ d[crc >> 24] ^ of_block
    return crc ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    """The checksum as TFRecord files hold it: rotated right by 15 bits, and a constant added."""
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


@functools.cache
def _tables() -> np.ndarray:
    """uint32 [_BLOCK, 256]: what a byte at each place of a block adds to the register after it."""
    tables = np.empty((_BLOCK, 256), np.uint32)
    last = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        last = np.where(last & 1, last >> 1 ^ _POLYNOMIAL, last >> 1).astype(np.uint32)
    tables[-1] = last
    for place in range(_BLOCK - 2, -1, -1):
        tables[place] = tables[place + 1] >> 8 ^ last[tables[place + 1] & 0xFF]
    return tables


@functools.cache
def _of_byte() -> list[int]:
    """What the last byte adds to the register, as Python's integers."""
    return _tables()[-1].tolist()


@functools.cache
def _shift_tables() -> list[list[int]]:
    """For each byte of the register: what it becomes after a block of zeros."""
    # A register and then zeros are the same as its bytes, lowest first, and as many zeros less.
    return [_tables()[place].tolist() for place in range(4)]
