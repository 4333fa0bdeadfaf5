"""The gradient of every row of a batch: G_u = d ell_u / d theta (the paper's section 4.4).

All gradients together have B times the size of the variables. Where only their products with one
vector are wanted, `products.dots` needs little more memory than a plain gradient.
"""

import contextlib
import functools
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from ssl_influence import config
from ssl_influence.per_example import convolution, kernels, pfor, recording

METHODS = ("kernels", "vectorized_map", "loop")


def gradients(
    model: Callable[..., Any],
    inputs: Any,
    targets: Any,
    loss_fn: Callable[[Any, Any], tf.Tensor],
    *,
    variables: Sequence[Any] | None = None,
    training: bool = False,
    method: str = "kernels",
    conv_method: str = "auto",
    chunk_size: int | None = None,
    memory_limit: int | None = None,
) -> list[tf.Tensor]:
    """The gradient of each example's loss.

    Under BatchNormalization with training=True examples act on each other through the batch's
    statistics. "kernels" then attributes by layer output, as the paper does: example u gets what
    the whole batch's loss owes to u's own activations, for each layer. The rows add up to the batch
    gradient, but G_u is not the derivative of ell_u (`products.dots` by double backprop gives
    that). Moving statistics, and all other variables, hold afterwards what they held before.

    Args:
      model: a Keras model (tf_keras or Keras 3), of any structure of outputs. "vectorized_map" and
        "loop" take any callable with `trainable_variables` and an argument `training`.
      inputs: a batch, any nest of [B, ...].
      targets: handed to `loss_fn`, any nest of [B, ...] or None.
      loss_fn: (outputs, targets) -> ell [B]. It must not mix examples.
      variables: what the gradient is taken by; None is model.trainable_variables.
      training: how the model is called.
      method: "kernels": one backward pass for the batch by the outputs of the layers, then a kernel
        for each layer (see `kernels`); "vectorized_map": tf.vectorized_map over examples, the whole
        model inside; "loop": one example after the other, the reference.
      conv_method: of "kernels"; see `convolution.kernel_gradients`. "auto" times the ways once for
        each shape, so that sums may differ in their last bits from one process to another.
      chunk_size: examples at a time; None is all. Bounds what is needed beside the result.
      memory_limit: bytes that may be needed; None is what the machine has to spare.

    Returns:
      One [B, *variable.shape] for each variable, in its dtype. Zero where no loss depends on it.

    Raises:
      ConfigError: a layer has no kernel; the layers cannot be told apart; the predicted memory is
        above the limit; a chunk or method would change what BatchNormalization computes; or losses
        are not [B].
    """
    variables = list(model.trainable_variables if variables is None else variables)
    check_choice("method", method, METHODS)
    convolution.check_method(conv_method)
    batch = _batch_size(inputs)
    if training and (method != "kernels" or (chunk_size and chunk_size != batch)):
        _refuse_batch_norm(model, method, chunk_size)
    result = predicted_bytes(variables, batch, chunk_size)
    if result is not None:
        size = sum(math.prod(v.shape) for v in variables)
        require_memory(
            result,
            memory_limit,
            f"{batch} gradients by {size:,} parameters",
            "take fewer rows or variables at a time, or per_example.dots, which forms no gradient",
        )
    of_chunk = {
        "kernels": functools.partial(_by_kernels, conv_method=conv_method),
        "vectorized_map": functools.partial(_mapped, _vectorized),
        "loop": functools.partial(_mapped, _one_by_one),
    }[method]
    with keeping_state(model, training):
        return chunked(
            lambda inputs, targets: of_chunk(model, inputs, targets, loss_fn, variables, training),
            (inputs, targets),
            chunk_size,
            _spec(variables),
        )


def predicted_bytes(
    variables: Sequence[Any], batch: int | None, chunk_size: int | None = None
) -> int | None:
    """Memory for the gradients of `batch` examples, in bytes, beside that of a plain gradient.

    The result itself; the largest variable's share once more, while it is put together; and with
    chunks the result of one chunk. None where the size of the batch is not known.
    """
    if batch is None:
        return None
    sizes = [math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables]
    rows = min(chunk_size or batch, batch)
    part = rows * max(sizes, default=0)
    return batch * sum(sizes) + part + (rows * sum(sizes) if rows < batch else 0)


def require_memory(needed: int, limit: int | None, what: str, remedy: str) -> None:
    """Raises ConfigError if `needed` bytes are above the limit, or what the machine can give.

    Args:
      needed: in bytes.
      limit: in bytes; None is `free_memory`.
      what: that needs them, for the message.
      remedy: what to do instead.
    """
    available = free_memory() if limit is None else limit
    if available is not None and needed > available:
        raise config.ConfigError(
            f"{what} would need {needed / 1e9:,.3g} GB, and {available / 1e9:,.3g} GB are to be "
            f"had: {remedy}."
        )


def free_memory(root: pathlib.Path = pathlib.Path("/")) -> int | None:
    """Bytes of main memory to spare, by the system and the control group; None if none tells.

    Args:
      root: the folder in which Linux shows proc and sys.
    """
    found = []
    info = root / "proc" / "meminfo"
    if info.exists():
        fields = dict(line.split(":", 1) for line in info.read_text().splitlines())
        found.append(int(fields["MemAvailable"].split()[0]) * 1024)
    group = root / "sys" / "fs" / "cgroup"
    limit, used, parts = (group / f"memory.{name}" for name in ("max", "current", "stat"))
    if limit.exists() and used.exists() and limit.read_text().strip().isdigit():
        cached = dict(line.split() for line in parts.read_text().splitlines())
        found.append(int(limit.read_text()) - int(used.read_text()) + int(cached["file"]))
    return min(found, default=None)


def chunked(
    function: Callable[[Any, Any], list[tf.Tensor]],
    rows: tuple[Any, Any],
    chunk_size: int | None,
    row_spec: Sequence[tf.TensorSpec],
) -> list[tf.Tensor]:
    """function(inputs, targets) a chunk of rows at a time, and its results put together again.

    One chunk is done before the next begins, in a graph too.

    Args:
      function: gives tensors whose first axis is that of the rows.
      rows: inputs and targets, any nests.
      chunk_size: rows at a time; None is all.
      row_spec: what the function gives for one row.
    """
    batch = _batch_size(rows[0])
    if chunk_size is None or (batch is not None and chunk_size >= batch):
        return function(*rows)
    if chunk_size < 1:
        raise config.ConfigError(f"chunk_size={chunk_size} is out of range: use at least 1.")
    if batch is None:
        raise config.ConfigError(
            f"chunk_size={chunk_size} needs a batch whose size is known when the graph is built."
        )
    whole = batch // chunk_size * chunk_size

    def split(x):
        x = tf.convert_to_tensor(x)
        return tf.reshape(x[:whole], [-1, chunk_size, *x.shape[1:]])

    def of_chunk(chunk):
        return function(*refilled(rows, chunk))

    parts = [split(x) for x in leaves(rows)]
    if tf.executing_eagerly():
        done = [of_chunk([x[i] for x in parts]) for i in range(whole // chunk_size)]
    else:
        per_chunk = [tf.TensorSpec([chunk_size, *s.shape], s.dtype) for s in row_spec]
        stacked = tf.map_fn(of_chunk, parts, fn_output_signature=per_chunk, parallel_iterations=1)
        done = [[tf.reshape(x, [whole, *x.shape[2:]]) for x in stacked]]
    if whole < batch:
        done.append(of_chunk([tf.convert_to_tensor(x)[whole:] for x in leaves(rows)]))
    return tf.nest.map_structure(lambda *x: tf.concat(x, 0), *done)


def leaves(nest: Any) -> list[Any]:
    """The parts of a nest that are not None."""
    return [part for part in tf.nest.flatten(nest) if part is not None]


def refilled(nest: Any, parts: Sequence[Any]) -> Any:
    """The nest with other parts in the places of its `leaves`."""
    parts = iter(parts)
    filled = [None if part is None else next(parts) for part in tf.nest.flatten(nest)]
    return tf.nest.pack_sequence_as(nest, filled)


def recorded(
    model: Any,
    inputs: Any,
    targets: Any,
    loss_fn: Callable[[Any, Any], tf.Tensor],
    variables: Sequence[Any],
    training: bool,
) -> tuple[tf.Tensor, list[tuple[recording.Use, tf.Tensor]]]:
    """One forward and one backward pass: the losses [B], and each use of a layer with g.

    g is the gradient of the sum of all losses by the use's output, zero where none depends on it.

    Raises:
      ConfigError: as `gradients`.
    """
    owners = recording.owners(model, variables)
    for owner in owners:
        kernels.find(owner.layer)
    recorder = recording.Recorder(owners)
    with tf.GradientTape() as tape:
        for variable in map(recording.as_variable, variables):
            if not variable.trainable:
                tape.watch(variable)
        losses = recorder(lambda: losses_of(model, inputs, targets, loss_fn, training))
        total = tf.reduce_sum(losses)
    for use in recorder.uses:
        _require_rows(use, inputs)
    given = tape.gradient(total, [use.output for use in recorder.uses])
    return losses, [
        (use, tf.zeros_like(use.output) if g is None else tf.convert_to_tensor(g))
        for use, g in zip(recorder.uses, given, strict=True)
    ]


def _require_rows(use, inputs):
    """Each row of a layer is taken for an example."""
    batch = _batch_size(inputs)
    for tensor in (*tf.nest.flatten(use.inputs), use.output):
        rows = tensor.shape[0] if tensor.shape.rank else 0
        if batch is not None and rows not in (None, batch):
            raise config.ConfigError(
                f"Layer {use.layer.name!r} sees {rows} rows for {batch} examples: its first axis "
                "is not that of the examples, so their gradients cannot be told apart there. Use "
                'method="vectorized_map" ("double_backprop" for products).'
            )


def losses_of(model, inputs, targets, loss_fn, training) -> tf.Tensor:
    """loss_fn(model(inputs), targets), which must be [B].

    Raises:
      ConfigError: it is not.
    """
    losses = loss_fn(model(inputs, training=training), targets)
    if not losses.shape.is_compatible_with([_batch_size(inputs)]):
        raise config.ConfigError(
            f"loss_fn gives losses of shape {losses.shape} for {_batch_size(inputs)} examples: it "
            "must keep one for each example, [B] (no reduction)."
        )
    return losses


@contextlib.contextmanager
def keeping_state(model: Any, training: bool) -> Iterator[None]:
    """All variables are put back at the end, if a call in training mode may change them."""
    state = getattr(model, "variables", ()) if training else ()
    state = [recording.as_variable(variable) for variable in state]
    before = [tf.identity(variable) for variable in state]
    try:
        yield
    finally:
        for variable, value in zip(state, before, strict=True):
            variable.assign(value)


def _by_kernels(model, inputs, targets, loss_fn, variables, training, conv_method):
    _, uses = recorded(model, inputs, targets, loss_fn, variables, training)
    wanted = {recording.key(variable) for variable in variables}
    found: dict[int, tf.Tensor] = {}
    for use, g in uses:
        for variable, gradient in kernels.gradients(use, g, conv_method):
            name = recording.key(variable)
            if name in wanted:
                found[name] = found[name] + gradient if name in found else gradient
    batch = tf.shape(tf.nest.flatten(inputs)[0])[0]
    return [
        tf.cast(found[name], variable.dtype)
        if name in found
        else tf.zeros([batch, *variable.shape], variable.dtype)
        for variable in variables
        for name in [recording.key(variable)]
    ]


def _mapped(map_rows, model, inputs, targets, loss_fn, variables, training):
    sources = [recording.as_variable(v) for v in variables]

    def one(row):
        row = tf.nest.map_structure(lambda x: x[tf.newaxis], row)
        with tf.GradientTape() as tape:
            for variable in sources:
                if not variable.trainable:
                    tape.watch(variable)
            losses = losses_of(model, *refilled((inputs, targets), row), loss_fn, training)
        found = tape.gradient(losses, sources)
        return [
            tf.zeros_like(v) if g is None else tf.convert_to_tensor(g)
            for v, g in zip(sources, found, strict=True)
        ]

    rows = [tf.convert_to_tensor(x) for x in leaves((inputs, targets))]
    return map_rows(one, rows, _spec(variables))


def _vectorized(one, rows, spec):
    del spec
    return pfor.vectorized_map(one, rows)


def _one_by_one(one, rows, spec):
    if not tf.executing_eagerly():
        return tf.map_fn(one, rows, fn_output_signature=spec, parallel_iterations=1)
    if not rows[0].shape[0]:
        return [tf.zeros([0, *row.shape], row.dtype) for row in spec]
    done = [one([x[i] for x in rows]) for i in range(rows[0].shape[0])]
    return [tf.stack(parts) for parts in zip(*done, strict=True)]


def _spec(variables):
    return [tf.TensorSpec(v.shape, v.dtype) for v in variables]


def _refuse_batch_norm(model, method, chunk_size):
    for layer in recording.sublayers(model) if hasattr(model, "_flatten_layers") else []:
        if any(base.__name__.endswith("BatchNormalization") for base in type(layer).__mro__):
            what = f"method={method!r}" if method != "kernels" else f"chunk_size={chunk_size}"
            raise config.ConfigError(
                f"{what} with training=True would normalize by other rows than the whole batch in "
                f'{layer.name!r}: use method="kernels" without chunks, or training=False.'
            )


def _batch_size(inputs) -> int | None:
    return tf.convert_to_tensor(tf.nest.flatten(inputs)[0]).shape[0]


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raises ConfigError if the value is not an allowed one."""
    if value not in allowed:
        raise config.ConfigError(f"{name}={value!r} is not one of {', '.join(allowed)}.")
