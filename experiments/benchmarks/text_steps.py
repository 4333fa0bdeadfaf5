"""What the suite on texts runs: the library's steps, the Model Garden's, and tokenizers."""

import dataclasses
import os
import random
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
import tf_keras as keras

from experiments import encoders
from experiments.benchmarks import steps, timing
from ssl_influence import config as config_lib, training
from ssl_influence.augment import text as text_lib
from ssl_influence.data import tokens
from ssl_influence.methods import registry as methods
from ssl_influence.models import bert, registry as models

NUM_CLASSES = 2
TEXT_LENGTH = 1_000  # characters
CORPUS_SIZE = 500

UDA_ROWS = (
    *(f"uda_{mode}{step}" for mode in config_lib.TARGET_FORWARDS for step in ("", "_bilevel")),
    *("uda_separate_bfloat16", "uda_joint_in_parts"),
)


def supervised(config: config_lib.Config, repeats: int) -> timing.Rows:
    """Steps on labeled examples alone, and the Model Garden's."""
    encoder, spec = encoders.load(config.model)
    batch, _ = batches(config, spec)
    config = dataclasses.replace(
        config,
        method=config_lib.MethodConfig("supervised"),
        weights=config_lib.WeightConfig("fixed"),
        train=dataclasses.replace(config.train, rows_per_pass=None),
    )
    trainer = make_trainer(config, encoder, spec)
    plain, _ = model_garden_step(config, trainer.model, encoder.sizes, spec)
    calls = {
        "supervised": lambda: steps.wait(trainer.theta_step(batch)),
        "model_garden": lambda: steps.wait(plain(batch)),
    }
    rows = timing.interleaved(calls, repeats)
    return _with_tokens(rows, config.data.labeled_batch_size, config)


def uda(config: config_lib.Config, repeats: int) -> timing.Rows:
    """UDA_ROWS, and what steps of a run take on average."""
    rows = timing.interleaved(uda_calls(config, UDA_ROWS), repeats, warmup=1)
    every = config.weights.inner_steps
    for mode in config_lib.TARGET_FORWARDS:
        fixed, bilevel = rows[f"uda_{mode}"], rows[f"uda_{mode}_bilevel"]
        rows[f"uda_{mode}_run"] = {
            quantity: ((every - 1) * fixed[quantity] + bilevel[quantity]) / every
            for quantity in ("median_s", "cpu_s")
        }
    texts = config.data.labeled_batch_size + 2 * config.data.unlabeled_batch_size
    return _with_tokens(rows, texts, config)


def uda_calls(config: config_lib.Config, rows: Sequence[str]) -> dict[str, Callable[[], None]]:
    """Those of UDA_ROWS, each a step that returns when it has ended; one model a setting."""
    encoder, spec = encoders.load(config.model)
    batch, validation = batches(config, spec)
    trainers = {}

    def call(row):
        setting = row.removesuffix("_bilevel")
        if setting not in trainers:
            trainers[setting] = make_trainer(_uda_config(config, setting), encoder, spec)
        trainer = trainers[setting]
        if row.endswith("_bilevel"):
            return lambda: steps.wait(trainer.bilevel_step(batch, validation))
        return lambda: steps.wait(trainer.theta_step(batch))

    return {row: call(row) for row in rows}


def _uda_config(config, setting):
    mode = next(mode for mode in config_lib.TARGET_FORWARDS if mode in setting)
    return config.replace(
        method={"target_forward": mode},
        model={"mixed_precision": "bfloat16" if setting.endswith("bfloat16") else "none"},
        train={"rows_per_pass": config.train.rows_per_pass if "in_parts" in setting else None},
    )


def make_trainer(
    config: config_lib.Config, encoder: bert.Encoder, spec: tokens.TokenizerSpec
) -> training.BilevelTrainer:
    """A trainer for token ids, whose encoder is the pretrained one."""
    model = models.build(
        config.model,
        (config.model.sequence_length,),
        NUM_CLASSES,
        config.train.seed,
        encoder=encoder.sizes,
        pad_id=spec.token_id(tokens.PAD),
    )
    bert.load(model, encoder.weights)
    method = methods.build(
        config.method,
        NUM_CLASSES,
        config.train.train_steps,
        feature_size=model.outputs[0].shape[-1],
        seed=config.train.seed,
    )
    weights = training.make_example_weights(config.weights, steps.TABLE_SIZE)
    return training.BilevelTrainer(model, method, weights, config)


def model_garden_step(
    config: config_lib.Config,
    model: keras.Model,
    sizes: bert.Sizes,
    spec: tokens.TokenizerSpec,
) -> tuple[Callable, keras.Model]:
    """A training step as one writes it with tf-models-official, and the classifier that it moves.

    Args:
      config: of the run.
      model: of `bert.build`: the classifier begins with its weights.
      sizes: of its encoder.
      spec: of its texts.
    """
    from official.nlp import optimization
    from official.nlp.modeling.models import bert_classifier

    rate = config.model.dropout
    network = bert.new_encoder(sizes, rate)
    classifier = bert_classifier.BertClassifier(network, NUM_CLASSES, dropout_rate=rate)
    classifier.set_weights(
        [*bert.encoder_of(model).get_weights(), *model.get_layer("head").get_weights()]
    )
    optimizer = optimization.create_optimizer(
        config.optimizer.learning_rate, config.train.train_steps, config.optimizer.warmup_steps
    )
    pad_id = spec.token_id(tokens.PAD)

    @tf.function(jit_compile=config.train.jit_compile or None)
    def step(batch):
        ids = batch["labeled"]["inputs"]
        inputs = {
            "input_word_ids": ids,
            "input_mask": tf.cast(ids != pad_id, tf.int32),
            "input_type_ids": tf.zeros_like(ids),
        }
        with tf.GradientTape() as tape:
            logits = classifier(inputs, training=True)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(batch["labeled"]["label"], logits)
            )
        gradients = tape.gradient(loss, classifier.trainable_variables)
        optimizer.apply_gradients(zip(gradients, classifier.trainable_variables, strict=True))
        return loss

    return step, classifier


def batches(config: config_lib.Config, spec: tokens.TokenizerSpec) -> tuple[dict, dict]:
    """A training and a validation batch of token ids, drawn from all that stand for text."""
    rng = np.random.default_rng(0)
    special = [spec.token_id(token) for token in tokens.SPECIAL_TOKENS]
    ids = np.setdiff1d(np.arange(len(spec.vocabulary)), special)

    def rows(count: int, *views: str) -> dict[str, tf.Tensor]:
        shape = count, config.model.sequence_length
        return {
            **{view: tf.constant(rng.choice(ids, shape), tf.int32) for view in views},
            "label": tf.constant(rng.integers(NUM_CLASSES, size=count), tf.int32),
            "example_id": tf.constant(rng.integers(steps.TABLE_SIZE, size=count), tf.int64),
        }

    batch = {
        "labeled": rows(config.data.labeled_batch_size, "inputs"),
        "unlabeled": rows(config.data.unlabeled_batch_size, "weak", "strong"),
    }
    return batch, rows(config.data.validation_batch_size, "inputs")


def encoding(config: config_lib.Config, repeats: int) -> timing.Rows:
    """Token ids and strong views of texts of the encoder's own words, on one core."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    _, spec = encoders.load(config.model)
    count, corpus = config.data.unlabeled_batch_size, make_texts(spec, CORPUS_SIZE)
    texts, rng = tf.constant(corpus[:count]), random.Random(0)
    tokenizer = tokens.Tokenizer(spec)
    statistics = text_lib.TfIdf.of([tokenizer.words(tf.constant(corpus))])

    @tf.function
    def view(texts, seed):
        words = statistics.replace(tokenizer.words(texts), seed, config.augment.tf_idf_probability)
        return tokenizer.encode_words(words)

    encode, ready_made = tf.function(tokenizer.encode), tf.function(ready_made_encode(spec))
    rows = timing.interleaved(
        {
            "encode": lambda: steps.wait(encode(texts)),
            "encode_ready_made": lambda: steps.wait(ready_made(texts)),
            "tf_idf_view": lambda: steps.wait(
                view(texts, tf.constant([0, rng.randrange(2**31)], tf.int64))
            ),
        },
        repeats,
    )
    for row in rows.values():
        row["texts_per_s"] = len(texts) / row["median_s"]
    return rows


def make_texts(spec: tokens.TokenizerSpec, count: int) -> list[str]:
    """Texts of TEXT_LENGTH characters, words as frequent as Zipf's law has it."""
    words = [token for token in spec.vocabulary if token.isascii() and token.isalpha()]
    frequencies = 1.0 / np.arange(1, len(words) + 1)
    rng = np.random.default_rng(0)
    shape = count, TEXT_LENGTH // 2 + 1
    drawn = rng.choice(words, shape, p=frequencies / frequencies.sum())
    return [". ".join(row)[:TEXT_LENGTH] for row in drawn]


def ready_made_encode(spec: tokens.TokenizerSpec) -> Callable[[tf.Tensor], tf.Tensor]:
    """`tokens.Tokenizer.encode` with the BERT tokenizer that tensorflow_text has."""
    import tensorflow_text

    fast = tensorflow_text.FastBertTokenizer(
        list(spec.vocabulary),
        token_out_type=tf.int32,
        unknown_token=tokens.UNK,
        lower_case_nfd_strip_accents=spec.lower_case,
    )
    pad, cls, sep = (spec.token_id(token) for token in (tokens.PAD, tokens.CLS, tokens.SEP))
    room = spec.sequence_length - 2
    kept = slice(-room, None) if spec.keep_end == "right" else slice(room)

    def encode(texts):
        pieces = fast.tokenize(texts)[:, kept]
        ends = tf.ones([tf.size(texts), 1], tf.int32)
        ids = tf.concat([cls * ends, pieces, sep * ends], 1)
        return ids.to_tensor(pad, shape=[None, spec.sequence_length])

    return encode


def _with_tokens(rows, texts, config):
    for row in rows.values():
        row["tokens_per_s"] = texts * config.model.sequence_length / row["median_s"]
    return rows
