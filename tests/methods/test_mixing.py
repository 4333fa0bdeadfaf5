"""MixUp, MixMatch and ReMixMatch against NumPy on fixed logits, with the draws as they fell."""

import numpy as np
import pytest
import tensorflow as tf

from ssl_influence import config
from ssl_influence.methods import base, mixing, remixmatch
from tests.methods.reference import (
    CLASSES,
    ID,
    LABEL,
    LABELED,
    PLAIN,
    STRONG,
    TRAIN_STEPS,
    TRUTH,
    WEAK,
    batch,
    close,
    forward,
    method_of,
    np_softmax,
    run,
    tensors,
)

SEED = 3  # that of `method_of`


def np_sharpen(p, temperature):
    powers = p ** (1 / temperature)
    return powers / powers.sum(-1, keepdims=True)


def np_mixed(groups, alpha, step):
    """Each group mixed by the draws of a step."""
    rows = np.concatenate(groups)
    partner, ratio = (t.numpy() for t in mixing.draw(len(rows), alpha, SEED, step))
    ratio = ratio[:, np.newaxis].astype(np.float64)
    return ratio * rows + (1 - ratio) * rows[partner]


def jacobians(p):
    return np.stack([np.diag(row) - np.outer(row, row) for row in p])


@pytest.mark.parametrize("alpha", [0.1, 0.75, 5.0])
def test_draws_are_permutations_and_ratios_of_the_beta_distribution(alpha):
    partner, ratio = mixing.draw(20_000, alpha, seed=1, step=7)
    assert sorted(partner.numpy()) == list(range(20_000))
    assert np.all((ratio >= 0.5) & (ratio <= 1))
    # Var(beta) = 1 / (4 (2 alpha + 1)), and (ratio - 1/2)^2 is (beta - 1/2)^2.
    assert np.mean((ratio - 0.5) ** 2) == pytest.approx(0.25 / (2 * alpha + 1), rel=0.03)
    # All moments, by the distribution function at each tenth, which NumPy's own draws give too.
    beta = np.random.default_rng(0).beta(alpha, alpha, 20_000)
    tenths = np.linspace(0.1, 0.9, 9)
    expected = np.quantile(np.maximum(beta, 1 - beta), tenths)
    close(np.quantile(ratio, tenths), expected, 0.02)
    other = mixing.draw(20_000, alpha, seed=1, step=8)
    assert np.any(other.partner != partner) and np.any(other.ratio != ratio)
    again = mixing.draw(20_000, alpha, seed=1, step=tf.constant(7, tf.int64))
    np.testing.assert_array_equal(again.ratio, ratio)
    assert np.any(mixing.draw(20_000, alpha, seed=2, step=7).ratio != ratio)


def test_draws_compile_with_xla():
    # Which makes other numbers of the same random bits.
    compiled = tf.function(lambda step: mixing.draw(500, 0.75, 1, step), jit_compile=True)
    partner, ratio = compiled(tf.constant(5))
    np.testing.assert_array_equal(partner, mixing.draw(500, 0.75, 1, 5).partner)
    assert np.mean((ratio - 0.5) ** 2) == pytest.approx(0.1, rel=0.2)
    uniform = tf.linspace(0.0, 1.0, 9)
    inverse = tf.function(lambda u: mixing.mixing_ratio(u, 0.75), jit_compile=True)
    close(inverse(uniform), mixing.mixing_ratio(uniform, 0.75), 1e-5)


def test_mixing_keeps_groups_nests_and_sums_and_undoes():
    rng = np.random.default_rng(0)
    groups = [{"a": rng.normal(size=[n, 2, 3]), "b": rng.normal(size=[n, 4])} for n in (3, 5, 5)]
    targets = [np_softmax(rng.normal(size=[n, CLASSES])) for n in (3, 5, 5)]
    groups = tf.nest.map_structure(tf.constant, groups)
    mixed = mixing.mix(groups, [tf.constant(t) for t in targets], 0.75, SEED, 2)
    assert [part["a"].shape for part in mixed.inputs] == [(3, 2, 3), (5, 2, 3), (5, 2, 3)]
    close(np.concatenate([t.numpy() for t in mixed.targets]), np_mixed(targets, 0.75, 2), 1e-7)
    for name in ("a", "b"):
        rows = [group[name].numpy().reshape(len(group[name]), -1) for group in groups]
        found = [part[name].numpy().reshape(len(part[name]), -1) for part in mixed.inputs]
        close(np.concatenate(found), np_mixed(rows, 0.75, 2), 1e-7)
    # From the mixed rows and the draws the rows come back: M = diag(b') + diag(1 - b') P.
    partner, ratio = mixing.draw(13, 0.75, SEED, 2)
    matrix = np.diag(ratio.numpy()) + np.diag(1 - ratio.numpy()) @ np.eye(13)[partner.numpy()]
    back = np.linalg.solve(matrix, np.concatenate([t.numpy() for t in mixed.targets]))
    close(back, np.concatenate(targets), 1e-5)


def test_whole_numbers_cannot_be_mixed():
    tokens = tf.zeros([2, 3], tf.int32)
    with pytest.raises(config.ConfigError, match="dtype int32 cannot be mixed"):
        mixing.mix([tokens], [tf.ones([2, 2]) / 2], 0.75, 0, 0)


@pytest.mark.parametrize("count,size", [(3, 7), (3, 9), (1, 4), (9, 4)])
def test_interleaving_shares_the_first_group_out_and_is_its_own_inverse(count, size):
    groups = [tf.range(g * 100, g * 100 + size) for g in range(count)]
    shared = mixing.interleave(groups)
    for before, after in zip(groups, mixing.interleave(shared), strict=True):
        np.testing.assert_array_equal(before, after)
    origin = shared[0].numpy() // 100
    np.testing.assert_array_equal(np.sort(shared[0].numpy() % 100), np.arange(size))
    np.testing.assert_array_equal(origin, np.arange(size) % count)
    assert sorted(np.concatenate(shared)) == sorted(np.concatenate(groups))


def test_interleaving_takes_groups_of_one_size_alone():
    with pytest.raises(config.ConfigError, match=r"\[5, 4, 4\].*or forward_pass=joint"):
        run(method_of("mixmatch", forward_pass="separate"), batch())


@pytest.mark.parametrize("name", ["mixmatch", "remixmatch"])
def test_interleaved_and_joint_passes_agree_where_rows_do_not_interact(name):
    fields = {"rotation_weight": 0.0, "augmentations": 2} if name == "remixmatch" else {}
    data = batch(strong_2=STRONG[::-1])
    data["labeled"] = {key: value[:4] for key, value in data["labeled"].items()}
    joint, separate = (
        run(method_of(name, forward_pass=mode, **fields), data) for mode in config.FORWARD_PASSES
    )
    for a, b in zip(tensors(joint), tensors(separate), strict=True):
        close(a, b)


def test_interleaved_passes_let_the_first_group_alone_update_batch_norm():
    seen = []

    def note(kind):
        return lambda x: (seen.append((kind, len(x))), forward(x))[1]

    data = batch()
    data["labeled"] = {key: value[:4] for key, value in data["labeled"].items()}
    method = method_of("mixmatch", forward_pass="separate")
    method(base.Forward(*map(note, base.Forward._fields)), data, 0)
    assert seen == [("constant", 8), ("train", 4), ("still", 4), ("still", 4)]


@pytest.mark.parametrize("graph", [False, True])
def test_mixmatch_matches_numpy_term_by_term(graph):
    method = method_of("mixmatch", temperature=0.5, mixup_alpha=0.75, unsupervised_weight=75.0)
    output = run(method, batch(), 40, graph=graph)
    guess = np_sharpen((np_softmax(WEAK) + np_softmax(STRONG)) / 2, 0.5)
    logits = np_mixed([LABELED, WEAK, STRONG], 0.75, 40)
    target = np_mixed([np.eye(CLASSES)[LABEL], guess, guess], 0.75, 40)
    p = np_softmax(logits)
    close(output.supervised, -np.sum(target[:5] * np.log(p[:5]), -1))
    close(output.supervised_coefficient, np.full(5, 0.2))
    close(output.labeled_head.gradient, p[:5] - target[:5])
    p, target = p[5:], target[5:]
    close(output.unsupervised, np.mean((p - target) ** 2, -1))
    close(output.unsupervised_coefficient, np.full(8, 75.0 / 8))
    np.testing.assert_array_equal(output.example_id, np.tile(ID, 2))
    head = output.unlabeled_head
    close(head.logits, logits[5:])
    close(head.gradient, 2 / CLASSES * np.einsum("ifc,ic->if", jacobians(p), p - target))
    close(head.brier, np.full(8, 2 / CLASSES))
    right, judged = output.metrics["pseudo_label_accuracy"]
    known = TRUTH >= 0
    close([right, judged], [2 * np.sum(guess.argmax(-1)[known] == TRUTH[known]), 2 * known.sum()])


def test_targets_of_mixmatch_carry_no_gradient():
    weights = tf.Variable(np.eye(CLASSES))
    linear = base.Forward(*[lambda x: (x, x @ weights)] * 4)
    with tf.GradientTape() as tape:
        output = method_of("mixmatch")(linear, batch(tf.float64), TRAIN_STEPS)
        loss = tf.reduce_sum(output.unsupervised)
    head = output.unlabeled_head
    close(tape.gradient(loss, weights), tf.transpose(head.features) @ head.gradient, 1e-10)


def images(seed=0, rows=5):
    """Small images, and a model on their mean and corners."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=[rows, 2, 2, 1]).astype(np.float32)


PROJECTION = np.random.default_rng(9).normal(size=[4, CLASSES]).astype(np.float32)


def of_images(x):
    features = tf.reshape(x, [-1, 4])
    return features[:, :2], features @ PROJECTION


def image_batch():
    data = batch()
    data["labeled"]["inputs"] = tf.constant(images(1))
    for index, name in enumerate(("weak", "strong", "strong_2")):
        data["unlabeled"][name] = tf.constant(images(2 + index, rows=4))
    return data


def of_numpy(x):
    return np_softmax(x.reshape(len(x), 4).astype(np.float64) @ PROJECTION)


@pytest.mark.parametrize("graph", [False, True])
def test_remixmatch_matches_numpy_term_by_term(graph):
    method = method_of("remixmatch", augmentations=2, ramp_up=0.5)
    rng = np.random.default_rng(4)
    history = np_softmax(rng.normal(size=[2, remixmatch.HISTORY, CLASSES])).astype(np.float32)
    for variable, value in zip(method._frequencies, history, strict=True):
        variable.assign(value)
    data, step = image_batch(), 25
    passes = base.Forward(*[of_images] * 4)

    def call(data):
        return method(passes, data, step)

    output = (tf.function(call) if graph else call)(data)
    views = [data["unlabeled"][name].numpy() for name in ("weak", "strong", "strong_2")]
    labels, predictions = history.astype(np.float64).mean(1)
    aligned = of_numpy(views[0]) * (1e-6 + labels) / (1e-6 + predictions)
    guess = np_sharpen(aligned / aligned.sum(-1, keepdims=True), 0.5)

    inputs = [data["labeled"]["inputs"].numpy(), *views]
    mixed = np_mixed([x.reshape(len(x), 4) for x in inputs], 0.75, step)
    target = np_mixed([np.eye(CLASSES)[LABEL], guess, guess, guess], 0.75, step)
    p = of_numpy(mixed)
    close(output.supervised, -np.sum(target[:5] * np.log(p[:5]), -1), 1e-5)
    of_mixed = -np.sum(target[5:] * np.log(p[5:]), -1)
    unmixed = of_numpy(views[1])
    of_unmixed = -np.sum(guess * np.log(unmixed), -1)
    turned = np.stack([np.rot90(image, r % 4) for r, image in enumerate(views[1])])
    kernel = method.rotation_head.kernel.numpy().astype(np.float64)
    of_rotation = -np.log(np_softmax(turned.reshape(4, 4)[:, :2] @ kernel)[range(4), range(4)])
    for name, rows in ("mixed", of_mixed), ("unmixed", of_unmixed), ("rotation", of_rotation):
        close(output.terms[name], rows, 1e-5)
    close(output.unsupervised, np.concatenate([of_mixed, of_unmixed, of_rotation]), 1e-5)
    # A quarter of the ramp, which the rotation does not have.
    coefficients = [1.5 * 0.25 / 12] * 12 + [0.5 * 0.25 / 4] * 4 + [0.5 / 4] * 4
    close(output.unsupervised_coefficient, coefficients)
    np.testing.assert_array_equal(output.example_id, np.tile(ID, 5))
    head = output.unlabeled_head
    gradient = np.concatenate([p[5:] - target[5:], unmixed - guess, np.zeros([4, CLASSES])])
    close(head.gradient, gradient, 1e-5)
    close(head.cross_entropy, np.repeat([1.0, 0.0], [16, 4]))
    assert head.brier is None and head.exact
    close(output.observation.labels, np.eye(CLASSES)[LABEL].mean(0))
    close(output.observation.predictions, of_numpy(views[0]).mean(0))


def test_class_frequencies_are_of_the_last_128_batches_and_move_in_observe_alone():
    method = method_of("remixmatch", rotation_weight=0.0, augmentations=1)
    assert not method.trainable_variables
    before = [v.numpy() for v in method.variables]
    run(method, batch())
    for variable, value in zip(method.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    rng = np.random.default_rng(0)
    seen = np_softmax(rng.normal(size=[150, 2, CLASSES])).astype(np.float32)
    observe = tf.function(method.observe)
    for labels, predictions in seen:
        observe(remixmatch.Observation(tf.constant(labels), tf.constant(predictions)))
    for index, history in enumerate(method._frequencies):
        close(tf.reduce_mean(history, 0), seen[-remixmatch.HISTORY :, index].mean(0))


def test_without_alignment_targets_are_the_sharpened_predictions():
    fields = {"rotation_weight": 0.0, "augmentations": 1, "temperature": 0.5}
    data = batch()
    plain = run(method_of("remixmatch", distribution_alignment=False, **fields), data)
    aligned = run(method_of("remixmatch", **fields), data)  # even frequencies change nothing
    close(plain.terms["unmixed"], aligned.terms["unmixed"])
    guess = np_sharpen(np_softmax(WEAK), 0.5)
    close(plain.terms["unmixed"], -np.sum(guess * np.log(np_softmax(STRONG)), -1))


def test_rotation_turns_by_place_and_refuses_what_cannot_be_turned():
    x = images(rows=6)
    turned, angle = remixmatch.rotate(tf.constant(x))
    np.testing.assert_array_equal(angle, [0, 1, 2, 3, 0, 1])
    for image, original, r in zip(turned.numpy(), x, angle.numpy(), strict=True):
        np.testing.assert_array_equal(image, np.rot90(original, r))
    for shape in ([4, 3], [4, 2, 3, 1]):
        with pytest.raises(config.ConfigError, match="use rotation_weight=0"):
            remixmatch.rotate(tf.zeros(shape))


def test_rotation_head_learns_and_the_classifiers_head_has_no_part_in_it():
    method = method_of("remixmatch", augmentations=2)
    classifier = tf.Variable(PROJECTION)

    def model(x):
        features = tf.reshape(x, [-1, 4])
        return features[:, :2], features @ classifier

    with tf.GradientTape(persistent=True) as tape:
        output = method(base.Forward(*[model] * 4), image_batch(), 0)
    rotation = output.terms["rotation"]
    assert all(np.any(g) for g in tape.gradient(rotation, method.trainable_variables))
    assert tape.gradient(rotation, classifier) is None
    assert {v.name for v in method.trainable_variables} == {"kernel:0", "bias:0"}
    assert PLAIN(tf.zeros([1, 3]))[1].shape == (1, 3)
