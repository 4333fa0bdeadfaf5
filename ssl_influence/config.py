"""Settings of a run as frozen dataclasses, one per concern, validated where they are built.

Nothing here imports TensorFlow or absl: binaries turn flags into these, the library reads only
these.
A value that cannot work raises `ConfigError`, whose message is one line that names the value and
the remedy; binaries print it and exit.
"""

import dataclasses
import math
from typing import Any

# Each base algorithm, and the settings that are its own with the values of its published code
# (github.com/google-research/fixmatch, and github.com/google-research/uda for uda), but for
# forward_pass, which is "separate" there, and vat_probe, 1e-6 there: see BUILD_NOTES.md.
METHODS = {
    "pseudo_label": {
        "confidence": 0.95,
        "unsupervised_weight": 1.0,
        "ramp_up": 0.4,
        "forward_pass": "joint",
    },
    "vat": {
        "unsupervised_weight": 0.3,
        "ramp_up": 0.4,
        "vat_radius": 6.0,
        "vat_probe": 1e-2,
        "vat_iterations": 1,
        "entropy_weight": 0.06,
        "forward_pass": "joint",
    },
    "mean_teacher": {"unsupervised_weight": 50.0, "ramp_up": 0.4, "forward_pass": "joint"},
    "mixmatch": {
        "unsupervised_weight": 100.0,
        "ramp_up": 1 / 64,
        "temperature": 0.5,
        "augmentations": 2,
        "mixup_alpha": 0.5,
        "forward_pass": "joint",
    },
    "remixmatch": {
        "unsupervised_weight": 1.5,
        "ramp_up": 1 / 64,
        "temperature": 0.5,
        "augmentations": 8,
        "mixup_alpha": 0.75,
        "distribution_alignment": True,
        "unmixed_weight": 0.5,
        "rotation_weight": 0.5,
        "forward_pass": "joint",
    },
    "uda": {
        "confidence": 0.8,
        "temperature": 0.4,
        "unsupervised_weight": 1.0,
        "tsa": "none",
        "target_forward": "joint",
    },
    "fixmatch": {"confidence": 0.95, "unsupervised_weight": 1.0, "target_forward": "joint"},
    "supervised": {},
}
ON_BAD_EXAMPLE = ("error", "skip")
STRONG_VIEWS = (
    "rand_augment",
    "rand_augment_fixmatch",
    "auto_augment_cifar10",
    "auto_augment_svhn",
    "ctaugment",
)
# Of texts.
TEXT_VIEWS = ("tf_idf", "paraphrases")
WEIGHTINGS = ("per_example", "single", "fixed")
WEIGHT_BATCHES = ("fused", "fresh")
INFLUENCE_PARAMS = ("last_layer", "last_block", "all")
# Each method of the paper's Table A1, and the settings that are its own.
INVERSE_HESSIANS = {
    "exact": ("cg_tolerance",),  # heads too large for a direct solve take cg
    "cg": ("cg_tolerance", "cg_iterations"),
    "identity": (),
    "neumann": ("neumann_terms", "neumann_step"),
    "lissa": ("lissa_iterations", "lissa_scale", "lissa_rows"),
    "outer_product": (),
    "unrolled": ("unroll_steps", "unroll_step"),
}
CURVATURES = ("gauss_newton", "hessian")
WEIGHT_OPTIMIZERS = ("m_adam", "adam", "sgd")
HEADS = ("softmax", "binary")
OPTIMIZERS = ("sgd", "adam")
SCHEDULES = ("cosine", "half_cosine", "linear", "constant")
MODELS = ("wide_resnet", "mlp", "bert")
POOLINGS = ("pooler", "first", "mean")
KEPT_ENDS = ("right", "left")
MIXED_PRECISIONS = ("none", "bfloat16", "float16")
# Methods that mix or perturb inputs, which token ids cannot be.
_CONTINUOUS_INPUTS = ("vat", "mixmatch", "remixmatch")
# Settings of AugmentConfig, by their flags, and the strong views that they are for.
_STRONG_VIEW_SETTINGS = {
    **dict.fromkeys(
        ("rand_augment_operations", "rand_augment_probability"),
        ("rand_augment", "rand_augment_fixmatch"),
    ),
    **dict.fromkeys(
        ("ctaugment_depth", "ctaugment_threshold", "ctaugment_decay", "ctaugment_interval"),
        ("ctaugment",),
    ),
    "tf_idf_probability": ("tf_idf",),
    "paraphrases": ("paraphrases",),
}
# Methods some of whose losses are no cross-entropy of the classifier to a constant target.
_OTHER_LOSSES = ("vat", "mean_teacher", "mixmatch", "remixmatch")
TSA_SCHEDULES = ("none", "linear", "log", "exp")
NORMALIZATIONS = ("scale", "standardize")
DECAYED_VARIABLES = ("kernels", "no_norm_no_bias", "all")
TARGET_FORWARDS = FORWARD_PASSES = ("joint", "separate")
EVALUATION_BATCH_SIZE = 500
STRATEGIES = ("auto", "one_device", "mirrored", "multi_worker", "tpu")
EMA_VARIABLES = ("trainable", "all")
VALIDATION_BATCH_NORMS = ("inference", "batch")


class UserError(Exception):
    """What a user can mend; the message is one line that names the cause and the remedy.

    Attributes:
      goes_on: nothing has to be mended: the same command goes on.
    """

    goes_on = False
    ag_pass_through = True  # for AutoGraph, which puts its own type and lines of code in the place


class ConfigError(UserError, ValueError):
    """A setting or combination that cannot work. One line: the value and the remedy."""


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with `message` where the condition does not hold."""
    if not condition:
        raise ConfigError(message)


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    require(value in allowed, f"{name}={value!r} is not one of {', '.join(allowed)}.")


def _at_least(name: str, value: float, minimum: float) -> None:
    require(
        math.isfinite(value) and value >= minimum,
        f"{name}={value} is out of range: it must be at least {minimum}.",
    )


def _count(name: str, value: int, minimum: int) -> None:
    """A whole number that also fits the int32 that steps and shapes are held in."""
    _at_least(name, value, minimum)
    require(value < 2**31, f"{name}={value} is out of range: it must be below 2**31.")


def _positive(name: str, value: float) -> None:
    require(
        math.isfinite(value) and value > 0, f"{name}={value} is out of range: it must be above 0."
    )


def _between(name: str, value: float, low: float, high: float) -> None:
    require(
        low <= value <= high, f"{name}={value} is out of range: it must lie in [{low}, {high}]."
    )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which examples play which role, and how many of each are in a batch.

    Attributes:
      dataset: `name.seed@labels-validation`, for example `cifar10.1@250-1024`; a bare name takes
        the source's own default ending.
      data_dir: where prepared datasets are (None: the reader's own default).
      unlabeled_data, validation_data, test_data: sources, as in a dataset's name but without its
        ending, whose examples are joined to the dataset: as unlabeled ones, as those that
        validation examples are drawn from, and as those tested on.
      image_size: (H, W) or (side,): images are scaled so that they cover it and cut to its middle;
        () takes images as they are, all of one size.
      image_channels: 1 makes images gray, 3 colored; None takes them as they are, all alike.
      text_column, image_column, label_column: names of the columns of a table (or features of
        TFRecords) that hold a text, the path of an image, or the label.
      columns: names of a table's columns where its first line does not hold them; () where it does.
      min_text_length: in characters; shorter texts of the unlabeled part are left out (UDA's code
        leaves out unlabeled reviews below 500).
      on_bad_example: "error" ends with the name of a file or row that cannot be read; "skip" leaves
        such examples out and counts them.
      max_memory_gb: files of images are read ahead into memory if they take no more, decoded, in
        units of 2**30 bytes; else whenever they are needed.
      unlabeled_includes_labeled: the unlabeled role also holds the labeled examples (as in
        FixMatch).
      validation_overlap: labeled examples may also be validation examples (as in FixMatch).
      labeled_includes_validation: the validation examples are labeled examples too: what training
        on all known labels gives, beside which learned weights have to stand.
      known_classes: the classes of the task, by number; () takes all. Examples of the others can
        only be unlabeled ones (class-mismatched data, Oliver et al., 2018), and are tested on by
        nobody.
      unlabeled_mismatch: share of the unlabeled examples that are of no known class; None keeps
        all there are.
      unlabeled_size: how many unlabeled examples, drawn by the dataset's seed; None takes all there
        are.
      unlabeled_classes: classes that unlabeled examples may be of, by number as the data have them
        (before known_classes renumbers them); () takes all, those of unknown class included.
      balance: labeled and validation examples are drawn class by class; else from all alike.
      labeled_ids, validation_ids, unlabeled_ids: files that name the examples of a role, one id a
        line; None draws them.
      label_noise: share of the labeled examples that get a wrong label, for studies.
      labeled_batch_size, unlabeled_batch_size, validation_batch_size: B_l, B_u and B_v, in
        examples.
    """

    dataset: str = "digits.1@60-200"
    data_dir: str | None = None
    unlabeled_data: str | None = None
    validation_data: str | None = None
    test_data: str | None = None
    image_size: tuple[int, ...] = ()
    image_channels: int | None = None
    text_column: str = "text"
    image_column: str = "image"
    label_column: str = "label"
    columns: tuple[str, ...] = ()
    min_text_length: int = 0
    on_bad_example: str = "error"
    max_memory_gb: float = 4.0
    unlabeled_includes_labeled: bool = False
    validation_overlap: bool = False
    labeled_includes_validation: bool = False
    known_classes: tuple[int, ...] = ()
    unlabeled_mismatch: float | None = None
    unlabeled_size: int | None = None
    unlabeled_classes: tuple[int, ...] = ()
    balance: bool = True
    labeled_ids: str | None = None
    validation_ids: str | None = None
    unlabeled_ids: str | None = None
    label_noise: float = 0.0
    labeled_batch_size: int = 64
    unlabeled_batch_size: int = 320
    validation_batch_size: int = 320

    def __post_init__(self):
        for name in ("labeled_batch_size", "unlabeled_batch_size", "validation_batch_size"):
            _count(name, getattr(self, name), 1)
        require(
            len(self.image_size) <= 2,
            f"image_size={','.join(map(str, self.image_size))} must be a side or height,width.",
        )
        for side in self.image_size:
            _count("image_size", side, 1)
        if self.image_channels is not None:
            require(
                self.image_channels in (1, 3),
                f"image_channels={self.image_channels} must be 1 (gray) or 3 (RGB).",
            )
        _one_of("on_bad_example", self.on_bad_example, ON_BAD_EXAMPLE)
        _count("min_text_length", self.min_text_length, 0)
        _at_least("max_memory_gb", self.max_memory_gb, 0)
        _between("label_noise", self.label_noise, 0, 1)
        require(
            len(set(self.unlabeled_classes)) == len(self.unlabeled_classes)
            and min(self.unlabeled_classes, default=0) >= 0,
            f"unlabeled_classes={','.join(map(str, self.unlabeled_classes))} must name different "
            "classes by their numbers.",
        )
        require(
            not (self.unlabeled_classes and self.unlabeled_ids),
            "unlabeled_classes has no effect beside unlabeled_ids: leave one of them out.",
        )
        for column in (self.text_column, self.image_column, self.label_column, *self.columns):
            require(
                column == column.strip() != "" and "," not in column,
                f"The column {column!r} cannot be: a name without commas, nor spaces around it.",
            )
        known = self.known_classes
        require(
            not known or (len(set(known)) == len(known) >= 2 and min(known) >= 0),
            f"known_classes={','.join(map(str, known))} must name two or more different classes.",
        )
        if self.unlabeled_mismatch is not None:
            require(
                bool(known or self.unlabeled_data),
                f"unlabeled_mismatch={self.unlabeled_mismatch} is a share of the examples outside "
                "known_classes, or of other classes in unlabeled_data: name one of these.",
            )
            _between("unlabeled_mismatch", self.unlabeled_mismatch, 0, 1)
        if self.unlabeled_size is not None:
            _count("unlabeled_size", self.unlabeled_size, 1)


@dataclasses.dataclass(frozen=True)
class AugmentConfig:
    """How the weak and strong views of an image or a text are made; vectors are left as they are.

    The weak view of a text is the text.

    Attributes:
      flip: horizontal flips in the weak view; None follows the dataset (no flips for digits).
      shift: largest reflect-padded shift of the weak view in pixels; None is 1/8 of the height.
      strong: how the strong view is made. Of an image, one of STRONG_VIEWS: UDA's RandAugment or
        FixMatch's, the policies that AutoAugment found for CIFAR-10 or SVHN, or CTAugment, which
        learns how strong it may be. Of a text, one of TEXT_VIEWS: "tf_idf" replaces words that say
        little (UDA section 2.2 and appendix), "paraphrases" takes those of a file.
      operations: operations drawn per image for the strong view (RandAugment), 0 for none.
      probability: chance that a drawn operation is applied (RandAugment).
      cutout: side of the square that closes the strong view, as a fraction of the height; 0 for
        none.
      ctaugment_depth: operations drawn per image by CTAugment.
      ctaugment_threshold: a magnitude is drawn if its rate, over the highest, is at least this.
      ctaugment_decay: share of the old rate that a probe leaves.
      ctaugment_interval: steps that share one snapshot of the rates.
      tf_idf_probability: share of the words that are replaced, on average.
      paraphrases: the file of `data.paraphrases`, which experiments.back_translate writes.
      normalization: "scale" maps [0, 255] to [-1, 1]; "standardize" subtracts the training mean and
        divides by the standard deviation, channel by channel.
    """

    flip: bool | None = None
    shift: int | None = None
    strong: str = "rand_augment"
    operations: int = 2
    probability: float = 0.5
    cutout: float = 0.5
    ctaugment_depth: int = 2
    ctaugment_threshold: float = 0.8
    ctaugment_decay: float = 0.99
    ctaugment_interval: int = 100
    tf_idf_probability: float = 0.7
    paraphrases: str | None = None
    normalization: str = "scale"

    def __post_init__(self):
        if self.shift is not None:
            _count("shift", self.shift, 0)
        _one_of("strong_view", self.strong, (*STRONG_VIEWS, *TEXT_VIEWS))
        _count("rand_augment_operations", self.operations, 0)
        _between("rand_augment_probability", self.probability, 0, 1)
        _between("cutout", self.cutout, 0, 1)
        for name in ("ctaugment_depth", "ctaugment_interval"):
            _count(name, getattr(self, name), 1)
        _between("ctaugment_threshold", self.ctaugment_threshold, 0, 1)
        _between("ctaugment_decay", self.ctaugment_decay, 0, 1)
        _one_of("normalization", self.normalization, NORMALIZATIONS)
        _between("tf_idf_probability", self.tf_idf_probability, 0, 1)
        require(
            self.strong != "paraphrases" or self.paraphrases,
            "strong_view=paraphrases needs a file of them: name it by paraphrases=FILE; "
            "experiments.back_translate writes one.",
        )
        default = {field.name: field.default for field in dataclasses.fields(self)}
        for flag, views in _STRONG_VIEW_SETTINGS.items():
            name = flag.removeprefix("rand_augment_")
            value = getattr(self, name)
            require(
                self.strong in views or value == default[name],
                f"{flag}={value} has no effect with strong_view={self.strong}: leave it out, or "
                f"use strong_view={views[0]}.",
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The network: a Wide-ResNet (`depth`, `width` as in WRN-28-2), the paper's MLP, or BERT.

    Attributes:
      encoder: of bert: the folder or file of a pretrained encoder, or what third_party.bert calls
        it. Sizes and vocabulary are its own.
      pooling: of bert, the features: "pooler", tanh of a Dense layer of the first token (as
        published; new where the encoder comes without one); "first", the first token itself; or
        "mean", of all tokens.
      dropout: of bert, everywhere: embeddings, attention, after each part of a block, and features.
      sequence_length: of bert, L, tokens that a text is cut or filled up to, [CLS] and [SEP] among
        them.
      keep_end: of bert, which end of a text that is too long stays: "right" (UDA) or "left".
      lower_case: of bert, texts are put in lower case and without accents; None: as the encoder
        says.
      head: "softmax", C logits; "binary", one number f that gives the logits (f/2, -f/2) of two
        classes (the paper's appendix).
      mixed_precision: "bfloat16" and "float16" compute in half precision, with variables,
        features, logits, losses and influence in float32; "none" computes in float32. With float16
        the loss is scaled, as far as gradients allow: steps whose gradients overflow are left out.
      sync_bn: BatchNorm normalizes by the batch of all replicas; else each by its own part.
    """

    name: str = "wide_resnet"
    depth: int = 28
    width: int = 2
    filters: int = 16
    hidden_units: tuple[int, ...] = (100, 100)
    batch_norm_momentum: float = 0.999
    sync_bn: bool = False
    head: str = "softmax"
    mixed_precision: str = "none"
    encoder: str | None = None
    pooling: str = "pooler"
    dropout: float = 0.1
    sequence_length: int = 128
    keep_end: str = "right"
    lower_case: bool | None = None

    def __post_init__(self):
        _one_of("model", self.name, MODELS)
        _one_of("head", self.head, HEADS)
        _one_of("mixed_precision", self.mixed_precision, MIXED_PRECISIONS)
        require(
            not self.sync_bn or self.name == "wide_resnet",
            f"sync_bn=True has no effect with model={self.name}, which has no BatchNorm: leave it "
            "out.",
        )
        if self.name == "wide_resnet":
            require(
                self.depth >= 10 and (self.depth - 4) % 6 == 0,
                f"depth={self.depth} is not a Wide-ResNet depth: use 6n + 4 (10, 16, 22, 28, ...).",
            )
            _count("width", self.width, 1)
            _count("filters", self.filters, 1)
        elif self.name == "mlp":
            require(
                bool(self.hidden_units) and min(self.hidden_units) >= 1,
                f"hidden_units={self.hidden_units} needs at least one layer of at least one unit.",
            )
        require(
            0 <= self.batch_norm_momentum < 1,
            f"batch_norm_momentum={self.batch_norm_momentum} must lie in [0, 1).",
        )
        _one_of("pooling", self.pooling, POOLINGS)
        require(0 <= self.dropout < 1, f"dropout={self.dropout} must lie in [0, 1).")
        _count("sequence_length", self.sequence_length, 3)
        _one_of("keep_end", self.keep_end, KEPT_ENDS)
        require(
            self.name == "bert" or self.encoder is None,
            f"encoder={self.encoder} has no effect with model={self.name}: use model=bert.",
        )
        require(
            self.name != "bert" or bool(self.encoder),
            "model=bert needs a pretrained encoder: name its folder by encoder=FOLDER, or use "
            "encoder=bert_tiny or encoder=minilm (see third_party.bert).",
        )


@dataclasses.dataclass(frozen=True)
class MethodConfig:
    """The base SSL algorithm.

    A setting that is None takes the value that METHODS has for the method, see `settings`; one that
    the method does not have is refused.

    Attributes:
      name: one of METHODS. "supervised" trains on the labeled examples alone.
      confidence: tau, an unlabeled example takes part once its highest predicted probability passes
        it.
      temperature: T, the target is sharpened to softmax(log p / T); 1 leaves it.
      unsupervised_weight: w, the weight of the unlabeled loss beside the example weights.
      ramp_up: the share of the run over which the weight of the unlabeled loss grows to w linearly;
        0 for none.
      augmentations: K, views of each unlabeled example.
      mixup_alpha: MixUp draws from Beta(alpha, alpha).
      distribution_alignment: the target is corrected by the ratio of the labels' frequencies to
        those of past predictions.
      unmixed_weight: of the loss of a strong view that is not mixed.
      rotation_weight: of the loss of telling by which right angle a view was turned.
      vat_radius: length of the adversarial perturbation, in the units of the model's inputs.
      vat_probe: xi, length of the step by which its direction is sought.
      vat_iterations: of the power iteration that seeks it.
      entropy_weight: of the entropy of the predictions on unlabeled examples.
      tsa: training signal annealing of the labeled loss (UDA section 2.4).
      target_forward: how a method with a target view gets its prediction: "joint" in one forward
        pass with all other rows, as published; "separate" in a pass of its own that no gradient
        flows through.
      forward_pass: "joint": all rows with a gradient share one forward pass; "separate": one pass
        for each group of rows, of which the first alone updates BatchNorm, as published.
    """

    name: str = "uda"
    confidence: float | None = None
    temperature: float | None = None
    unsupervised_weight: float | None = None
    ramp_up: float | None = None
    augmentations: int | None = None
    mixup_alpha: float | None = None
    distribution_alignment: bool | None = None
    unmixed_weight: float | None = None
    rotation_weight: float | None = None
    vat_radius: float | None = None
    vat_probe: float | None = None
    vat_iterations: int | None = None
    entropy_weight: float | None = None
    tsa: str | None = None
    target_forward: str | None = None
    forward_pass: str | None = None

    def __post_init__(self):
        _one_of("method", self.name, tuple(METHODS))
        own = METHODS[self.name]
        for name, value in self._given().items():
            require(
                name in own,
                f"{name}={value} has no effect with method={self.name}: leave it out"
                + (f" (it has {', '.join(own)})." if own else "."),
            )
        checks = {
            ("confidence", "ramp_up"): lambda name, value: _between(name, value, 0, 1),
            ("temperature", "mixup_alpha", "vat_radius", "vat_probe"): _positive,
            (
                "unsupervised_weight",
                "unmixed_weight",
                "rotation_weight",
                "entropy_weight",
            ): lambda name, value: _at_least(name, value, 0),
            ("augmentations", "vat_iterations"): lambda name, value: _count(name, value, 1),
            ("tsa",): lambda name, value: _one_of(name, value, TSA_SCHEDULES),
            ("target_forward",): lambda name, value: _one_of(name, value, TARGET_FORWARDS),
            ("forward_pass",): lambda name, value: _one_of(name, value, FORWARD_PASSES),
        }
        for names, check in checks.items():
            for name in names:
                if getattr(self, name) is not None:
                    check(name, getattr(self, name))

    def settings(self) -> dict[str, Any]:
        """Each setting that the method has, with its value."""
        return {**METHODS[self.name], **self._given()}

    def _given(self):
        values = dataclasses.asdict(self)
        del values["name"]
        return {name: value for name, value in values.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """How theta moves.

    Attributes:
      name: "sgd" (Nesterov momentum) or "adam".
      adam_epsilon: added to the root of the second moment.
      adam_bias_correction: off in BERT's published code.
      learning_rate: alpha, before the schedule.
      schedule: after the warm-up, with p from 0 to 1 over the steps left: "cosine" is alpha cos(7
        pi p / 16) (FixMatch); "half_cosine" is alpha (1 + cos(pi p)) / 2, plus 0.4% of alpha as its
        floor (UDA's image code); "linear" is alpha times the share of all steps, the
        warm-up among them, that is left (BERT); "constant" is alpha.
      warmup_steps: over these the learning rate grows linearly from 0.
      momentum: of SGD.
      weight_decay: coupled L2, weight_decay / 2 |v|^2 in the objective for each decayed variable v.
      decoupled_weight_decay: after each step a decayed variable shrinks by this times the learning
        rate (AdamW); it is no part of the objective.
      decayed_variables: "kernels" (FixMatch); "no_norm_no_bias", all but biases and those of
        normalizations (BERT); or "all" trainable variables (UDA's image code).
      clip_norm: gradients are scaled down to this norm, all taken together; None: never.
      ema_decay: decay of the moving average of the weights that is evaluated beside them.
      ema_variables: "trainable" (FixMatch), or "all": BatchNorm statistics too (UDA).
    """

    name: str = "sgd"
    learning_rate: float = 0.03
    schedule: str = "cosine"
    warmup_steps: int = 0
    momentum: float = 0.9
    adam_epsilon: float = 1e-7
    adam_bias_correction: bool = True
    clip_norm: float | None = None
    weight_decay: float = 5e-4
    decoupled_weight_decay: float = 0.0
    decayed_variables: str = "kernels"
    ema_decay: float = 0.999
    ema_variables: str = "trainable"

    def __post_init__(self):
        _one_of("optimizer", self.name, OPTIMIZERS)
        _positive("learning_rate", self.learning_rate)
        _one_of("schedule", self.schedule, SCHEDULES)
        _count("learning_rate_warmup_steps", self.warmup_steps, 0)
        require(0 <= self.momentum < 1, f"momentum={self.momentum} must lie in [0, 1).")
        _positive("adam_epsilon", self.adam_epsilon)
        if self.clip_norm is not None:
            _positive("clip_norm", self.clip_norm)
        for name in ("weight_decay", "decoupled_weight_decay"):
            _at_least(name, getattr(self, name), 0)
        _one_of("decayed_variables", self.decayed_variables, DECAYED_VARIABLES)
        require(0 <= self.ema_decay < 1, f"ema_decay={self.ema_decay} must lie in [0, 1).")
        _one_of("ema_variables", self.ema_variables, EMA_VARIABLES)


@dataclasses.dataclass(frozen=True)
class WeightConfig:
    """How Lambda, the example weights, move (the paper's Algorithm 1).

    Attributes:
      weighting: "per_example", "single" (one shared lambda) or "fixed" (never moves).
      initial: lambda at the start.
      optimizer: what moves lambda: "m_adam", or for the paper's ablation "adam", that of Keras,
        which moves examples that are not in the batch too, or plain "sgd".
      learning_rate: eta, its step size.
      minimum, maximum: lambda is projected to this range after each update (maximum None: no
        bound).
      warmup_steps: theta steps before the first weight step.
      inner_steps: N, theta steps from one weight step to the next.
      batch: "fused" takes the batch of the current theta step, before that step; "fresh" draws
        D', U' and V' anew after N theta steps.
      damping: added to the diagonal of the Hessian, in its units, whatever inverts it.
      influence_params: which variables the influence is taken over: the last layer in closed form,
        the last block and the last layer, or all.
      inverse_hessian: one of INVERSE_HESSIANS; see `influence.inverse_hvp` for each.
      curvature: "gauss_newton" or "hessian"; over the last layer they are the same.
      cg_tolerance: relative residual at which conjugate gradients stop.
      cg_iterations: the most that conjugate gradients take; a weight step whose solve ends there
        short of the tolerance is skipped.
      neumann_terms: terms of the series.
      neumann_step: its step; None is the inverse of 1.1 times an estimate of the largest
        eigenvalue, which takes 20 products more.
      lissa_iterations: samples of the Hessian that are taken.
      lissa_scale: above the largest eigenvalue of a sample; None is twice an estimate over four
        samples, which takes 80 products more.
      lissa_rows: rows of a sample, drawn from the labeled and the unlabeled ones together.
      unroll_steps: steps of gradient descent from the present variables whose Hessians take turns
        in the series; the gradients of L_V and of each row are those of the present variables.
      unroll_step: their size; None is as for neumann_step.
      validation_batch_norm: BatchNorm on the validation batch: "inference" or "batch" statistics.
      start_from: a weights-<step>.csv of a run on the same data, whose weights the unlabeled
        examples start with; None starts all with `initial`.
    """

    weighting: str = "per_example"
    initial: float = 1.0
    optimizer: str = "m_adam"
    learning_rate: float = 0.01
    minimum: float = 0.0
    maximum: float | None = None
    warmup_steps: int = 0
    inner_steps: int = 100
    batch: str = "fused"
    damping: float = 0.01
    influence_params: str = "last_layer"
    inverse_hessian: str = "exact"
    curvature: str = "gauss_newton"
    cg_tolerance: float = 1e-6
    cg_iterations: int = 1000
    neumann_terms: int = 20
    neumann_step: float | None = None
    lissa_iterations: int = 100
    lissa_scale: float | None = None
    lissa_rows: int = 64
    unroll_steps: int = 20
    unroll_step: float | None = None
    validation_batch_norm: str = "inference"
    start_from: str | None = None

    def __post_init__(self):
        _one_of("weighting", self.weighting, WEIGHTINGS)
        require(
            self.start_from is None or self.weighting != "single",
            f"weights_from={self.start_from} has a weight for each example, and weighting=single "
            "one for all: use per_example, or fixed to leave them as they are.",
        )
        _positive("weight_lr", self.learning_rate)
        _at_least("weight_min", self.minimum, 0)
        if self.maximum is not None:
            require(
                self.maximum > self.minimum,
                f"weight_max={self.maximum} must be above weight_min={self.minimum}.",
            )
        high = math.inf if self.maximum is None else self.maximum
        require(
            self.minimum <= self.initial <= high and math.isfinite(self.initial),
            f"weight_init={self.initial} lies outside [{self.minimum}, {high}]: "
            "move it, or move weight_min and weight_max.",
        )
        _count("weight_warmup_steps", self.warmup_steps, 0)
        _count("inner_steps", self.inner_steps, 1)
        _one_of("weight_batch", self.batch, WEIGHT_BATCHES)
        _at_least("damping", self.damping, 0)
        _one_of("influence_params", self.influence_params, INFLUENCE_PARAMS)
        _one_of("inverse_hessian", self.inverse_hessian, tuple(INVERSE_HESSIANS))
        _one_of("curvature", self.curvature, CURVATURES)
        _one_of("weight_optimizer", self.optimizer, WEIGHT_OPTIMIZERS)
        _positive("cg_tolerance", self.cg_tolerance)
        for name in ("cg_iterations", "neumann_terms", "lissa_iterations", "lissa_rows"):
            _count(name, getattr(self, name), 1)
        _count("unroll_steps", self.unroll_steps, 1)
        for name in ("neumann_step", "lissa_scale", "unroll_step"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        self._refuse_what_has_no_effect()
        _one_of("validation_batch_norm", self.validation_batch_norm, VALIDATION_BATCH_NORMS)

    def _refuse_what_has_no_effect(self):
        default = {field.name: field.default for field in dataclasses.fields(self)}
        own = INVERSE_HESSIANS[self.inverse_hessian]
        for solver, names in INVERSE_HESSIANS.items():
            for name in names:
                require(
                    name in own or getattr(self, name) == default[name],
                    f"{name}={getattr(self, name)} has no effect with inverse_hessian="
                    f"{self.inverse_hessian}: leave it out, or use inverse_hessian={solver}.",
                )
        require(
            self.curvature == default["curvature"]
            or self.inverse_hessian not in ("identity", "outer_product", "lissa"),
            f"curvature={self.curvature} does not go with inverse_hessian={self.inverse_hessian}, "
            "which has a matrix of its own: leave it out.",
        )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The outer loop: length, seed, and intervals, in steps.

    Attributes:
      tensorboard: write event files beside metrics.jsonl.
      jit_compile: compile the steps with XLA; None: on GPUs. TPUs do in any case.
      rows_per_pass: the most rows that go through the network at once; more are taken in turn and
        their gradients added up, which costs a forward pass and saves memory. None: all at once.
    """

    train_steps: int = 1000
    seed: int = 1
    log_every: int = 100
    eval_every: int = 100
    checkpoint_every: int = 500
    keep_checkpoints: int = 50
    tensorboard: bool = True
    jit_compile: bool | None = None
    rows_per_pass: int | None = None

    def __post_init__(self):
        _count("train_steps", self.train_steps, 1)
        _between("seed", self.seed, 0, 2**31 - 1)
        for name in ("log_every", "eval_every", "checkpoint_every", "keep_checkpoints"):
            _count(name, getattr(self, name), 1)
        if self.rows_per_pass is not None:
            _count("rows_per_pass", self.rows_per_pass, 1)

    @property
    def evaluation_batch_size(self) -> int:
        """Examples that are evaluated at a time, unless something else is asked for."""
        return min(EVALUATION_BATCH_SIZE, self.rows_per_pass or EVALUATION_BATCH_SIZE)


@dataclasses.dataclass(frozen=True)
class DistributionConfig:
    """The devices that train a model together. A run means the same on any of them.

    Attributes:
      strategy: "one_device"; "mirrored", all GPUs of this machine, or its virtual CPUs;
        "multi_worker", those of all machines that the environment's TF_CONFIG names; "tpu"; or
        "auto", the first of tpu, multi_worker, mirrored and one_device that there is.
      tpu: name or address of a Cloud TPU, "local" for those of this machine.
      virtual_cpus: as how many devices the CPU is taken, to try replicas out without others.
      worker_timeout_s: seconds after which a worker that the others wait for is given up.
      steps_per_call: steps that the devices take before this process looks at them again; None: 1
        on CPUs, 20 elsewhere. Where a step needs Python, as with CTAugment, it is 1.
    """

    strategy: str = "auto"
    tpu: str | None = None
    virtual_cpus: int | None = None
    worker_timeout_s: int = 60
    steps_per_call: int | None = None

    def __post_init__(self):
        _one_of("strategy", self.strategy, STRATEGIES)
        require(
            self.tpu is None or self.strategy in ("auto", "tpu"),
            f"tpu={self.tpu} has no effect with strategy={self.strategy}: use strategy=tpu.",
        )
        if self.virtual_cpus is not None:
            _count("virtual_cpus", self.virtual_cpus, 1)
            require(
                self.strategy != "tpu",
                f"virtual_cpus={self.virtual_cpus} has no effect with strategy=tpu: leave it out.",
            )
        _count("worker_timeout_s", self.worker_timeout_s, 1)
        if self.steps_per_call is not None:
            _count("steps_per_call", self.steps_per_call, 1)


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that determines a run."""

    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    model: ModelConfig = ModelConfig()
    method: MethodConfig = MethodConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    weights: WeightConfig = WeightConfig()
    train: TrainConfig = TrainConfig()
    distribution: DistributionConfig = DistributionConfig()

    def __post_init__(self):
        require(
            self.method.name != "supervised" or self.weights.weighting == "fixed",
            f"method=supervised has no unlabeled loss, so weighting={self.weights.weighting} has "
            "nothing to weight: use weighting=fixed.",
        )
        require(
            self.weights.inverse_hessian != "unrolled"
            or self.method.name not in _OTHER_LOSSES
            or self.weights.weighting == "fixed",
            f"inverse_hessian=unrolled follows losses that are cross-entropies, and method="
            f"{self.method.name} has others: use another inverse_hessian.",
        )
        require(
            self.weights.curvature == WeightConfig.curvature
            or self.weights.influence_params != "last_layer",
            f"curvature={self.weights.curvature} has no effect with influence_params=last_layer, "
            "where logits are linear: leave it out.",
        )
        require(
            self.model.name != "bert" or self.method.name not in _CONTINUOUS_INPUTS,
            f"method={self.method.name} perturbs or mixes inputs, which words cannot be: with "
            "model=bert use uda, fixmatch, pseudo_label, mean_teacher or supervised.",
        )
        half = self.model.mixed_precision != "none"
        require(
            not half or self.method.name != "vat",
            f"mixed_precision={self.model.mixed_precision} is too coarse for the step by which "
            "method=vat seeks its direction: leave it out.",
        )
        require(
            not half
            or self.weights.weighting == "fixed"
            or self.weights.influence_params == "last_layer",
            f"mixed_precision={self.model.mixed_precision} is too coarse for influence_params="
            f"{self.weights.influence_params}, which differentiates the network twice: use "
            "last_layer, or leave it out.",
        )
        require(
            self.train.rows_per_pass is None
            or self.weights.influence_params == "last_layer"
            or self.weights.weighting == "fixed",
            f"rows_per_pass={self.train.rows_per_pass} saves the memory that influence_params="
            f"{self.weights.influence_params} needs: use last_layer, or leave it out.",
        )

    def replace(self, **concerns: dict[str, Any]) -> "Config":
        """A copy with fields changed, concern by concern: `config.replace(train={"seed": 2})`."""
        return dataclasses.replace(
            self,
            **{
                name: dataclasses.replace(getattr(self, name), **fields)
                for name, fields in concerns.items()
            },
        )
