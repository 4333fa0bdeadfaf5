"""The flags that all experiments share, and their way to and from `ssl_influence.config.Config`.

One table row a flag: its name, the concern and field of the config it fills, and its description.
Types, defaults and allowed values come from the config itself.
"""

import pathlib
import shlex
import tempfile
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from absl import flags

from ssl_influence import config as config_lib, files
from ssl_influence.data import names

flags.disclaim_key_flags()

_CHOICES = {
    "method": tuple(config_lib.METHODS),
    "strong_view": (*config_lib.STRONG_VIEWS, *config_lib.TEXT_VIEWS),
    "forward_pass": config_lib.FORWARD_PASSES,
    "weighting": config_lib.WEIGHTINGS,
    "weight_batch": config_lib.WEIGHT_BATCHES,
    "influence_params": config_lib.INFLUENCE_PARAMS,
    "inverse_hessian": tuple(config_lib.INVERSE_HESSIANS),
    "curvature": config_lib.CURVATURES,
    "weight_optimizer": config_lib.WEIGHT_OPTIMIZERS,
    "head": config_lib.HEADS,
    "validation_batch_norm": config_lib.VALIDATION_BATCH_NORMS,
    "optimizer": config_lib.OPTIMIZERS,
    "schedule": config_lib.SCHEDULES,
    "decayed_variables": config_lib.DECAYED_VARIABLES,
    "ema_variables": config_lib.EMA_VARIABLES,
    "strategy": config_lib.STRATEGIES,
    "model": config_lib.MODELS,
    "pooling": config_lib.POOLINGS,
    "keep_end": config_lib.KEPT_ENDS,
    "mixed_precision": config_lib.MIXED_PRECISIONS,
    "tsa": config_lib.TSA_SCHEDULES,
    "target_forward": config_lib.TARGET_FORWARDS,
    "normalization": config_lib.NORMALIZATIONS,
    "on_bad_example": config_lib.ON_BAD_EXAMPLE,
}

# (flag, concern, field, description)
_TABLE = (
    (
        "dataset",
        "data",
        "dataset",
        "Dataset and split, name.seed@labels-validation: digits.1@60-200, two_moons.1@10-30, "
        "cifar10.1@250-1024, svhn_cropped.1@250-1024, ... A bare name takes its usual split.",
    ),
    (
        "data_dir",
        "data",
        "data_dir",
        "Where TFDS datasets are or get prepared (default: TFDS's own).",
    ),
    (
        "unlabeled_data",
        "data",
        "unlabeled_data",
        "More data, as folder:/path or another source without an ending, whose examples are "
        "unlabeled ones.",
    ),
    (
        "validation_data",
        "data",
        "validation_data",
        "Data that the validation examples are drawn from (default: the training part).",
    ),
    ("test_data", "data", "test_data", "Data that are tested on (default: the test part, if any)."),
    (
        "image_size",
        "data",
        "image_size",
        "Side, or height,width, that images are scaled to, shorter side first, and cut to in the "
        "middle (default: as they are, all of one size).",
    ),
    (
        "image_channels",
        "data",
        "image_channels",
        "1 makes images gray, 3 RGB (default: as they are, all alike).",
    ),
    ("text_column", "data", "text_column", "Column of a table that holds the texts."),
    (
        "image_column",
        "data",
        "image_column",
        "Column of a table that holds the paths of images (feature of TFRecords).",
    ),
    (
        "label_column",
        "data",
        "label_column",
        "Column of a table (feature of TFRecords) that holds the labels, empty where unknown.",
    ),
    (
        "columns",
        "data",
        "columns",
        "Names of a table's columns if its first line is not a header, as id,rating,text.",
    ),
    (
        "min_text_length",
        "data",
        "min_text_length",
        "Texts of the unlabeled part with fewer characters are left out (500 in UDA's code).",
    ),
    (
        "on_bad_example",
        "data",
        "on_bad_example",
        "What to do about a file or row that cannot be read: end with an error that names it, or "
        "skip and count it.",
    ),
    (
        "max_memory_gb",
        "data",
        "max_memory_gb",
        "Files of images are read ahead into memory if they take no more than this, in GiB; else "
        "whenever they are needed.",
    ),
    (
        "unlabeled_includes_labeled",
        "data",
        "unlabeled_includes_labeled",
        "The labeled examples are also unlabeled examples, as in FixMatch's code.",
    ),
    (
        "validation_overlap",
        "data",
        "validation_overlap",
        "Labeled examples may be validation examples too, as in FixMatch's code; the overlap is "
        "printed.",
    ),
    (
        "labeled_includes_validation",
        "data",
        "labeled_includes_validation",
        "The validation examples are labeled examples too.",
    ),
    (
        "known_classes",
        "data",
        "known_classes",
        "Classes of the task by number, as 0,1,2 (default: all). Examples of the others can only "
        "be unlabeled ones.",
    ),
    (
        "unlabeled_mismatch",
        "data",
        "unlabeled_mismatch",
        "Share of the unlabeled examples outside --known_classes, or of classes that only "
        "--unlabeled_data has (default: all there are).",
    ),
    (
        "unlabeled_size",
        "data",
        "unlabeled_size",
        "How many unlabeled examples, drawn by the dataset's seed (default: all there are).",
    ),
    (
        "unlabeled_classes",
        "data",
        "unlabeled_classes",
        "Classes that unlabeled examples may be of, by the data's own numbers (default: all).",
    ),
    (
        "balance",
        "data",
        "balance",
        "Draw labeled and validation examples class by class, else from all alike.",
    ),
    ("labeled_ids", "data", "labeled_ids", "File of the labeled examples' ids, one a line."),
    ("validation_ids", "data", "validation_ids", "File of the validation examples' ids."),
    (
        "unlabeled_ids",
        "data",
        "unlabeled_ids",
        "File of the unlabeled examples' ids (default: all others).",
    ),
    (
        "label_noise",
        "data",
        "label_noise",
        "Share of the labeled examples that get a wrong label, for studies.",
    ),
    ("labeled_batch_size", "data", "labeled_batch_size", "Labeled examples a step."),
    ("unlabeled_batch_size", "data", "unlabeled_batch_size", "Unlabeled examples a step."),
    (
        "validation_batch_size",
        "data",
        "validation_batch_size",
        "Validation examples a weight step; at most the whole validation part.",
    ),
    ("flip", "augment", "flip", "Random horizontal flips in the weak view (default: by dataset)."),
    ("shift", "augment", "shift", "Largest random shift in pixels (default: height / 8)."),
    (
        "strong_view",
        "augment",
        "strong",
        "How strong views are made. Of images: RandAugment of UDA or of FixMatch, the policies "
        "AutoAugment found, or CTAugment, which learns how strong it may be. Of texts: tf_idf "
        "replaces words that say little, paraphrases come from a file.",
    ),
    (
        "rand_augment_operations",
        "augment",
        "operations",
        "RandAugment operations drawn for each strong view.",
    ),
    (
        "rand_augment_probability",
        "augment",
        "probability",
        "Chance that a drawn RandAugment operation is applied.",
    ),
    (
        "cutout",
        "augment",
        "cutout",
        "Side of the cutout square, as a fraction of the image height.",
    ),
    ("ctaugment_depth", "augment", "ctaugment_depth", "Operations of CTAugment for each image."),
    (
        "ctaugment_threshold",
        "augment",
        "ctaugment_threshold",
        "CTAugment draws magnitudes whose rate, over the highest, is at least this.",
    ),
    (
        "ctaugment_decay",
        "augment",
        "ctaugment_decay",
        "Share of CTAugment's old rate that a probe leaves.",
    ),
    (
        "ctaugment_interval",
        "augment",
        "ctaugment_interval",
        "Steps whose batches share one snapshot of CTAugment's rates.",
    ),
    (
        "tf_idf_probability",
        "augment",
        "tf_idf_probability",
        "Share of the words that strong_view=tf_idf replaces, on average.",
    ),
    (
        "paraphrases",
        "augment",
        "paraphrases",
        "File of paraphrases, as experiments.back_translate writes it.",
    ),
    (
        "normalization",
        "augment",
        "normalization",
        "scale: pixels to [-1, 1]; standardize: zero mean, unit variance for each channel.",
    ),
    ("model", "model", "name", "Network."),
    ("depth", "model", "depth", "Depth of the Wide-ResNet: 28 in WRN-28-2; 6n + 4."),
    ("width", "model", "width", "Widening factor of the Wide-ResNet: 2 in WRN-28-2."),
    ("filters", "model", "filters", "Filters of the Wide-ResNet's first convolution."),
    (
        "head",
        "model",
        "head",
        "Last layer: one logit a class, or of two classes the difference of logits alone (binary).",
    ),
    ("hidden_units", "model", "hidden_units", "Units of each hidden layer of the MLP."),
    (
        "batch_norm_momentum",
        "model",
        "batch_norm_momentum",
        "Momentum of BatchNorm's moving statistics; short runs need a lower one.",
    ),
    (
        "encoder",
        "model",
        "encoder",
        "Pretrained BERT: a folder with its weights, configuration and vocabulary, or bert_tiny or "
        "minilm where their packages are installed.",
    ),
    (
        "pooling",
        "model",
        "pooling",
        "Features of BERT: those of its pooler, of the first token, or the mean of all tokens.",
    ),
    ("dropout", "model", "dropout", "Dropout of BERT."),
    (
        "sequence_length",
        "model",
        "sequence_length",
        "Tokens that a text is cut or filled up to, two special ones among them.",
    ),
    ("keep_end", "model", "keep_end", "Which end of a text stays if it is too long."),
    (
        "lower_case",
        "model",
        "lower_case",
        "Texts are put in lower case, without accents (default: as the encoder says).",
    ),
    ("method", "method", "name", "Base SSL algorithm; supervised uses the labeled examples alone."),
    (
        "confidence",
        "method",
        "confidence",
        "An unlabeled example takes part once its highest predicted probability passes this.",
    ),
    ("temperature", "method", "temperature", "Sharpening of the target; 1 leaves it as it is."),
    (
        "unsupervised_weight",
        "method",
        "unsupervised_weight",
        "Weight of the whole unlabeled loss, beside the example weights.",
    ),
    (
        "ramp_up",
        "method",
        "ramp_up",
        "Share of the run over which the weight of the unlabeled loss grows from 0.",
    ),
    ("augmentations", "method", "augmentations", "Views of each unlabeled example."),
    ("mixup_alpha", "method", "mixup_alpha", "MixUp draws its ratios from Beta(alpha, alpha)."),
    (
        "distribution_alignment",
        "method",
        "distribution_alignment",
        "ReMixMatch's targets follow the class frequencies of the labels.",
    ),
    (
        "unmixed_weight",
        "method",
        "unmixed_weight",
        "Weight of ReMixMatch's loss on a strong view before MixUp.",
    ),
    ("rotation_weight", "method", "rotation_weight", "Weight of ReMixMatch's rotation loss."),
    (
        "vat_radius",
        "method",
        "vat_radius",
        "Length of VAT's perturbation, in the units of the model's inputs.",
    ),
    (
        "vat_probe",
        "method",
        "vat_probe",
        "Length of the step by which VAT seeks its direction.",
    ),
    ("vat_iterations", "method", "vat_iterations", "Power iterations that seek it."),
    ("entropy_weight", "method", "entropy_weight", "Weight of VAT's entropy of predictions."),
    ("tsa", "method", "tsa", "UDA's training signal annealing of the labeled loss."),
    (
        "target_forward",
        "method",
        "target_forward",
        "joint: the weak view shares the training forward pass, as published; separate: it has one "
        "of its own, without a gradient, which is faster.",
    ),
    (
        "forward_pass",
        "method",
        "forward_pass",
        "joint: all rows with a gradient share one forward pass; separate: one pass for each group "
        "of rows, the first of which updates BatchNorm, as published.",
    ),
    ("optimizer", "optimizer", "name", "Optimizer of the network; sgd has Nesterov momentum."),
    (
        "learning_rate",
        "optimizer",
        "learning_rate",
        "Learning rate of the network, before schedule.",
    ),
    (
        "schedule",
        "optimizer",
        "schedule",
        "cosine: learning rate times cos(7 pi / 16 * progress), as FixMatch; half_cosine: down to "
        "0.4% of it, as UDA; linear: down to 0, as BERT; or constant.",
    ),
    (
        "learning_rate_warmup_steps",
        "optimizer",
        "warmup_steps",
        "Steps over which the learning rate grows from 0.",
    ),
    ("momentum", "optimizer", "momentum", "Momentum of sgd."),
    (
        "adam_epsilon",
        "optimizer",
        "adam_epsilon",
        "Added to the root of adam's second moment.",
    ),
    (
        "adam_bias_correction",
        "optimizer",
        "adam_bias_correction",
        "Adam corrects the bias of its moments; BERT's published code does not.",
    ),
    (
        "clip_norm",
        "optimizer",
        "clip_norm",
        "Gradients are scaled down to this norm, all together (default: never).",
    ),
    (
        "weight_decay",
        "optimizer",
        "weight_decay",
        "Coefficient of 1/2 |v|^2 in the objective (coupled L2).",
    ),
    (
        "decoupled_weight_decay",
        "optimizer",
        "decoupled_weight_decay",
        "Share of the variables, times the learning rate, that each step takes away (AdamW).",
    ),
    ("decayed_variables", "optimizer", "decayed_variables", "Variables that weight decay is for."),
    ("ema_decay", "optimizer", "ema_decay", "Decay of the weights' moving average."),
    (
        "ema_variables",
        "optimizer",
        "ema_variables",
        "What is averaged: trainable variables, or all, BatchNorm's statistics too.",
    ),
    (
        "weighting",
        "weights",
        "weighting",
        "per_example: each unlabeled example has its own learned weight; single: one learned "
        "weight for all; fixed: all keep --weight_init.",
    ),
    ("weight_init", "weights", "initial", "Example weight at the start."),
    (
        "weights_from",
        "weights",
        "start_from",
        "A weights-<step>.csv of another run on the same data, whose weights to start with.",
    ),
    (
        "weight_optimizer",
        "weights",
        "optimizer",
        "What moves the example weights: m_adam, or adam or sgd to compare with (at a cost that "
        "grows with the number of examples).",
    ),
    ("weight_lr", "weights", "learning_rate", "Step size of the example weights."),
    ("weight_min", "weights", "minimum", "Smallest example weight."),
    ("weight_max", "weights", "maximum", "Largest example weight (default: no bound)."),
    (
        "weight_warmup_steps",
        "weights",
        "warmup_steps",
        "Steps before example weights start to move.",
    ),
    (
        "inner_steps",
        "weights",
        "inner_steps",
        "Network steps from one weight step to the next (N).",
    ),
    (
        "weight_batch",
        "weights",
        "batch",
        "fused: weight steps share the batch and forward pass of a network step; fresh: they draw "
        "batches of their own (Algorithm 1 to the letter).",
    ),
    (
        "damping",
        "weights",
        "damping",
        "Added to the diagonal of the Hessian, whatever inverts it.",
    ),
    (
        "influence_params",
        "weights",
        "influence_params",
        "Variables over which the influence on the validation loss is taken: the last layer in "
        "closed form, the last block with the last layer, or all.",
    ),
    (
        "inverse_hessian",
        "weights",
        "inverse_hessian",
        "exact: direct solve, matrix-free for large heads (the paper's); cg: conjugate gradients; "
        "identity; neumann: truncated series; lissa: stochastic series; outer_product: of "
        "per-example gradients; unrolled: through steps of gradient descent.",
    ),
    (
        "curvature",
        "weights",
        "curvature",
        "Of last_block and all: gauss_newton is never indefinite; hessian is the objective's own.",
    ),
    ("cg_tolerance", "weights", "cg_tolerance", "Relative residual at which cg stops."),
    (
        "cg_iterations",
        "weights",
        "cg_iterations",
        "The most iterations of cg; a weight step that falls short of the tolerance is skipped.",
    ),
    ("neumann_terms", "weights", "neumann_terms", "Terms of the Neumann series."),
    (
        "neumann_step",
        "weights",
        "neumann_step",
        "Step of the Neumann series (default: by an estimate of the largest eigenvalue).",
    ),
    ("lissa_iterations", "weights", "lissa_iterations", "Samples of the Hessian in lissa."),
    (
        "lissa_scale",
        "weights",
        "lissa_scale",
        "Scale of lissa, above a sample's largest eigenvalue (default: by an estimate of it).",
    ),
    ("lissa_rows", "weights", "lissa_rows", "Rows of the batch in a sample of lissa."),
    ("unroll_steps", "weights", "unroll_steps", "Steps of gradient descent that are unrolled."),
    (
        "unroll_step",
        "weights",
        "unroll_step",
        "Size of the unrolled steps (default: by an estimate of the largest eigenvalue).",
    ),
    (
        "validation_batch_norm",
        "weights",
        "validation_batch_norm",
        "BatchNorm on validation batches: moving statistics (inference) or the batch's own.",
    ),
    ("train_steps", "train", "train_steps", "Network steps of the whole run."),
    ("seed", "train", "seed", "Seed of initialization, batches and augmentation."),
    ("log_every", "train", "log_every", "Steps between lines of training metrics."),
    ("eval_every", "train", "eval_every", "Steps between measurements of the validation error."),
    ("checkpoint_every", "train", "checkpoint_every", "Steps between checkpoints."),
    ("keep_checkpoints", "train", "keep_checkpoints", "How many of the newest checkpoints stay."),
    ("tensorboard", "train", "tensorboard", "Write TensorBoard event files beside metrics.jsonl."),
    ("jit_compile", "train", "jit_compile", "Compile the steps with XLA (default: on GPUs)."),
    (
        "rows_per_pass",
        "train",
        "rows_per_pass",
        "The most rows that go through the network at once; more are taken in turn, which saves "
        "memory and costs a forward pass (default: all at once).",
    ),
    (
        "mixed_precision",
        "model",
        "mixed_precision",
        "bfloat16 or float16 (with scaled losses) compute in half precision, with variables and "
        "influence in float32.",
    ),
    (
        "sync_bn",
        "model",
        "sync_bn",
        "BatchNorm normalizes by the batch of all replicas, not each by its own part.",
    ),
    (
        "strategy",
        "distribution",
        "strategy",
        "Devices that train together: all GPUs of this machine (mirrored), those of all machines "
        "in TF_CONFIG (multi_worker), a tpu, or one_device; auto takes what there is.",
    ),
    (
        "tpu",
        "distribution",
        "tpu",
        "Name or address of a Cloud TPU; local for that of this machine.",
    ),
    (
        "virtual_cpus",
        "distribution",
        "virtual_cpus",
        "Take the CPU as so many devices, to try mirrored replicas out.",
    ),
    (
        "worker_timeout_s",
        "distribution",
        "worker_timeout_s",
        "Seconds after which a worker of multi_worker that the others wait for is given up.",
    ),
    (
        "steps_per_call",
        "distribution",
        "steps_per_call",
        "Steps that the devices take at a time, before Python looks again (default: 1 on CPUs, 20 "
        "elsewhere).",
    ),
)

# Fields that a resumed run may change: they decide where things lie and what is kept, not the run.
# (The manifest holds digests of the data and of paraphrases, and ids; encoder.json one of the
# encoder.)
_FREE_ON_RESUME = {
    ("data", "data_dir"),
    ("data", "unlabeled_data"),
    ("data", "validation_data"),
    ("data", "test_data"),
    ("data", "max_memory_gb"),
    ("augment", "paraphrases"),
    ("model", "encoder"),
    ("train", "checkpoint_every"),
    ("train", "keep_checkpoints"),
    ("train", "tensorboard"),
    ("distribution", "strategy"),
    ("distribution", "tpu"),
    ("distribution", "virtual_cpus"),
    ("distribution", "worker_timeout_s"),
    ("distribution", "steps_per_call"),
}


# Flags that say where what is read lies.
_PLACES = (
    "dataset",
    "data_dir",
    "unlabeled_data",
    "validation_data",
    "test_data",
    "paraphrases",
    "encoder",
)


def define(defaults: Mapping[str, Any] | None = None, flag_values=flags.FLAGS) -> None:
    """Defines the shared flags.

    Args:
      defaults: flag -> value where an experiment's default differs from the config's own.
      flag_values: where to define them.

    Raises:
      KeyError: `defaults` names a flag that is not in the table.
    """
    defaults = dict(defaults or {})
    for name, concern, field, description in _TABLE:
        kind, default = _field(concern, field)
        default = defaults.pop(name, default)
        keywords = {"flag_values": flag_values}
        if name in _CHOICES:
            flags.DEFINE_enum(name, default, _CHOICES[name], description, **keywords)
        elif kind is bool:
            flags.DEFINE_boolean(name, default, description, **keywords)
        elif kind is int:
            flags.DEFINE_integer(name, default, description, **keywords)
        elif kind is float:
            flags.DEFINE_float(name, default, description, **keywords)
        elif kind is str:
            flags.DEFINE_string(name, default, description, **keywords)
        else:
            flags.DEFINE_list(name, [str(unit) for unit in default], description, **keywords)
    if defaults:
        raise KeyError(f"no such flags: {', '.join(defaults)}")


def to_config(
    overrides: Mapping[str, str] | None = None, flag_values=flags.FLAGS
) -> config_lib.Config:
    """The config that the flags describe.

    Args:
      overrides: flag -> text that takes the place of its value.
      flag_values: where the flags are defined.

    Raises:
      ConfigError: a value or a combination cannot work, or there is no such flag.
    """
    overrides = dict(overrides or {})
    fields: dict[str, dict[str, Any]] = {}
    for name, concern, field, _ in _TABLE:
        value = flag_values[name].value
        if name in overrides:
            text = overrides.pop(name)
            try:
                value = flag_values[name].parser.parse(text)
            except ValueError as error:
                raise config_lib.ConfigError(f"{name}={text} cannot be: {error}.") from error
        if isinstance(value, list):
            kind, _ = _field(concern, field)
            value = tuple(value) if kind == tuple[str, ...] else parse_numbers(name, value)
        fields.setdefault(concern, {})[field] = value
    if overrides:
        raise config_lib.ConfigError(f"There is no setting {next(iter(overrides))!r}.")
    return config_lib.Config().replace(**fields)


def value(config: config_lib.Config, flag: str) -> Any:
    """What a config holds for a flag; of a setting of the method, what it has if left out."""
    concern, field = _place(flag)
    if concern == "method" and field != "name":
        return config.method.settings().get(field)
    return getattr(getattr(config, concern), field)


def has(config: config_lib.Config, flag: str) -> bool:
    """Whether a config has the setting of a flag: each method has some of its own."""
    concern, field = _place(flag)
    return concern != "method" or field == "name" or field in config.method.settings()


def _place(flag: str) -> tuple[str, str]:
    """The part of a config and its field that a flag sets."""
    return next((row[1], row[2]) for row in _TABLE if row[0] == flag)


def to_flagfile(config: config_lib.Config, program: str) -> str:
    """The text of a flagfile that gives `config` back, every flag spelled out."""
    lines = [f"# python -m {program} --flagfile=flags.txt --model_dir=..."]
    for name, *_ in _TABLE:
        held = value(config, name)
        if held is None:
            continue
        if isinstance(held, bool):
            lines.append(f"--{name}" if held else f"--no{name}")
        elif isinstance(held, tuple):
            lines.append(f"--{name}={','.join(map(str, held))}")
        else:
            lines.append(f"--{name}={held}")
    return "\n".join(lines) + "\n"


def read_flagfile(path: files.AnyPath) -> config_lib.Config:
    """The config in a run's flags.txt, or in another flagfile.

    Raises:
      ConfigError: the file holds a flag or a value this version does not know, naming it.
    """
    try:
        with _local(path) as copy:
            return read_arguments([f"--flagfile={copy}"], str(path))
    except OSError as error:
        raise config_lib.ConfigError(f"{path} cannot be read: {error}") from error


def read_arguments(arguments: Sequence[str], named: str) -> config_lib.Config:
    """The config of a command line, as --flag=value or --flagfile=path, of which later ones win.

    Args:
      arguments: of the shared flags; what they leave out is the config's own default.
      named: what messages call them.

    Raises:
      ConfigError: there is no such flag, file or value, or they do not go together.
    """
    flag_values = flags.FlagValues()
    define(flag_values=flag_values)
    flags.DEFINE_string("flagfile", "", "", flag_values=flag_values)
    try:
        rest = flag_values(["flags", *arguments])
    except (flags.Error, OSError) as error:
        raise config_lib.ConfigError(f"{named} cannot be read: {error}") from error
    if rest[1:]:
        raise config_lib.ConfigError(f"{named} cannot be read: {rest[1]!r} is not a --flag=value.")
    return to_config(flag_values=flag_values)


@contextmanager
def _local(path: files.AnyPath) -> Iterator[pathlib.Path]:
    """The file, or a copy of one in a bucket, which absl does not read from there."""
    if files.is_local(path):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder, files.os_errors(path):
        copy = pathlib.Path(folder) / path.name
        copy.write_bytes(path.read_bytes())
        yield copy


def check_resumable(path: files.AnyPath, config: config_lib.Config) -> None:
    """Compares the flags.txt of a started run with the settings it is to go on with.

    `train_steps` may grow where the schedule is constant, since nothing else depends on it.

    Raises:
      ConfigError: a setting that changes the run differs; names each, with both values.
    """
    old = read_flagfile(path)
    grows = config.train.train_steps >= old.train.train_steps
    may_grow = config.optimizer.schedule == "constant" and not _has_schedule(config.method)
    changed = differences(old, config, {("train", "train_steps")} if grows and may_grow else ())
    if changed:
        raise config_lib.ConfigError(
            f"{path.parent} holds a run with other settings ({'; '.join(changed)}): use those, or "
            "another --model_dir."
        )


def differences(
    old: config_lib.Config,
    new: config_lib.Config,
    free: Collection[tuple[str, str]] = (),
) -> list[str]:
    """The settings that change a run and differ, with both values; `free` ones aside."""
    return [
        f"--{name}={value(old, name)} there, {value(new, name)} now"
        for name in differing(old, new, free)
    ]


def differing(
    old: config_lib.Config,
    new: config_lib.Config,
    free: Collection[tuple[str, str]] = (),
) -> list[str]:
    """The flags of the settings that change a run and differ; `free` ones aside.

    Of the dataset only the ending counts: the manifest says whether the data are the same.
    """
    found = []
    for name, concern, field, _ in _TABLE:
        before, after = value(old, name), value(new, name)
        if name == "dataset":
            before, after = names.ending(before), names.ending(after)
        if before != after and (concern, field) not in {*_FREE_ON_RESUME, *free}:
            found.append(name)
    return found


def settings_of_run(config: config_lib.Config) -> str:
    """What a run is determined by, beside its data: a line for each setting."""
    return "\n".join(
        f"{name}={value(config, name)}"
        for name, concern, field, _ in _TABLE
        if (concern, field) not in _FREE_ON_RESUME and name != "dataset"
    )


def same_places(path: files.AnyPath, config: config_lib.Config) -> bool:
    """Whether a flags.txt names data, encoder and paraphrases where `config` does.

    Elsewhere they may be others, as their digests tell once they are read.
    """
    old = read_flagfile(path)
    return all(value(old, name) == value(config, name) for name in _PLACES)


def _has_schedule(method: config_lib.MethodConfig) -> bool:
    """Whether the method's losses depend on how long the run is."""
    settings = method.settings()
    return settings.get("tsa", "none") != "none" or settings.get("ramp_up", 0) != 0


def _field(concern: str, field: str) -> tuple[Any, Any]:
    """Type, without None, and default of a config field."""
    default = getattr(getattr(config_lib.Config(), concern), field)
    owner = type(getattr(config_lib.Config(), concern))
    kind = typing.get_type_hints(owner)[field]
    if isinstance(kind, types.UnionType):
        kind = next(k for k in typing.get_args(kind) if k is not types.NoneType)
    return kind, default


def parse_numbers(name: str, value: list[str]) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in value)
    except ValueError as error:
        raise config_lib.ConfigError(
            f"{name}={','.join(value)} is not a list of whole numbers such as 10,20."
        ) from error


def define_model_dir() -> flags.FlagHolder:
    """Defines --model_dir, required. Read it with `model_dir`."""
    holder = flags.DEFINE_string(
        "model_dir",
        None,
        "Directory of the run; may lie in a bucket (gs://...).",
        required=True,
    )
    flags.register_validator(
        "model_dir", lambda path: path != "", "name a directory, or . for this one"
    )
    return holder


def define_moved_data() -> None:
    """Defines --data_dir and --dataset, of a run that is there. See `with_moved_data`."""
    flags.DEFINE_string("data_dir", None, "Where TFDS datasets are now, if they were moved.")
    flags.DEFINE_string(
        "dataset",
        None,
        "The run's dataset where it lies now, if it was moved: folder:/new/place.1@40-100.",
    )


def with_moved_data(config: config_lib.Config) -> config_lib.Config:
    """The settings of a run, with its data where the flags say that they lie now."""
    moved = {name: flags.FLAGS[name].value for name in ("dataset", "data_dir")}
    return config.replace(data={name: place for name, place in moved.items() if place})


def model_dir(flag_values=flags.FLAGS) -> files.AnyPath:
    """--model_dir, with a leading ~ expanded.

    Raises:
      ConfigError: it is in a bucket that cannot be reached, or that has another name.
    """
    text = flag_values.model_dir
    path = files.path(text).expanduser()
    if not files.has_scheme(text):
        return path
    if files.is_local(path):
        raise config_lib.ConfigError(f"--model_dir={text}: buckets are named as gs://bucket/run.")
    try:
        with files.os_errors(path):
            path.exists()
    except OSError as error:
        raise config_lib.ConfigError(
            f"--model_dir={text} cannot be reached ({error.strerror}): name a directory, or a "
            "bucket that you have access to."
        ) from error
    return path


def output_file(flag: flags.FlagHolder) -> pathlib.Path | None:
    """The file that a flag names, with a leading ~ expanded; None where it names none.

    Raises:
      ConfigError: it is a folder, or lies in a bucket.
    """
    if not flag.value:
        return None
    path = files.path(flag.value).expanduser()
    if files.has_scheme(flag.value):
        raise config_lib.ConfigError(
            f"--{flag.name}={flag.value} lies in a bucket: name a local file, and copy it there."
        )
    if path.is_dir():
        raise config_lib.ConfigError(f"--{flag.name}={path} is a folder: name a file.")
    return path


def tensorboard_command(folder: files.AnyPath) -> str:
    """What shows the event files of the runs in a directory, a sweep's with its HParams."""
    return f"tensorboard --logdir={shlex.quote(str(folder))}"


def require_of_run(model_dir: files.AnyPath, name: str) -> None:
    """Raises ConfigError unless the directory holds a file that every run has."""
    if not (model_dir / name).exists():
        raise config_lib.ConfigError(
            f"--model_dir={model_dir} holds no {name}: name the directory of a run (of a "
            "comparison, one of the folders in it)."
        )
