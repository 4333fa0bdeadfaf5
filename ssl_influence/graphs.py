"""What AutoGraph converts, and what it need not.

AutoGraph rewrites Python conditions and loops on tensors. The library's own code has none, and
rewriting it took seconds of every start, so it is traced as it is written.
Models and methods of others may rely on it, as under Keras and tf.function: they are called by
`converted`.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

# Packages whose layers and methods are written without AutoGraph's help.
_AS_WRITTEN = {"ssl_influence", "tf_keras", "keras", "official", "tensorflow"}
_autograph = tf.__internal__.autograph
# That of no tf.function at all: what is called in it is converted.
_UNSPECIFIED = _autograph.control_status_ctx()

as_written = tf.autograph.experimental.do_not_convert


def converted(call: Any) -> Callable:
    """What to call instead of a model or method, in a tf.function with autograph=False too.

    Args:
      call: a callable object. A tf.Module, as a model, may hold others, which count as well.

    Returns:
      `call`, or what AutoGraph makes of it where it is not eager and has parts of other packages
      than ours and Keras.
    """
    if tf.executing_eagerly():
        return call
    own = [call, *(call.submodules if isinstance(call, tf.Module) else ())]
    packages = {type(one).__module__.split(".")[0] for one in own}
    return call if packages <= _AS_WRITTEN else _autograph.tf_convert(call, _UNSPECIFIED)
