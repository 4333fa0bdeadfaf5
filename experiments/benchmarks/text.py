"""Training on texts: BERT beside the Model Garden's own training code, UDA's steps, and the tokens.

    python -m experiments.benchmark --suite=text --encoder=minilm --repeats=3

The encoder is bert_tiny unless told otherwise. Token ids are noise, --sequence_length (128) to a
text and none of them padding. Tokens a second count those of the labeled examples and of both views
of the unlabeled ones, once, whatever is done with them.

- supervised: a step on the labeled batch alone; model_garden: the same by the Model Garden, its
  encoder, its BertClassifier and its AdamWeightDecay (global clip of 1, polynomial warm-up), which
  keep no moving average and no key of dropout.
- uda_joint, uda_separate: a step of UDA, with the target view in the joint pass or in a separate
  one. uda_..._bilevel has a weight step in it, and uda_..._run is the mean step of a run that has a
  weight step in every --inner_steps (5): as (N - 1) steps of the one and one of the other. With
  fixed weights each step is the first. uda_separate_bfloat16: in mixed precision.
- uda_joint_in_parts: at most --rows_per_pass (24) rows at once. Peak memory is that of a process
  that does nothing but this, or uda_joint.
- encode: texts of 1,000 characters, --unlabeled_batch_size of them, to token ids; encode_ready_made
  by the tokenizer of tensorflow_text, whose ids differ in rare cases; tf_idf_view: their strong
  view. On one core.
"""

from experiments.benchmarks import timing
from ssl_influence import config as config_lib

CASES = ("supervised", "uda", "memory_uda_joint", "memory_uda_joint_in_parts", "texts")

# Those of experiments.uda_imdb, where it differs from the shared flags.
DEFAULTS = {
    "model": "bert",
    "encoder": "bert_tiny",
    "labeled_batch_size": "8",
    "unlabeled_batch_size": "32",
    "validation_batch_size": "20",
    "confidence": "0",  # Every unlabeled example counts.
    "inner_steps": "5",
    "rows_per_pass": "24",
    "optimizer": "adam",
    "learning_rate": "2e-5",
    "schedule": "linear",
    "learning_rate_warmup_steps": "100",
    "clip_norm": "1",
    "weight_decay": "0",
    "decoupled_weight_decay": "0.01",
    "decayed_variables": "no_norm_no_bias",
    "adam_epsilon": "1e-6",
    "adam_bias_correction": "false",
}

RATIOS = {
    "supervised_over_model_garden": timing.Ratio("supervised", "model_garden"),
    "uda_bfloat16_over_float32": timing.Ratio("uda_separate_bfloat16", "uda_separate"),
    "uda_separate_over_joint": timing.Ratio("uda_separate", "uda_joint"),
    **{
        f"{row}_over_fixed_{mode}": timing.Ratio(f"uda_{mode}_{row}", f"uda_{mode}")
        for mode in config_lib.TARGET_FORWARDS
        for row in ("bilevel", "run")
    },
    "uda_in_parts_over_whole": timing.Ratio(
        "uda_joint_in_parts",
        "uda_joint",
        quantities=("median_s", "cpu_s", "peak_memory_bytes"),
    ),
    "encode_over_ready_made": timing.Ratio("encode", "encode_ready_made"),
    "tf_idf_view_over_encode": timing.Ratio("tf_idf_view", "encode"),
}


def check(config: config_lib.Config) -> None:
    """Raises ConfigError for what this suite varies itself, or what the yardstick does not have."""
    fixed = {
        "model": (config.model.name, "bert"),
        "method": (config.method.name, "uda"),
        "target_forward": (config.method.settings().get("target_forward"), "joint"),
        "mixed_precision": (config.model.mixed_precision, "none"),
        "pooling": (config.model.pooling, "pooler"),
        "head": (config.model.head, "softmax"),
        "optimizer": (config.optimizer.name, "adam"),
        "schedule": (config.optimizer.schedule, "linear"),
        "clip_norm": (config.optimizer.clip_norm, 1.0),
    }
    for name, (value, wanted) in fixed.items():
        if value != wanted:
            raise config_lib.ConfigError(
                f"{name}={value}: this suite measures {wanted}, beside what it compares it with, "
                "so leave it out."
            )
    if config.weights.weighting == "fixed":
        raise config_lib.ConfigError(
            "weighting=fixed has no weight steps to measure: use per_example or single."
        )


def measure(case: str, config: config_lib.Config, repeats: int) -> timing.Rows:
    """The rows of a case."""
    from experiments.benchmarks import text_steps

    if case == "texts":
        return text_steps.encoding(config, repeats)
    if case.startswith("memory_"):
        row = case.removeprefix("memory_")
        text_steps.uda_calls(config, (row,))[row]()
        return {row: {"peak_memory_bytes": timing.peak_memory()}}
    return {"supervised": text_steps.supervised, "uda": text_steps.uda}[case](config, repeats)
