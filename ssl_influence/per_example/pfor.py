"""tf.vectorized_map without the repeated warnings of its own."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

_log = logging.getLogger("ssl_influence")
_said: set[str] = set()


def vectorized_map(function: Callable[[Any], Any], elements: Any) -> Any:
    """tf.vectorized_map; what it falls back to a loop for is said once a process.

    Since TensorFlow has no batched form of the gradient of a convolution's kernel, that is such an
    operation: the loop is inside the one call.
    """
    with _once():
        return tf.vectorized_map(function, elements)


@contextlib.contextmanager
def _once() -> Iterator[None]:
    logger = tf.get_logger()

    def unsaid(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "while_loop" not in message:
            return True
        if message not in _said:
            _said.add(message)
            _log.info("tf.vectorized_map: %s", message)
        return False

    logger.addFilter(unsaid)
    try:
        yield
    finally:
        logger.removeFilter(unsaid)
