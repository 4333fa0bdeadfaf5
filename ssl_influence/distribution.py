"""The devices that train a model together: choosing them, and dividing batches among them."""

import contextlib
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from ssl_influence import config as config_lib

# On devices that would wait for Python after each step.
_STEPS_PER_CALL = 20

_TF_CONFIG = (
    '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}} on the '
    "first machine, and so on"
)

_log = logging.getLogger("ssl_influence")


@functools.cache
def make(settings: config_lib.DistributionConfig) -> tf.distribute.Strategy:
    """The strategy that the settings name, logged with its devices; to be called first of all.

    TensorFlow takes the settings of devices only before it has used one, and the workers of a
    cluster can be made known to each other only then. Asked again, it is the same strategy: what
    two of them reduce would get mixed up.

    Returns:
      TensorFlow's default strategy for one device.

    Raises:
      ConfigError: there is no such device, or TF_CONFIG does not name workers.
    """
    if settings.virtual_cpus is not None:
        _make_virtual_cpus(settings.virtual_cpus)
    name = settings.strategy
    if name == "auto":
        name = _found(settings)
    if name == "multi_worker":
        strategy = _multi_worker(settings.worker_timeout_s)
    elif name == "tpu":
        strategy = _tpu(settings.tpu)
    elif name == "mirrored":
        gpus = tf.config.list_logical_devices("GPU") if settings.virtual_cpus is None else []
        chosen = gpus or tf.config.list_logical_devices("CPU")
        strategy = tf.distribute.MirroredStrategy([device.name for device in chosen])
    else:
        strategy = tf.distribute.get_strategy()
    _log.info(
        "strategy=%s of %d replica%s, on %s.",
        name,
        strategy.num_replicas_in_sync,
        "s" * (strategy.num_replicas_in_sync > 1),
        ", ".join(_short(device) for device in devices(strategy)),
    )
    return strategy


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this process writes what all of them made: the only one, or the cluster's first."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return True
    resolver = strategy.cluster_resolver
    first = "chief" if "chief" in resolver.cluster_spec().jobs else "worker"
    return (resolver.task_type, resolver.task_id) == (first, 0)


def _found(settings):
    if settings.tpu is not None:
        return "tpu"
    if len(_workers()) > 1:
        return "multi_worker"
    several_gpus = len(tf.config.list_logical_devices("GPU")) > 1
    several_cpus = (settings.virtual_cpus or 1) > 1
    return "mirrored" if several_gpus or several_cpus else "one_device"


def _make_virtual_cpus(number):
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(number)]
    try:
        tf.config.set_logical_device_configuration(cpu, logical)
    except RuntimeError as error:
        raise config_lib.ConfigError(
            f"virtual_cpus={number} comes too late: TensorFlow has used its devices already."
        ) from error


def _workers():
    """The addresses of the workers that TF_CONFIG names, the chief first."""
    text = os.environ.get("TF_CONFIG")
    if not text:
        return []
    try:
        held = json.loads(text)
    except ValueError as error:
        raise config_lib.ConfigError(f"TF_CONFIG={text} is not JSON: {error}.") from error
    cluster = held.get("cluster") if isinstance(held, dict) else None
    if not cluster:
        return []
    task = held.get("task")
    jobs = {job: cluster.get(job) or [] for job in ("chief", "worker")}
    fits = (
        all(isinstance(hosts, list) for hosts in jobs.values())
        and isinstance(task, dict)
        and task.get("index") in range(len(jobs.get(task.get("type"), [])))
    )
    if not fits:
        raise config_lib.ConfigError(
            f"TF_CONFIG={text} does not say which of its workers this is: give it {_TF_CONFIG}."
        )
    return [*jobs["chief"], *jobs["worker"]]


def _multi_worker(timeout_s):
    if not _workers():
        raise config_lib.ConfigError(
            "strategy=multi_worker takes its workers from the environment's TF_CONFIG, which names "
            f"none: set it to {_TF_CONFIG}."
        )
    _log.info("Waiting for all workers: %s.", ", ".join(_workers()))
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    # A timeout of the collectives themselves would cost a sleeping thread for each of them.
    checks = strategy.extended
    checks._check_health_interval = max(1, timeout_s // 2)
    checks._check_health_timeout = max(1, timeout_s // (2 * checks._check_health_retry_limit))
    return strategy


def _tpu(address):
    address = address or "local"
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(address)
        if address != "local":
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, RuntimeError, OSError, tf.errors.OpError) as error:
        reason = str(error).strip().splitlines()[0]
        raise config_lib.ConfigError(
            f"strategy=tpu with tpu={address} finds none ({reason}): name one, or use "
            "another strategy."
        ) from error
    return tf.distribute.TPUStrategy(resolver)


def _short(device):
    """/job:worker/replica:0/task:1/device:CPU:0 as worker 1 CPU:0."""
    parts = dict(part.split(":", 1) for part in device.strip("/").split("/"))
    task = f"worker {parts['task']} " if parts.get("job") == "worker" else ""
    return task + parts["device"]


class WorkerError(config_lib.UserError, RuntimeError):
    """Workers that trained together do so no longer."""

    goes_on = True


@contextlib.contextmanager
def workers_watched(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Within the context, the end of another worker ends this one, with a WorkerError."""
    try:
        yield
    except (
        tf.errors.UnavailableError,
        tf.errors.AbortedError,
        tf.errors.CancelledError,
        tf.errors.DeadlineExceededError,
    ) as error:
        if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            raise
        raise WorkerError(
            f"Another worker is gone ({type(error).__name__}). Start all of them again with the "
            "same commands: they go on from the newest checkpoint."
        ) from error


def divides(strategy: tf.distribute.Strategy, batch: Mapping[str, Any]) -> bool:
    """Whether all rows of a batch can be divided equally among the replicas, or were."""
    count = strategy.num_replicas_in_sync
    return count == 1 or is_split(batch) or all(rows % count == 0 for rows in _sizes(batch))


def is_split(batch: Mapping[str, Any]) -> bool:
    """Whether a batch is one that `split` gave for several replicas."""
    return isinstance(tf.nest.flatten(batch)[0], tf.distribute.DistributedValues)


def split(batch: Any, strategy: tf.distribute.Strategy, *, whole: bool = False) -> Any:
    """A batch divided among the replicas: rows 0 to B/n - 1 are those of the first, and so on.

    Args:
      batch: a nest of tensors [B, ...], perhaps with another B for each.
      strategy: of n replicas. With one the batch stays as it is.
      whole: every replica gets all of it.

    Returns:
      The nest, of one value a replica.

    Raises:
      ConfigError: n does not divide a B.
    """
    count = strategy.num_replicas_in_sync
    if count == 1:
        return batch
    if not whole:
        _check_sizes(batch, count)

    def part(context):
        return batch if whole else _part(batch, context.replica_id_in_sync_group, count)

    return strategy.experimental_distribute_values_from_function(part)


def split_dataset(
    dataset: tf.data.Dataset, strategy: tf.distribute.Strategy, *, whole: bool = False
) -> tf.data.Dataset | tf.distribute.DistributedDataset:
    """A dataset of batches as one of the batches that `split` makes of them.

    Args:
      dataset: its batches are the same in every worker.
      strategy: see `split`.
      whole: see `split`.

    Raises:
      ConfigError: as `split`.
    """
    count = strategy.num_replicas_in_sync
    if count == 1:
        return dataset
    if not whole:
        _check_sizes(dataset.element_spec, count)

    def of_worker(context):
        own = count // context.num_input_pipelines
        first = context.input_pipeline_id * own

        def parts(batch):
            indices = range(first, first + own)
            of_replicas = [batch if whole else _part(batch, index, count) for index in indices]
            stacked = tf.nest.map_structure(lambda *tensors: tf.stack(tensors), *of_replicas)
            return tf.data.Dataset.from_tensor_slices(stacked)

        return dataset.flat_map(parts)

    return strategy.distribute_datasets_from_function(of_worker)


def steps_per_call(
    settings: config_lib.DistributionConfig, strategy: tf.distribute.Strategy
) -> int:
    """How many steps the devices are to take at a time; see `config.DistributionConfig`."""
    if settings.steps_per_call is not None:
        return settings.steps_per_call
    return 1 if any("CPU" in device for device in devices(strategy)) else _STEPS_PER_CALL


def filled_up(batch: Any, strategy: tf.distribute.Strategy) -> Any:
    """The batch with rows of zeros at its end, as far as the replicas need to divide it equally.

    A mask among the tensors is False there.
    """
    count = strategy.num_replicas_in_sync

    def fill(tensor):
        missing = -tensor.shape[0] % count
        zeros = tf.zeros([missing, *tensor.shape[1:]], tensor.dtype)
        return tf.concat([tensor, zeros], 0) if missing else tensor

    return tf.nest.map_structure(fill, batch)


def any_worker(strategy: tf.distribute.Strategy, flag: bool) -> bool:
    """Whether the flag is set in any worker; all of them have to ask. One process knows by itself.

    Without agreement one worker would end while the others wait for it.
    """
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return flag
    total = strategy.reduce(tf.distribute.ReduceOp.SUM, tf.constant(float(flag)), axis=None)
    return bool(total > 0)


def compiled(
    strategy: tf.distribute.Strategy, jit_compile: bool | None
) -> Callable[[Callable], Callable]:
    """What a function that the replicas run is decorated with.

    Args:
      strategy: runs it.
      jit_compile: by XLA; None: where there are GPUs. TPUs compile in any case.

    Raises:
      ConfigError: it is to be compiled for several replicas on CPUs, whose collectives XLA does
        not know.
    """
    on_gpu = all("GPU" in device for device in devices(strategy))
    on_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
    if on_tpu or not (on_gpu if jit_compile is None else jit_compile):
        return lambda function: function
    if strategy.num_replicas_in_sync > 1 and not on_gpu:
        raise config_lib.ConfigError(
            "jit_compile=True cannot compile what several replicas do together on CPUs: leave it "
            "out, or use one replica."
        )
    return tf.function(autograph=False, jit_compile=True)


def devices(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """The names of the devices, of this process, that the replicas compute on."""
    if strategy is tf.distribute.get_strategy() and not tf.distribute.has_strategy():
        found = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        return (found[0].name,)
    return tuple(strategy.extended.worker_devices)


def check_agreement(strategy: tf.distribute.Strategy, what: str, value: str) -> None:
    """Raises ConfigError unless all workers, each of which has to call this, have one value.

    Args:
      strategy: of the workers; one process agrees with itself.
      what: the value is, for the message.
      value: is compared by a digest of it.
    """
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return
    digest = float(int.from_bytes(hashlib.sha256(value.encode()).digest()[:5], "big"))
    # The digest is its mean over the workers, in each of them, only if all are equal.
    total = strategy.reduce(tf.distribute.ReduceOp.SUM, tf.constant(digest, tf.float64), axis=None)
    # Each worker adds its own once.
    if float(total) != digest * len(_workers()):
        raise config_lib.ConfigError(
            f"The workers differ in {what} (here {value}): start all of them with the same "
            "command, on the same data and with the same --model_dir."
        )


def _check_sizes(batch: Any, count: int) -> None:
    for rows in _sizes(batch):
        if rows % count:
            raise config_lib.ConfigError(
                f"A batch of {rows} examples cannot be divided among {count} replicas: make "
                f"labeled_batch_size and unlabeled_batch_size multiples of {count}."
            )


def _sizes(batch: Any) -> list[int]:
    return [tensor.shape[0] for tensor in tf.nest.flatten(batch)]


def _part(batch: Any, index: int, count: int) -> Any:
    """Those rows of each tensor that belong to one replica of `count`."""

    def rows_of(tensor):
        rows = tensor.shape[0] // count
        return tensor[index * rows : (index + 1) * rows]

    return tf.nest.map_structure(rows_of, batch)
