"""Examples by row, whether they lie in memory or are read when they are asked for."""

import array
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures

import numpy as np

# Threads that read and decode; Pillow and the operating system work outside Python's lock.
_THREADS = max(4, os.cpu_count() or 1)
_READ_TOGETHER = 1024


class Strings(Sequence):
    """A sequence of texts in one block of memory, for a few bytes each beside the text itself."""

    def __init__(self, texts: Iterable[str]):
        block, ends = bytearray(), array.array("q", [0])
        for text in texts:
            block += text.encode("utf-8", "surrogateescape")
            ends.append(len(block))
        self._block = bytes(block)
        self._ends = np.array(ends, np.int64)

    def __len__(self):
        return len(self._ends) - 1

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        start, end = self._ends[index], self._ends[index + 1]
        return self._block[start:end].decode("utf-8", "surrogateescape")


class LazyImages:
    """uint8 images [n, H, W, C] that are read when they are asked for.

    Attributes:
      shape: (n, H, W, C).
      dtype: uint8.
      ndim: 4.
      read_one: row -> uint8 [H, W, C].
    """

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __init__(
        self,
        size: int,
        image_shape: Sequence[int],
        read_one: Callable[[int], np.ndarray],
        stamp: str,
    ):
        """Holds on to the function; reads nothing.

        Args:
          size: n.
          image_shape: (H, W, C).
          read_one: row -> uint8 [H, W, C]; called from several threads at once. Raises ConfigError
            that names the file where it cannot be had.
          stamp: differs where the images differ, as far as can be told without decoding them.
        """
        self.shape = (size, *image_shape)
        self.read_one = read_one
        self._stamp = stamp

    def __len__(self):
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes that the images take when they are all read."""
        return int(np.prod(self.shape, dtype=np.int64))

    def read(self, rows: np.ndarray) -> np.ndarray:
        """uint8 [B, H, W, C] of the rows [B].

        Raises:
          ConfigError: one cannot be had; names its file.
        """
        images = np.empty((len(rows), *self.shape[1:]), np.uint8)
        for place, image in enumerate(_pool().map(self.read_one, np.asarray(rows).tolist())):
            images[place] = image
        return images

    def digest(self) -> str:
        """sha256 over the shape and the stamp."""
        return hashlib.sha256(f"{self.shape}{self._stamp}".encode()).hexdigest()


Rows = np.ndarray | LazyImages


def take(inputs: Rows, rows: np.ndarray) -> np.ndarray:
    """The rows [B] of inputs [n, ...], as an array [B, ...]."""
    return inputs[rows] if isinstance(inputs, np.ndarray) else inputs.read(rows)


def in_turn(inputs: Rows, together: int = _READ_TOGETHER) -> Iterator[np.ndarray]:
    """All rows in their order, so many at a time."""
    for start in range(0, len(inputs), together):
        yield take(inputs, np.arange(start, min(start + together, len(inputs))))


def in_memory(inputs: Rows) -> np.ndarray:
    """All rows as one array; the peak is one copy of them and a part."""
    if isinstance(inputs, np.ndarray):
        return inputs
    images, done = np.empty(inputs.shape, np.uint8), 0
    for part in in_turn(inputs):
        images[done : done + len(part)] = part
        done += len(part)
    return images


def concatenate(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts in turn; lazy where one of them is."""
    parts = [part for part in parts if len(part)] or list(parts[:1])
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts)
    starts = np.cumsum([0, *map(len, parts)])

    def read_one(row):
        part = int(np.searchsorted(starts, row, side="right")) - 1
        inputs, row = parts[part], row - starts[part]
        # Not `take`, which would wait for threads of the pool in one of them.
        return inputs[row] if isinstance(inputs, np.ndarray) else inputs.read_one(row)

    return LazyImages(int(starts[-1]), parts[0].shape[1:], read_one, "".join(map(digest, parts)))


def empty_like(inputs: Rows) -> np.ndarray:
    """No row, of the same kind and shape."""
    return np.empty((0, *inputs.shape[1:]), inputs.dtype)


def select(inputs: Rows, kept: np.ndarray) -> Rows:
    """The rows where `kept` [n] is true (or that it names), lazily where `inputs` are."""
    if isinstance(inputs, np.ndarray):
        return inputs[kept]
    rows = np.arange(len(inputs))[kept]
    stamp = inputs.digest() + hashlib.sha256(rows.tobytes()).hexdigest()
    return LazyImages(len(rows), inputs.shape[1:], lambda row: inputs.read_one(rows[row]), stamp)


def digest(*parts: Rows) -> str:
    """sha256 over shape, type and little-endian bytes of arrays in turn; of lazy ones, `digest`.

    Arrays of texts (dtype object) count by their UTF-8 bytes.
    """
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, LazyImages):
            total.update(part.digest().encode())
        elif part.dtype == object:
            total.update(f"text{part.shape}".encode())
            for text in part:
                raw = text.encode("utf-8", "surrogateescape")
                total.update(len(raw).to_bytes(8, "little") + raw)
        else:
            part = np.ascontiguousarray(part, dtype=part.dtype.newbyteorder("<"))
            total.update(f"{part.dtype.str}{part.shape}".encode())
            total.update(part.data if part.size else b"")
    return total.hexdigest()


@functools.cache
def _pool() -> futures.ThreadPoolExecutor:
    return futures.ThreadPoolExecutor(_THREADS, "read")
