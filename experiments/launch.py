"""What the binaries share around the library: build from a config, guard the run, train."""

import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import tensorflow as tf
import tf_keras as keras
from scipy import special

from experiments import encoders, flags as shared_flags
from ssl_influence import (
    checkpoints,
    config as config_lib,
    distribution,
    evaluation,
    event_files,
    files,
    outer_loop,
    training,
)
from ssl_influence.augment import ctaugment
from ssl_influence.data import (
    duplicates,
    examples,
    inputs,
    names,
    pipeline as pipeline_lib,
    sources,
    splits,
    tokens,
)
from ssl_influence.methods import base as methods_base, registry as methods
from ssl_influence.models import bert, registry as models
from ssl_influence.reporting import ranking

_log = logging.getLogger("ssl_influence")


@dataclasses.dataclass(frozen=True)
class Run:
    """A config with everything built from it; nothing is on disk yet."""

    config: config_lib.Config
    source: examples.Source
    split: splits.Split
    manifest: dict
    pipeline: pipeline_lib.Pipeline
    trainer: training.BilevelTrainer
    encoder: bert.Encoder | None = None  # without its weights


def build(config: config_lib.Config, evaluated_in: files.AnyPath | None = None) -> Run:
    """Loads the data, draws the split and builds the trainer.

    Args:
      config: of the run.
      evaluated_in: the directory of a run that has begun, if it is to be evaluated and not trained:
        nothing is read then that only training needs, such as a pretrained encoder or paraphrases.

    Raises:
      ConfigError: dataset, split, model or devices cannot be had as the config says.
    """
    strategy = distribution.make(config.distribution)  # before anything uses a device
    with distribution.workers_watched(strategy):
        return _build(config, evaluated_in, strategy)


def _build(
    config: config_lib.Config,
    evaluated_in: files.AnyPath | None,
    strategy: tf.distribute.Strategy,
) -> Run:
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(config.train.seed)
    source, split, name, config = load_data(config)
    encoder, tokenizer = None, None
    if config.model.name == "bert":
        found = encoders.load(config.model) if evaluated_in is None else encoders.of(evaluated_in)
        encoder, tokenizer = found
    with_views = evaluated_in is None
    pipeline, trainer = assemble(
        config, source, split, encoder, tokenizer, with_views=with_views, strategy=strategy
    )
    paraphrases_sha256 = pipeline.paraphrases_sha256
    if evaluated_in is not None:
        paraphrases_sha256 = splits.read(evaluated_in / "split.json").get("paraphrases_sha256")
    digests = {"paraphrases_sha256": paraphrases_sha256} if paraphrases_sha256 else {}
    return Run(
        config=config,
        source=source,
        split=split,
        manifest=splits.manifest(split, name, source, config.data, digests),
        pipeline=pipeline,
        trainer=trainer,
        # The model has the weights now.
        encoder=encoder and dataclasses.replace(encoder, weights=None),
    )


def load_data(
    config: config_lib.Config,
) -> tuple[examples.Source, splits.Split, names.DatasetName, config_lib.Config]:
    """The examples, their roles, the dataset's name in parts, and the config with it in full.

    Raises:
      ConfigError: dataset or split cannot be had as the config says.
    """
    name = sources.parse_name(config.data.dataset)
    config = config.replace(data={"dataset": str(name)})
    if name.validation < 1:
        raise config_lib.ConfigError(
            f"--dataset={config.data.dataset} leaves no validation example, by which weights are "
            "learned and runs judged: ask for at least 1."
        )
    source = sources.load(name, config.data)
    allowed = sources.of_classes(source, config.data.unlabeled_classes)
    if config.data.known_classes:
        source = sources.restrict(source, config.data.known_classes)
    split = splits.draw(source, name, config.data, allowed)
    noisy = splits.with_label_noise(source, split, config.data.label_noise, name.seed)
    wrong = np.count_nonzero(noisy.labels != source.labels)
    if wrong:
        _log.info("%d of %d labeled examples have a wrong label.", wrong, len(split.labeled))
    source = noisy
    return source, split, name, config


def assemble(
    config: config_lib.Config,
    source: examples.Source,
    split: splits.Split,
    encoder: bert.Encoder | None = None,
    tokenizer: tokens.TokenizerSpec | None = None,
    *,
    with_views: bool = True,
    strategy: tf.distribute.Strategy | None = None,
) -> tuple[pipeline_lib.Pipeline, training.BilevelTrainer]:
    """The batches, and the trainer for them, of a dataset that was split.

    Args:
      config: of the run.
      source: the examples.
      split: their roles.
      encoder: of model=bert, as `encoders.load` gives it.
      tokenizer: likewise.
      with_views: the pipeline gives training batches; else those for evaluation alone.
      strategy: what the trainer divides batches by; None: nothing.
    """
    strategy = strategy or tf.distribute.get_strategy()
    num_classes, seed = len(source.class_names), config.train.seed
    of_encoder = {}
    if encoder is not None:
        of_encoder = {"encoder": encoder.sizes, "pad_id": tokenizer.token_id(tokens.PAD)}
    with strategy.scope():
        shape = inputs.model_shape(source, tokenizer)
        model = models.build(config.model, shape, num_classes, seed, **of_encoder)
        if encoder is not None and encoder.weights is not None:
            new = bert.load(model, encoder.weights)
            if new and config.model.pooling == "pooler":
                _log.info("The encoder comes without a pooler: it begins with new weights.")
        method = methods.build(
            config.method,
            num_classes,
            config.train.train_steps,
            feature_size=model.outputs[0].shape[-1],
            seed=seed,
        )
    labeled_view = methods_base.labeled_view_of(method)
    views = method.views if with_views else ()
    augmenter = None
    if pipeline_lib.uses_ctaugment(
        config.augment, (*method.views, labeled_view), is_image=source.is_image
    ):
        augmenter = ctaugment.CTAugment(config.augment)
    pipeline = pipeline_lib.Pipeline(
        source,
        split,
        config.data,
        config.augment,
        seed=seed,
        views=views,
        labeled_view=labeled_view,
        augmenter=augmenter,
        tokenizer=tokenizer,
    )
    example_weights = training.make_example_weights(config.weights, len(source.labels))
    trainer = training.BilevelTrainer(
        model, method, example_weights, config, augmenter=augmenter, strategy=strategy
    )
    return pipeline, trainer


def train(built: Run, model_dir: str | os.PathLike, program: str) -> bool:
    """Trains in `model_dir`, or goes on there; False if SIGTERM or SIGINT ended it early.

    Raises:
      ConfigError: the directory cannot be written, or holds a run with other settings or data; or
        workers have not the same.
      NonFiniteError, CheckpointError: see `ssl_influence.outer_loop.train`.
      WorkerError: another worker of the cluster is gone.
    """
    model_dir = files.path(model_dir)
    with (
        _claimed(model_dir, built, program),
        _stop_requests() as stop_requested,
        distribution.workers_watched(built.trainer.strategy),
    ):
        settings = hashlib.sha256(shared_flags.settings_of_run(built.config).encode()).hexdigest()
        of_run = {"their settings": settings, "their data": built.manifest["sha256"]}
        for what, value in of_run.items():
            distribution.check_agreement(built.trainer.strategy, what, value[:12])
        _start_weights(built, model_dir)
        _describe_data(built)
        if built.config.train.tensorboard:
            print(f"Curves: {shared_flags.tensorboard_command(model_dir)}", flush=True)
        try:
            step = outer_loop.train(
                built.trainer,
                built.pipeline,
                model_dir,
                built.config.train,
                weight_ids=built.split.unlabeled,
                should_stop=stop_requested,
            )
        except OSError as error:
            if not str(error.filename or model_dir).startswith(str(model_dir)):
                raise
            raise config_lib.ConfigError(
                f"{error.filename or model_dir} cannot be written ({error.strerror}): make room "
                "there, and the same command goes on from the newest checkpoint."
            ) from error
    return step == built.config.train.train_steps


def evaluate(
    built: Run,
    model_dir: str | os.PathLike,
    batch_size: int | None = None,
    follow_s: float | None = None,
) -> dict[str, dict]:
    """Evaluates every checkpoint on test and validation, see evaluation.evaluate_run.

    What eval/ holds of this run already is kept and not computed again; what it holds of another
    run is removed.

    Args:
      built: the run.
      model_dir: its directory.
      batch_size: examples a batch; None: by the settings of the run.
      follow_s: also waits for checkpoints to come, each for so many seconds at most, see
        evaluation.follow_run.

    Raises:
      ConfigError: eval/ cannot be written; with `follow_s`, another process evaluates there, or
        the directory was given to another run meanwhile.
      CheckpointError: there is nothing to evaluate, or it does not fit.
    """
    model_dir = files.path(model_dir)
    every = built.config.train.checkpoint_every
    batch_size = batch_size or built.config.train.evaluation_batch_size
    with _results_claimed(model_dir / "eval", built, wait=follow_s is None):
        batches = {
            split: built.pipeline.evaluation_batches(split, batch_size)
            for split in evaluated_splits(built)
        }
        run = (built.trainer.model, built.trainer.ema, batches, model_dir)
        if follow_s is None:
            return evaluation.evaluate_run(*run, every, keep=True, strategy=built.trainer.strategy)
        return evaluation.follow_run(
            *run,
            current=lambda: _current_settings(built, model_dir),
            timeout_s=follow_s,
            strategy=built.trainer.strategy,
        )


def train_and_judge(
    config: config_lib.Config,
    model_dir: files.AnyPath,
    program: str,
    labels: Sequence[tuple[str, str]] = (),
) -> dict | None:
    """Trains in `model_dir`, or goes on there, evaluates, and judges the learned weights.

    Where there are `labels`, pairs of name and value, TensorBoard lists the run by these in its
    HParams tab, with its test errors.

    Returns:
      What eval/result.json then holds: {"step"; "raw", "ema": last test errors in percent;
      "auroc_wrong", "auroc_stranger" and the same two with "_by_confidence" at the last checkpoint,
      see `judge_weights`; "mean_auroc_wrong": the mean over those checkpoints where there is one};
      None if training was stopped early.
    """
    keras.backend.clear_session()
    built = build(config)
    if not len(built.source.test_labels):
        raise config_lib.ConfigError(
            f"--dataset={config.data.dataset} has no test part, by which runs are compared: name "
            "one by --test_data."
        )
    if not train(built, model_dir, program):
        return None
    test = evaluate(built, model_dir)["test"]
    result = {"step": config.train.train_steps}
    result.update({kind: test[kind]["last"]["error"] for kind in ("raw", "ema")})
    if config.weights.weighting == "per_example":
        judged = judge_weights(built, model_dir)
        result.update({k: v for k, v in judged[-1].items() if k.startswith("auroc_")})
        defined = [row["auroc_wrong"] for row in judged if row["auroc_wrong"] is not None]
        result["mean_auroc_wrong"] = float(np.mean(defined)) if defined else None
    if labels and config.train.tensorboard:
        events = event_files.EventWriter(model_dir / "tensorboard")
        events.write_hparams({**dict(labels), "seed": config.train.seed})
        errors = {"test/error": result["raw"], "test/ema_error": result["ema"]}
        events.write(config.train.train_steps, errors)
    files.write_atomically(model_dir / "eval" / "result.json", json.dumps(result) + "\n")
    return result


def judge_weights(built: Run, model_dir: files.AnyPath) -> list[dict]:
    """How well low weights mark unlabeled examples that should not be trained on.

    Written to eval/weights.json, a row for each regular checkpoint: {"step"; "wrong": share of
    wrong pseudo-labels (most probable classes of the checkpoint's model, augmentation aside) among
    the unlabeled examples of known truth; "auroc_wrong": the chance that one of these has a lower
    weight than one with a right pseudo-label; "auroc_stranger": the same for examples of a class
    outside the task; "auroc_wrong_by_confidence", "auroc_stranger_by_confidence": the same two for
    a lower confidence, the greatest probability by that model, in place of a lower weight: what
    finds such examples without any weights (Hendrycks and Gimpel, 2017)}. Equal ones count half;
    None where there is no example to tell from others, by weight where none has moved yet, and by
    confidence where the model gives no numbers.
    """
    ids, source = built.split.unlabeled, built.source
    labels = source.labels[ids]
    strangers = np.zeros(len(ids), bool) if source.strangers is None else source.strangers[ids]
    batch_size = built.config.train.evaluation_batch_size
    batches = built.pipeline.evaluation_batches("unlabeled", batch_size)
    reader = tf.train.Checkpoint(model=built.trainer.model)
    rows = []
    found, train_config = (
        checkpoints.list_checkpoints(model_dir / "checkpoints"),
        built.config.train,
    )
    regular = checkpoints.on_schedule(
        found, train_config.checkpoint_every, train_config.train_steps
    )
    for step, path in regular.items():
        checkpoints.read(reader, path).assert_existing_objects_matched()
        logits = [built.trainer.model(batch["inputs"], training=False)[1] for batch in batches]
        # Of float64, as float32 rounds many a probability to 1, which then are equal.
        logits = np.concatenate(logits)[: len(ids)].astype(np.float64)
        pseudo_label, confidence = logits.argmax(axis=1), special.softmax(logits, 1).max(axis=1)
        _, weight, updates = checkpoints.read_weights(model_dir / "weights" / f"weights-{step}.csv")
        row = {
            "step": step,
            "wrong": float(np.mean(pseudo_label[labels >= 0] != labels[labels >= 0])),
        }
        # Weights that did not move rank nothing, nor does a run that diverged in its last step.
        scores = {
            "": weight if updates.any() else None,
            "_by_confidence": confidence if np.isfinite(confidence).all() else None,
        }
        for how, score in scores.items():
            wrong, stranger = np.nan, np.nan
            if score is not None:
                wrong = ranking.wrong_side_auroc(score, pseudo_label, labels)
                stranger = ranking.auroc(-score, strangers)
            row |= {f"auroc_wrong{how}": wrong, f"auroc_stranger{how}": stranger}
        rows.append({name: None if np.isnan(value) else value for name, value in row.items()})
    files.write_atomically(model_dir / "eval" / "weights.json", json.dumps(rows, indent=1) + "\n")
    return rows


def _describe_data(built: Run) -> None:
    """Prints the roles, and warns of what was skipped and of copies that spoil the run.

    Copies are looked for among examples in memory; `experiments.inspect_data` reads others too.
    """
    source, split = built.source, built.split
    roles = splits.describe(
        split, source.labels, source.class_names, source.strangers, source.test_labels
    )
    print(roles, flush=True)
    if source.skipped:
        _log.warning(
            "Left out since they could not be read: %d. The first: %s",
            len(source.skipped),
            source.skipped[0],
        )
    if all(isinstance(held, np.ndarray) for held in (source.inputs, source.test_inputs)):
        for line in duplicates.alarms(duplicates.find(source, split), source):
            _log.warning(line)


def _start_weights(built: Run, model_dir: files.AnyPath) -> None:
    """Gives the unlabeled examples the weights of another run, if this one asks and is to begin.

    Raises:
      ConfigError: that run was on other data, or the file is not one of weights.
    """
    path = built.config.weights.start_from
    if path is None or checkpoints.list_checkpoints(model_dir / "checkpoints"):
        return
    path = files.path(path).expanduser()
    if not path.exists():
        raise config_lib.ConfigError(
            f"weights_from={path} does not exist: name a weights/weights-<step>.csv of a run."
        )
    ids, weights, _ = checkpoints.read_weights(path)
    there = splits.read(path.parent.parent / "split.json")
    if there["inputs_sha256"] != built.manifest["inputs_sha256"]:
        raise config_lib.ConfigError(
            f"weights_from={path} is of {there['dataset']}, whose examples are not those of "
            f"{built.manifest['dataset']}, or were read otherwise (by max_memory_gb): ids of one "
            "mean nothing in the other."
        )
    ours = np.isin(ids, built.split.unlabeled)
    if not ours.any():
        raise config_lib.ConfigError(
            f"weights_from={path} has no weight of an example that is unlabeled here."
        )
    built.trainer.example_weights.start_from(ids[ours], weights[ours])
    _log.info(
        "%d of %d unlabeled examples start with their weights in %s.",
        np.count_nonzero(ours),
        len(built.split.unlabeled),
        path,
    )


def evaluated_splits(built: Run) -> tuple[str, ...]:
    """What errors are measured on: test and validation; validation alone where there is no test."""
    return ("test", "validation") if len(built.source.test_labels) else ("validation",)


@contextmanager
def _results_claimed(folder: files.AnyPath, built: Run, wait: bool) -> Iterator[None]:
    """Keeps other evaluations out of eval/, and removes the results of another run.

    eval/flags.txt says which run the results are of: the settings that a resumed run has to have,
    its split, and the pretrained encoder that it began with.
    """
    record = folder / "flags.txt"
    split = f"# The run that results.jsonl is of, with split {built.manifest['sha256']}"
    if built.encoder is not None:
        split += f" and encoder {built.encoder.sha256}"
    settings = shared_flags.to_flagfile(built.config, program="").partition("\n")[2]
    try:
        with files.os_errors(folder):
            lock = _locked(folder, wait)
            if not _is_record_of(record, built.config, split):
                for name in ("result.json", "results.jsonl", "summary.json", "weights.json"):
                    (folder / name).unlink(missing_ok=True)
            files.write_atomically(record, f"{split}\n{settings}")
    except BlockingIOError as error:
        raise config_lib.ConfigError(
            f"Another process evaluates in {folder}: one is enough, the results are the same."
        ) from error
    except OSError as error:
        raise config_lib.ConfigError(
            f"{folder} cannot be written ({error.strerror}): results belong there."
        ) from error
    with lock:
        yield


def _locked(folder: files.AnyPath, wait: bool) -> AbstractContextManager:
    """Makes a folder and takes it for this process, until what is returned is left.

    The lock is the kernel's: it ends with the process, however that ends. A bucket has none: two
    processes are not kept apart there.

    Raises:
      BlockingIOError: another process has it; with `wait`, this one waits for that to end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not files.is_local(folder):
        return nullcontext()
    lock = (folder / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            raise
        _log.info("Another process writes its results to %s: waiting for it to end.", folder)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def _is_record_of(record: files.AnyPath, config: config_lib.Config, split: str) -> bool:
    try:
        shared_flags.check_resumable(record, config)
    except config_lib.ConfigError:
        return False
    return record.read_text().splitlines()[0] == split


def _current_settings(built: Run, model_dir: files.AnyPath) -> config_lib.TrainConfig:
    """The lengths and intervals in flags.txt; a resumed run may have changed them.

    Raises:
      ConfigError: it is of another run than `built` by now.
    """
    path = model_dir / "flags.txt"
    if not path.exists():
        return built.config.train
    now = shared_flags.read_flagfile(path)
    try:
        shared_flags.check_resumable(model_dir / "eval" / "flags.txt", now)
    except config_lib.ConfigError as error:
        raise config_lib.ConfigError(
            f"{model_dir} was given to another run meanwhile: start again to evaluate that."
        ) from error
    return now.train


@contextmanager
def _claimed(model_dir: files.AnyPath, built: Run, program: str) -> Iterator[None]:
    """Checks that the run may go on there, writes flags.txt and split.json, keeps others out.

    Out of a bucket nobody is kept.
    """
    place = model_dir.resolve() if files.is_local(model_dir) else model_dir
    if re.search(r"[*?\[\]\\]", str(place)):
        raise config_lib.ConfigError(
            f"--model_dir={model_dir} has one of the characters * ? [ ] \\, which TensorFlow takes "
            "for a pattern when it restores: use another name."
        )
    flagfile, manifest = model_dir / "flags.txt", model_dir / "split.json"
    # Without a checkpoint nothing is resumed, and other settings may take the place of the first.
    if checkpoints.list_checkpoints(model_dir / "checkpoints"):
        for path in (flagfile, manifest):
            if not path.exists():
                raise config_lib.ConfigError(
                    f"{model_dir} holds checkpoints but no {path.name} that says what they are: "
                    "put it back, or use another --model_dir."
                )
        shared_flags.check_resumable(flagfile, built.config)
        if built.encoder is not None:
            _check_encoder(model_dir, built)
        splits.check(splits.read(manifest), built.manifest)
    if not distribution.is_chief(built.trainer.strategy):
        yield
        return
    try:
        with files.os_errors(model_dir):
            lock = _locked(model_dir, wait=False)
        inputs.write(built.pipeline.spec, model_dir / "inputs.json")
        if built.encoder is not None:
            bert.write(built.encoder.sizes, built.encoder.sha256, model_dir / "encoder.json")
        files.write_atomically(flagfile, shared_flags.to_flagfile(built.config, program))
        splits.write(built.manifest, manifest)  # the last one: what a follower waits for
    except BlockingIOError as error:
        raise config_lib.ConfigError(
            f"Another process trains in {model_dir}: wait for it, or name another."
        ) from error
    except OSError as error:
        raise config_lib.ConfigError(
            f"--model_dir={model_dir} cannot be written ({error.strerror}): name another."
        ) from error
    with lock:
        yield


def _check_encoder(model_dir: files.AnyPath, built: Run) -> None:
    """Raises ConfigError if a run began with another pretrained encoder, or other tokens."""
    encoder, tokenizer = encoders.of(model_dir)
    if (encoder.sha256, tokenizer) != (built.encoder.sha256, built.pipeline.spec.tokenizer):
        raise config_lib.ConfigError(
            f"{model_dir} holds a run that began with another encoder than --encoder="
            f"{built.config.model.encoder} is now, or one of the other case: use that, or another "
            "--model_dir."
        )


@contextmanager
def _stop_requests() -> Iterator[Callable[[], bool]]:
    """Within the context SIGTERM and SIGINT only ask for a stop; a second SIGINT kills."""
    received = []

    def note(number, frame):
        received.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
