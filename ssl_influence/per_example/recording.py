"""One forward pass of a Keras model, with what went into and came out of each layer in question.

Works on tf_keras and Keras 3 alike: a layer's `call` is replaced for the length of the pass.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from ssl_influence import config

_KERAS = ("tf_keras", "keras")


class Use(NamedTuple):
    """One call of a layer.

    Attributes:
      layer: a Keras layer.
      arguments: those of its `call`, by name; a layer's first one is its input.
      output: what it gave, before its own activation function.
    """

    layer: Any
    arguments: dict[str, Any]
    output: tf.Tensor

    @property
    def inputs(self) -> Any:
        """The layer's first argument."""
        return next(iter(self.arguments.values()))


class Owner(NamedTuple):
    """A layer and those of the variables in question that belong to it itself."""

    layer: Any
    variables: list[Any]


def key(variable: Any) -> int:
    """Identifies a variable of TensorFlow, tf_keras (autocast) or Keras 3."""
    return id(as_variable(variable).handle)


def as_variable(variable: Any) -> tf.Variable:
    """The tf.Variable in a variable of Keras 3; any other is returned as it is."""
    return variable if isinstance(variable, tf.Variable) else variable._value


def of_keras(cls: type) -> bool:
    """The class comes with tf_keras or Keras 3."""
    return cls.__module__.split(".")[0] in _KERAS


def sublayers(layer: Any) -> list[Any]:
    """The layer and all layers in it, at any depth, each once."""
    return list(dict.fromkeys(layer._flatten_layers(include_self=True, recursive=True)))


def owners(model: Any, variables: Sequence[Any]) -> list[Owner]:
    """The layers that own the variables, in the order of the model.

    Raises:
      ConfigError: the model is no Keras model, or a variable belongs to none of its layers.
    """
    if not hasattr(model, "_flatten_layers"):
        raise config.ConfigError(
            f"{type(model).__name__} is no Keras model, whose layers could be told apart: use "
            'method="vectorized_map", or "double_backprop" for products.'
        )
    wanted = {key(variable): variable for variable in variables}
    found = []
    for layer in sublayers(model):
        inner = {key(v) for part in sublayers(layer)[1:] for v in part.variables}
        own = [v for v in layer.variables if key(v) in wanted and key(v) not in inner]
        if own:
            found.append(Owner(layer, own))
    owned = {key(variable) for owner in found for variable in owner.variables}
    for name, variable in wanted.items():
        if name not in owned:
            raise config.ConfigError(
                f"The variable {variable.name!r} belongs to no layer of the model {model.name!r}: "
                'leave it out, or use method="vectorized_map".'
            )
    return found


def is_keras_3(layer: Any) -> bool:
    """The layer is one of Keras 3."""
    return any(cls.__module__.split(".")[0] == "keras" for cls in type(layer).__mro__)


def keras_3_values(values: Sequence[tuple[Any, tf.Tensor]]) -> contextlib.AbstractContextManager:
    """In it, variables of Keras 3 have other values."""
    keras = sys.modules["keras"]
    return keras.StatelessScope(state_mapping=values)


class Recorder:
    """Calls a function while the calls of some layers are recorded.

    Attributes:
      uses: a Use for each call of a recorded layer, in order.
    """

    def __init__(self, recorded: Sequence[Owner]):
        self._owners = recorded
        self._depth = 0
        self._outside = tf.GradientTape()
        self.uses: list[Use] = []

    def __call__(self, function: Callable[[], Any]) -> Any:
        """function(), recorded.

        Raises:
          ConfigError: a variable in question is read outside of the layer that owns it, where no
            layer's kernel would see it; or a recorded layer runs in a tf.function of its own.
        """
        with contextlib.ExitStack() as stack:
            for owner in self._owners:
                if getattr(owner.layer.call, "is_recording", False):
                    raise config.ConfigError(
                        f"Layer {owner.layer.name!r} is being recorded already: take gradients of "
                        "one model in one thread at a time."
                    )
            for owner in self._owners:
                for variable in owner.variables:
                    stack.enter_context(_watched(as_variable(variable)))
                stack.enter_context(
                    substituted(owner.layer, call=self._recording(owner.layer, owner.layer.call))
                )
            with self._outside:
                result = function()
        here = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        for use in self.uses:
            if _graph(use.output) is not here:
                raise config.ConfigError(
                    f"Layer {use.layer.name!r} is called within a tf.function of the model's own, "
                    'whose inside cannot be seen: use method="vectorized_map", or '
                    '"double_backprop" for products.'
                )
        self._refuse_reads(self._outside)
        return result

    def _refuse_reads(self, tape, layer=None):
        """Of a variable in question, but for the own of a layer and its parts."""
        read = {key(variable) for variable in tape.watched_variables()}
        if layer is not None:
            read -= {key(variable) for variable in layer.variables}
        for owner in self._owners:
            for variable in owner.variables:
                if key(variable) in read:
                    raise config.ConfigError(
                        f"The variable {variable.name!r} of layer {owner.layer.name!r} is read "
                        "outside of that layer too, where no kernel sees it (tied weights, or a "
                        'tf.function of the model\'s own): use method="vectorized_map", or '
                        '"double_backprop" for products.'
                    )

    def _recording(self, layer, call):
        call_it = _with_autograph(layer, call)

        @functools.wraps(call)
        @tf.autograph.experimental.do_not_convert
        def recorded(*args, **kwargs):
            arguments = inspect.signature(call).bind(*args, **kwargs).arguments
            before_activation = []
            self._depth += 1
            try:
                with contextlib.ExitStack() as stack:
                    inside = tf.GradientTape()
                    if self._depth == 1:
                        stack.enter_context(self._outside.stop_recording())
                        stack.enter_context(inside)
                    if has_activation(layer):
                        tapped = _tapped(layer.activation, before_activation)
                        stack.enter_context(substituted(layer, activation=tapped))
                    output = call_it(*args, **kwargs)
            finally:
                self._depth -= 1
            self._refuse_reads(inside, layer)
            before = before_activation[0] if before_activation else output
            self.uses.append(Use(layer, dict(arguments), before))
            return output

        recorded.is_recording = True
        return recorded


def has_activation(layer: Any) -> bool:
    """The layer ends with an activation function, as Dense and convolutions of Keras may."""
    cls = type(layer)
    call_of_keras = any(
        of_keras(base) and cls.call is getattr(base, "call", None) for base in cls.__mro__
    )
    return call_of_keras and getattr(layer, "activation", None) is not None


def own_variables(layer: Any) -> list[Any]:
    """What the layer itself trains when it is not frozen; neither moving statistics nor parts."""
    return list(vars(layer)["_trainable_variables" if is_keras_3(layer) else "_trainable_weights"])


@contextlib.contextmanager
def substituted(target: Any, **attributes: Any) -> Iterator[None]:
    """Attributes of an object have other values inside, whatever Keras does on assignment."""
    held = vars(target)
    before = {name: held[name] for name in attributes if name in held}
    for name, value in attributes.items():
        object.__setattr__(target, name, value)
    try:
        yield
    finally:
        for name in attributes:
            if name in before:
                object.__setattr__(target, name, before[name])
            else:
                object.__delattr__(target, name)


def _watched(variable):
    """Tapes see every read of a variable, also of one that is frozen."""
    frozen = vars(variable).get("_trainable") is False
    return substituted(variable, _trainable=True) if frozen else contextlib.nullcontext()


def _graph(tensor):
    return None if isinstance(tensor, tf.__internal__.EagerTensor) else tensor.graph


def _tapped(activation, taken):
    def tapped(x):
        taken.append(x)
        return activation(x)

    return tapped


def _with_autograph(layer, call):
    """In a graph, a layer of the user's own may rely on autograph, as Keras would convert it."""
    if of_keras(type(layer)) or tf.executing_eagerly():
        return call
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(call, autograph.control_status_ctx())
