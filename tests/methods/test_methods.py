"""The base SSL algorithms against NumPy in float64, term by term, on fixed logits."""

import numpy as np
import pytest
import tensorflow as tf

from ssl_influence import config
from ssl_influence.methods import base, pseudo_label, registry, supervised, uda

CLASSES = 4
TRAIN_STEPS = 200
LABELED = np.array([[2.0, 0, 0, 0], [0, 1, -1, 3], [-2, 0.5, 0, 0], [0, 0, 0, 0], [0.3, 4, 1, 0]])
LABEL = np.array([0, 3, 0, 2, 2])
WEAK = np.array([[3.0, 0, 0.5, 0], [0, 6, 1, 1], [1, 1.2, 0, 0], [0, 0, -1, 5]])
STRONG = np.array([[1.0, 0, 2, 0], [0, 2, 0, 0.5], [0, 0, 0, 0], [3, 0, -1, 1.0]])
TRUTH = np.array([0, 2, -1, -1])
ID = np.array([11, 2**40, 7, 11])


def forward(inputs):
    """Inputs are the logits; two of their columns, the features."""
    return inputs[:, :2], inputs


def batch(dtype=tf.float32, **replace):
    views = {"weak": WEAK, "strong": STRONG, **replace}
    return {
        "labeled": {
            "inputs": tf.constant(views.pop("inputs", LABELED), dtype),
            "label": tf.constant(LABEL, tf.int32),
            "example_id": tf.range(5, dtype=tf.int64),
        },
        "unlabeled": {
            "label": tf.constant(views.pop("truth", TRUTH), tf.int32),
            "example_id": tf.constant(ID, tf.int64),
            **{name: tf.constant(view, dtype) for name, view in views.items()},
        },
    }


def np_softmax(logits):
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def np_cross_entropy(logits, label):
    return -np.log(np_softmax(logits)[np.arange(len(label)), label])


def method_of(name, **fields):
    return registry.build(config.MethodConfig(name=name, **fields), CLASSES, TRAIN_STEPS)


def run(method, data, step=0, graph=False):
    if graph:
        return tf.function(lambda data, step: method(forward, data, step))(data, tf.constant(step))
    return method(forward, data, step)


def close(actual, expected, tolerance=1e-6):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def check_labeled(output):
    close(output.supervised, np_cross_entropy(LABELED, LABEL))
    close(output.supervised_coefficient, np.full(5, 0.2))
    close(output.labeled_head.features, LABELED[:, :2])
    close(output.labeled_head.logits, LABELED)
    close(output.labeled_head.gradient, np_softmax(LABELED) - np.eye(CLASSES)[LABEL])
    close(output.metrics["train_accuracy"], np.mean(LABELED.argmax(-1) == LABEL))


@pytest.mark.parametrize("graph", [False, True])
def test_uda_matches_numpy_term_by_term(graph):
    output = run(method_of("uda", temperature=0.4, unsupervised_weight=3.0), batch(), graph=graph)
    check_labeled(output)
    weak, strong = np_softmax(WEAK), np_softmax(STRONG)
    target = weak ** (1 / 0.4)
    target /= target.sum(-1, keepdims=True)
    mask = weak.max(-1) > 0.8
    assert list(mask) == [True, True, False, True]
    loss = np.sum(target * np.log(target / strong), -1)
    close(output.unsupervised, loss)
    close(output.unsupervised_coefficient, 3.0 * mask / 4)
    np.testing.assert_array_equal(output.example_id, ID)
    close(output.unlabeled_head.features, STRONG[:, :2])
    close(output.unlabeled_head.logits, STRONG)
    close(output.unlabeled_head.gradient, strong - target)
    close(output.metrics["mask_rate"], 0.75)
    right, judged = output.metrics["pseudo_label_accuracy"]
    close(right / judged, 0.5)
    close(output.metrics["loss_unsupervised_unweighted"], np.mean(mask * loss))


@pytest.mark.parametrize("graph", [False, True])
def test_pseudo_label_matches_numpy_term_by_term(graph):
    method = method_of("pseudo_label", confidence=0.8, unsupervised_weight=0.5)
    output = run(method, batch(), graph=graph)
    check_labeled(output)
    label = WEAK.argmax(-1)
    mask = np_softmax(WEAK).max(-1) >= 0.8
    close(output.unsupervised, np_cross_entropy(WEAK, label))
    close(output.unsupervised_coefficient, 0.5 * mask / 4)
    np.testing.assert_array_equal(output.example_id, ID)
    close(output.unlabeled_head.features, WEAK[:, :2])
    close(output.unlabeled_head.logits, WEAK)
    close(output.unlabeled_head.gradient, np_softmax(WEAK) - np.eye(CLASSES)[label])
    close(
        output.metrics["loss_unsupervised_unweighted"],
        np.mean(mask * np_cross_entropy(WEAK, label)),
    )


@pytest.mark.parametrize("graph", [False, True])
def test_supervised_has_labeled_terms_and_zero_unlabeled_rows(graph):
    output = run(method_of("supervised"), {"labeled": batch()["labeled"]}, graph=graph)
    check_labeled(output)
    assert output.unsupervised.shape == output.unsupervised_coefficient.shape == (0,)
    assert output.example_id.shape == (0,) and output.example_id.dtype == tf.int64
    assert [t.shape for t in output.unlabeled_head] == [(0, 2), (0, CLASSES), (0, CLASSES)]
    assert float(tf.reduce_sum(output.unsupervised * output.unsupervised_coefficient)) == 0


def test_views_name_what_each_method_reads():
    assert uda.UDA.views == ("weak", "strong")
    assert pseudo_label.PseudoLabel.views == ("weak",)
    assert supervised.Supervised.views == ()


def linear_gradients(method, data):
    """Gradients of the objective with respect to each input of a row-wise linear model."""
    weights = tf.constant(np.random.default_rng(0).normal(size=(CLASSES, CLASSES)), tf.float64)
    labeled, unlabeled = data["labeled"]["inputs"], data["unlabeled"]
    watched = [labeled] + [unlabeled[name] for name in method.views]
    with tf.GradientTape() as tape:
        tape.watch(watched)
        linear = base.Forward(*[lambda x: (x, x @ weights)] * 2)
        output = method(linear, data, 0)
        loss = tf.reduce_sum(output.supervised * output.supervised_coefficient)
        loss += tf.reduce_sum(output.unsupervised * output.unsupervised_coefficient)
    gradients = tape.gradient(loss, watched, unconnected_gradients="zero")
    return dict(zip(("labeled",) + method.views, gradients, strict=True))


def test_uda_target_branch_carries_no_gradient():
    gradients = linear_gradients(method_of("uda", confidence=0.0), batch(tf.float64))
    assert not np.any(gradients["weak"])
    assert np.all(np.any(gradients["strong"], -1)) and np.all(np.any(gradients["labeled"], -1))


def test_uda_masked_rows_move_nothing():
    gradients = linear_gradients(method_of("uda", confidence=1.0), batch(tf.float64))
    assert not np.any(gradients["strong"]) and np.any(gradients["labeled"])


def test_pseudo_label_gradient_flows_through_its_own_view():
    gradients = linear_gradients(method_of("pseudo_label", confidence=0.0), batch(tf.float64))
    assert np.all(np.any(gradients["weak"], -1))


@pytest.mark.parametrize("name,view", [("uda", "strong"), ("pseudo_label", "weak")])
def test_head_gradient_is_the_derivative_of_the_rows_own_loss(name, view):
    data = batch(tf.float64)
    labeled, unlabeled = data["labeled"]["inputs"], data["unlabeled"][view]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([labeled, unlabeled])
        output = method_of(name)(forward, data, 0)
    close(output.labeled_head.gradient, tape.gradient(output.supervised, labeled))
    close(output.unlabeled_head.gradient, tape.gradient(output.unsupervised, unlabeled))


def test_uda_mask_is_strict_and_pseudo_label_mask_is_not():
    even = np.zeros([4, CLASSES])
    data = batch(weak=even)
    assert not np.any(run(method_of("uda", confidence=0.25), data).unsupervised_coefficient)
    output = run(method_of("pseudo_label", confidence=0.25), data)
    close(output.unsupervised_coefficient, np.full(4, 0.25))


def test_pseudo_label_confidence_zero_lets_every_row_count():
    output = run(method_of("pseudo_label", confidence=0.0), batch())
    close(output.unsupervised_coefficient, np.full(4, 0.25))
    close(output.metrics["mask_rate"], 1.0)


def test_sharpening_changes_the_target_alone():
    plain = run(method_of("uda", temperature=1.0), batch())
    sharp = run(method_of("uda", temperature=0.1), batch())
    close(plain.unsupervised_coefficient, sharp.unsupervised_coefficient)
    target = [np_softmax(STRONG) - output.unlabeled_head.gradient for output in (plain, sharp)]
    close(target[0], np_softmax(WEAK))
    close(target[1], np_softmax(WEAK / 0.1))
    for output, q in (plain, np_softmax(WEAK)), (sharp, np_softmax(WEAK / 0.1)):
        close(output.unsupervised, np.sum(q * np.log(q / np_softmax(STRONG)), -1))


def test_a_view_like_the_target_has_no_loss_and_extreme_logits_stay_finite():
    data = batch(strong=WEAK)
    close(run(method_of("uda", temperature=1.0), data).unsupervised, np.zeros(4))
    extreme = np.eye(CLASSES) * 1e4
    output = run(method_of("uda", temperature=0.01), batch(weak=extreme, strong=extreme[::-1]))
    close(output.unsupervised, np.full(4, 1e4))
    assert np.all(np.isfinite(output.unlabeled_head.gradient))


@pytest.mark.parametrize(
    "schedule,start,middle,end",
    [
        ("linear", 0.25, 0.625, 1.0),
        ("log", 0.25, 0.25 + 0.75 * (1 - np.exp(-2.5)), 0.25 + 0.75 * (1 - np.exp(-5))),
        ("exp", 0.25 + 0.75 * np.exp(-5), 0.25 + 0.75 * np.exp(-2.5), 1.0),
    ],
)
def test_tsa_thresholds_go_from_one_over_c_to_one(schedule, start, middle, end):
    in_graph = tf.function(lambda step: uda.tsa_threshold(schedule, step, 200, 4))
    for step, expected in ((0, start), (100, middle), (200, end), (300, end)):
        close(uda.tsa_threshold(schedule, step, 200, 4), expected)
        close(in_graph(tf.constant(step, tf.int64)), expected)


def test_an_unknown_tsa_schedule_is_refused():
    with pytest.raises(ValueError, match="tsa='cubic'"):
        uda.tsa_threshold("cubic", 0, 200, 4)


@pytest.mark.parametrize("step,count", [(0, 3), (100, 3), (140, 4), (200, 5)])
def test_tsa_leaves_out_labeled_rows_above_the_threshold(step, count):
    threshold = 0.25 + 0.75 * step / 200
    kept = np_softmax(LABELED)[np.arange(5), LABEL] <= threshold
    assert kept.sum() == count
    output = run(method_of("uda", tsa="linear"), batch(), step)
    close(output.supervised_coefficient, kept / max(kept.sum(), 1))
    close(output.supervised, np_cross_entropy(LABELED, LABEL))
    close(output.metrics["tsa_kept_rate"], kept.mean())


def test_tsa_with_no_row_left_gives_a_zero_loss():
    confident = np.eye(CLASSES)[LABEL] * 10
    output = run(method_of("uda", tsa="exp"), batch(inputs=confident))
    assert not np.any(output.supervised_coefficient)


def test_tsa_at_the_end_keeps_even_certain_rows():
    certain = np.eye(CLASSES)[LABEL] * 1000
    output = run(method_of("uda", tsa="linear"), batch(inputs=certain), TRAIN_STEPS)
    close(output.supervised_coefficient, np.full(5, 0.2))


@pytest.mark.parametrize("name", ["pseudo_label", "supervised"])
def test_tsa_belongs_to_uda(name):
    with pytest.raises(config.ConfigError, match="tsa='log'"):
        method_of(name, tsa="log")


def test_accuracy_of_pseudo_labels_counts_no_row_where_nothing_can_be_judged():
    for fields, truth in (({"confidence": 1.0}, TRUTH), ({"confidence": 0.0}, np.full(4, -1))):
        for name in ("uda", "pseudo_label"):
            output = run(method_of(name, **fields), batch(truth=truth))
            assert output.metrics["pseudo_label_accuracy"].numpy().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["uda", "pseudo_label", "supervised"])
def test_truth_of_unlabeled_rows_moves_metrics_alone(name):
    outputs = [run(method_of(name), batch(truth=truth)) for truth in (TRUTH, np.full(4, -1))]
    for a, b in zip(
        *(tf.nest.flatten(output._replace(metrics={})) for output in outputs), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["uda", "pseudo_label", "supervised"])
@pytest.mark.parametrize("half", [tf.float16, tf.bfloat16])
def test_losses_of_half_precision_outputs_are_float32(name, half):
    rounded = tf.nest.map_structure(
        lambda t: tf.cast(tf.cast(t, half), tf.float32) if t.dtype.is_floating else t, batch()
    )
    cast = lambda x: tuple(tf.cast(y, half) for y in forward(x))  # noqa: E731
    output = method_of(name)(cast, rounded, 0)
    expected = method_of(name)(forward, rounded, 0)
    for a, b in zip(tf.nest.flatten(output), tf.nest.flatten(expected), strict=True):
        assert a.dtype == b.dtype and a.dtype in (tf.float32, tf.int64)
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["uda", "pseudo_label", "supervised"])
def test_metrics_are_float32_whatever_the_precision_of_the_logits(name):
    metrics = run(method_of(name, **({"tsa": "log"} if name == "uda" else {})), batch(tf.float64))
    for label, metric in metrics.metrics.items():
        assert metric.shape == ((2,) if label == "pseudo_label_accuracy" else ())
        assert metric.dtype == tf.float32


@pytest.mark.parametrize("name,calls", [("uda", 13), ("pseudo_label", 9), ("supervised", 5)])
def test_labeled_rows_and_views_share_one_forward_pass(name, calls):
    seen = []

    def counting(inputs):
        seen.append(inputs.shape[0])
        return forward(inputs)

    method_of(name)(counting, batch(), 0)
    assert seen == [calls]


def counted(seen):
    """A forward that notes, call by call, the kind of the pass and its number of rows."""

    def make(kind):
        def call(inputs):
            seen.append((kind, inputs.shape[0]))
            return forward(inputs)

        return call

    return base.Forward(make("train"), make("constant"))


def test_separate_target_has_a_constant_pass_of_its_own():
    seen = []
    method_of("uda", target_forward="separate")(counted(seen), batch(), 0)
    assert seen == [("constant", 4), ("train", 9)]
    seen.clear()
    method_of("uda")(counted(seen), batch(), 0)
    assert seen == [("train", 13)]


@pytest.mark.parametrize("tsa", ["none", "linear"])
def test_joint_and_separate_target_agree_where_rows_do_not_interact(tsa):
    joint, separate = (
        method_of("uda", confidence=0.5, tsa=tsa, target_forward=mode)(counted([]), batch(), 100)
        for mode in config.TARGET_FORWARDS
    )
    for a, b in zip(*map(tf.nest.flatten, (joint, separate)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_joint_and_separate_target_have_the_same_gradients_where_rows_do_not_interact():
    fields = {"confidence": 0.0, "temperature": 0.7}
    joint, separate = (
        linear_gradients(method_of("uda", target_forward=mode, **fields), batch(tf.float64))
        for mode in config.TARGET_FORWARDS
    )
    assert separate.keys() == joint.keys()
    assert np.all(np.any(separate["strong"], -1))
    for name in joint:
        close(separate[name], joint[name], 1e-12)


@pytest.mark.parametrize("mode", config.TARGET_FORWARDS)
def test_target_of_any_method_carries_no_gradient_but_all_other_views_do(mode):
    parts = [tf.constant(np.eye(CLASSES)[:rows]) for rows in (1, 2, 3, 4)]
    plain = base.Forward(forward, forward)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(parts)
        outputs = base.forward_with_target(plain, mode, *parts)
    for index, (part, output) in enumerate(zip(parts, outputs, strict=True)):
        np.testing.assert_array_equal(output.logits, part)
        np.testing.assert_array_equal(output.features, part[:, :2])
        for tensor in output:
            assert (tape.gradient(tensor, part) is None) == (index == 1)


@pytest.mark.parametrize("name", ["pseudo_label", "supervised"])
def test_separate_target_is_refused_where_no_view_gives_the_target_alone(name):
    with pytest.raises(config.ConfigError, match="use target_forward=joint"):
        method_of(name, target_forward="separate")


@pytest.mark.parametrize("name", ["uda", "pseudo_label", "supervised"])
def test_batch_sizes_may_be_unknown_when_traced(name):
    data = batch()
    signature = tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), data)
    traced = tf.function(
        lambda data: method_of(name)(forward, data, 0), input_signature=[signature]
    )
    for a, b in zip(
        tf.nest.flatten(traced(data)), tf.nest.flatten(run(method_of(name), data)), strict=True
    ):
        close(a, b)


def test_joint_forward_takes_nested_inputs():
    parts = [{"ids": tf.fill([n, 3], n), "mask": tf.ones([n, 3])} for n in (2, 4)]

    def tokens(inputs):
        x = tf.cast(inputs["ids"], tf.float32) * inputs["mask"]
        return x, x[:, :2]

    a, b = base.joint_forward(tokens, *parts)
    close(a.features, np.full([2, 3], 2.0))
    close(b.logits, np.full([4, 2], 4.0))


def test_masked_coefficient_shares_one_over_k_b_among_the_views():
    close(
        base.masked_coefficient(3.0, tf.constant([1.0, 0, 1, 1, 0, 1])),
        np.array([1, 0, 1, 1, 0, 1]) / 2,
    )


def test_soft_cross_entropy_and_divergence_differ_by_the_targets_entropy():
    target = tf.constant(np_softmax(WEAK))
    output = base.HeadOutput(tf.constant(STRONG), tf.constant(STRONG))
    entropy = -np.sum(np_softmax(WEAK) * np.log(np_softmax(WEAK)), -1)
    ce, kl = base.cross_entropy(output, target), base.kl_divergence(output, target)
    close(ce.loss - kl.loss, entropy, 1e-12)
    close(ce.loss, -np.sum(np_softmax(WEAK) * np.log(np_softmax(STRONG)), -1), 1e-12)
    close(ce.head.gradient, np_softmax(STRONG) - np_softmax(WEAK), 1e-12)


def test_a_zero_entry_of_the_target_adds_nothing():
    target = tf.constant(np.eye(CLASSES))
    rows = base.kl_divergence(base.HeadOutput(tf.constant(STRONG), tf.constant(STRONG)), target)
    close(rows.loss, np_cross_entropy(STRONG, np.arange(CLASSES)), 1e-12)
