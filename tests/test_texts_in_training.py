"""Every method that texts go with trains on them, resumes, and sees the texts it should."""

import numpy as np
import pytest
import tensorflow as tf

from experiments import encoders, launch
from ssl_influence import config as config_lib, outer_loop
from ssl_influence.data import paraphrases, pipeline as pipeline_lib, sources
from tests.experiments import text_encoder
from tests.experiments.processes import assert_same_contents, contents

pytest.importorskip("tensorflow_text")
pytest.importorskip("official.nlp")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Of a run on the texts, whose paraphrases are named in any case."""
    folder = tmp_path_factory.mktemp("texts")
    encoder = text_encoder.write_encoder(folder / "encoder", num_layers=1)
    table = text_encoder.write_texts(folder / "texts.tsv")
    texts = sources.load(sources.parse_name(f"tsv:{table}.1@20-20"), config_lib.DataConfig()).inputs
    rows = (
        paraphrases.row(i, text, f"paraphrase {k} of {text[:40]}" if text.strip() else "")
        for i, text in enumerate(texts)
        for k in range(2)
    )
    (folder / "paraphrases.tsv").write_text(paraphrases.HEADER + "".join(rows), encoding="utf-8")
    return config_lib.Config().replace(
        data={
            "dataset": f"tsv:{table}.1@20-20",
            "labeled_batch_size": 4,
            "unlabeled_batch_size": 8,
            "validation_batch_size": 20,
        },
        augment={"strong": "paraphrases", "paraphrases": str(folder / "paraphrases.tsv")},
        model={"name": "bert", "encoder": str(encoder), "sequence_length": 12},
        optimizer={"name": "adam", "learning_rate": 1e-3, "ema_decay": 0.9},
        weights={"warmup_steps": 1, "inner_steps": 2},
        train={
            "train_steps": 8,
            "log_every": 4,
            "eval_every": 8,
            "checkpoint_every": 4,
            "tensorboard": False,
        },
    )


def of_method(config, name, weighting, strong):
    method = {"name": name}
    # Short runs: no ramp, and a mask that lets rows count from the start.
    method |= {"ramp_up": 0.0} if "ramp_up" in config_lib.METHODS[name] else {}
    method |= {"confidence": 0.3} if "confidence" in config_lib.METHODS[name] else {}
    augment = {} if strong == "paraphrases" else {"strong": strong, "paraphrases": None}
    return config.replace(method=method, weights={"weighting": weighting}, augment=augment)


def train(built, model_dir):
    outer_loop.train(
        built.trainer,
        built.pipeline,
        model_dir,
        built.config.train,
        weight_ids=built.split.unlabeled,
    )


def cut_back(model_dir):
    """Leaves what a kill after the first checkpoint leaves."""
    for name in ("checkpoint", *(f.name for f in (model_dir / "checkpoints").glob("ckpt-8.*"))):
        (model_dir / "checkpoints" / name).unlink()


@pytest.mark.parametrize(
    "name, weighting, strong",
    [
        ("uda", "per_example", "tf_idf"),
        ("fixmatch", "single", "paraphrases"),
        ("pseudo_label", "fixed", "tf_idf"),
        ("mean_teacher", "fixed", "paraphrases"),
        ("supervised", "fixed", "tf_idf"),
    ],
)
def test_trains_on_texts_and_resumes_bit_for_bit(config, name, weighting, strong, tmp_path):
    config = of_method(config, name, weighting, strong)
    built = launch.build(config)
    start = [v.numpy() for v in built.trainer.model.trainable_variables]
    train(built, tmp_path)
    assert all(
        np.any(v.numpy() != value)
        for v, value in zip(built.trainer.model.trainable_variables, start, strict=True)
        if "position" not in v.name
    )
    moved = np.mean(built.trainer.example_weights.values()[built.split.unlabeled] != 1)
    expected = {"fixed": lambda: moved == 0, "single": lambda: moved == 1}
    assert expected.get(weighting, lambda: 0 < moved < 1)()
    whole = contents(tmp_path, step=8)
    assert [row["step"] for row in whole[1]] == [4, 8]
    assert all(np.isfinite(value) for row in whole[1] for value in row.values())
    cut_back(tmp_path)
    # The variables stand at step 8: what the checkpoint lacks would stay there.
    train(built, tmp_path)
    assert_same_contents(whole, contents(tmp_path, step=8))


@pytest.mark.parametrize("strong", config_lib.TEXT_VIEWS)
def test_views_labels_and_ids_are_those_of_the_texts(config, strong):
    config = of_method(config, "uda", "fixed", strong)
    source, split, *_ = launch.load_data(config)
    _, tokenizer = encoders.load(config.model)

    def pipeline():
        return pipeline_lib.Pipeline(
            source,
            split,
            config.data,
            config.augment,
            seed=1,
            views=("weak", "strong"),
            tokenizer=tokenizer,
        )

    first, again, differ = pipeline(), pipeline(), []
    encode = first.spec.built_tokenizer.encode
    for step in (3, 40, 3):
        batch = first.train_batch(step)
        for role, view in (("labeled", "inputs"), ("unlabeled", "weak")):
            ids = batch[role]["example_id"].numpy()
            assert set(ids) <= set(getattr(split, role))
            np.testing.assert_array_equal(batch[role][view], encode(source.inputs[ids]))
            np.testing.assert_array_equal(batch[role]["label"], source.labels[ids])
        differ.append(np.any(batch["unlabeled"]["strong"] != batch["unlabeled"]["weak"], 1))
    assert np.mean(differ) > 0.5
    tf.nest.map_structure(np.testing.assert_array_equal, batch, again.train_batch(3))


def test_what_does_not_go_with_texts_or_with_images_is_refused_in_one_line(config):
    digits = {"dataset": "digits.1@20-20"}
    cases = {
        "strong_view=rand_augment is for images": lambda: config.replace(
            augment={"strong": "rand_augment", "paraphrases": None}
        ),
        "strong_view=tf_idf is for texts": lambda: config_lib.Config().replace(
            data=digits, augment={"strong": "tf_idf"}, model={"name": "mlp"}
        ),
        "strong_view=tf_idf is for texts, and two_moons holds vectors: leave": lambda: (
            config_lib.Config().replace(
                data={"dataset": "two_moons.1@10-30"},
                augment={"strong": "tf_idf"},
                model={"name": "mlp"},
            )
        ),
        "which only model=bert takes": lambda: config.replace(
            model={"name": "mlp", "encoder": None}
        ),
        "and model=bert takes texts": lambda: config.replace(data=digits),
        "method=vat perturbs or mixes": lambda: config.replace(method={"name": "vat"}),
        "mixed_precision=bfloat16 is too coarse for the step": lambda: config_lib.Config().replace(
            method={"name": "vat"}, model={"mixed_precision": "bfloat16"}
        ),
        "mixed_precision=bfloat16 is too coarse for influence_params=all": lambda: config.replace(
            weights={"influence_params": "all", "weighting": "per_example"},
            model={"mixed_precision": "bfloat16"},
        ),
        "method=mixmatch perturbs or mixes": lambda: config.replace(method={"name": "mixmatch"}),
        "model=bert needs a pretrained encoder.* encoder=FOLDER": lambda: config.replace(
            model={"encoder": None}
        ),
        "has no effect with model=wide_resnet": lambda: config.replace(
            model={"name": "wide_resnet"}
        ),
        "sequence_length=41 is more than the 40 positions": lambda: config.replace(
            model={"sequence_length": 41}
        ),
        "strong_view=paraphrases needs a file.* paraphrases=FILE": lambda: config.replace(
            augment={"paraphrases": None}
        ),
        "paraphrases=.* has no effect with strong_view=tf_idf": lambda: config.replace(
            augment={"strong": "tf_idf"}
        ),
    }
    for says, make in cases.items():
        with pytest.raises(config_lib.ConfigError, match=says) as refused:
            launch.build(make())
        assert "\n" not in str(refused.value)


def test_a_file_of_paraphrases_that_does_not_fit_is_refused(config, tmp_path):
    with open(config.augment.paraphrases, encoding="utf-8") as file:
        header, *lines = file.readlines()
    of_100 = [line for line in lines if line.startswith("100\t")]
    files = {
        "has no row for 1 of the .* such as example 100": [x for x in lines if x not in of_100],
        "text_sha256 is .* for the text of example 0": [
            lines[0].replace("\t", "\t0", 1),
            *lines[1:],
        ],
        "there is no example 120, only 0 to 119": [*lines, lines[-1].replace("119", "120", 1)],
    }
    for i, (says, rows) in enumerate(files.items()):
        path = tmp_path / f"{i}.tsv"
        path.write_text(header + "".join(rows), encoding="utf-8")
        with pytest.raises(config_lib.ConfigError, match=says) as refused:
            launch.build(config.replace(augment={"paraphrases": str(path)}))
        assert "\n" not in str(refused.value) and str(path) in str(refused.value)


def test_odd_texts_give_token_ids_and_finite_probabilities(config):
    built = launch.build(config)
    spec = built.pipeline.spec
    ids = dict(
        zip(
            text_encoder.ODD_TEXTS,
            spec.normalize(tf.constant(list(text_encoder.ODD_TEXTS.values()))).numpy(),
            strict=True,
        )
    )
    pad, unknown, first, end = map(spec.tokenizer.token_id, ("[PAD]", "[UNK]", "[CLS]", "[SEP]"))
    nothing = [first, end, *[pad] * 10]
    assert ids["empty"].tolist() == ids["spaces"].tolist() == nothing
    assert ids["long word"].tolist() == [first, unknown, end, *[pad] * 9]
    assert pad not in ids["long"] and ids["long"][-1] == end and unknown not in ids["long"]
    logits = built.trainer.model(np.stack(list(ids.values())), training=False)[1]
    assert np.isfinite(logits).all() and len(np.unique(logits, axis=0)) > 5
