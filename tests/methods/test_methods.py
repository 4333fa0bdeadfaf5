"""The base SSL algorithms against NumPy in float64, term by term, on fixed logits."""

import numpy as np
import pytest
import tensorflow as tf

from ssl_influence import config
from ssl_influence.config import FORWARD_PASSES
from ssl_influence.methods import base, uda
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
    check_labeled,
    close,
    forward,
    method_of,
    np_cross_entropy,
    np_softmax,
    run,
    tensors,
)

NAMES = tuple(config.METHODS)
# Those whose losses of a row depend on that row and nothing drawn at random.
ROWWISE = ("uda", "pseudo_label", "supervised", "fixmatch", "mean_teacher")


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
    mask = np_softmax(WEAK).max(-1) > 0.8
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
    assert [t.shape for t in output.unlabeled_head[:3]] == [(0, 2), (0, CLASSES), (0, CLASSES)]
    assert float(tf.reduce_sum(output.unsupervised * output.unsupervised_coefficient)) == 0


@pytest.mark.parametrize("graph", [False, True])
def test_fixmatch_matches_numpy_term_by_term(graph):
    output = run(
        method_of("fixmatch", confidence=0.8, unsupervised_weight=2.0), batch(), graph=graph
    )
    check_labeled(output)
    label = WEAK.argmax(-1)
    mask = np_softmax(WEAK).max(-1) >= 0.8
    assert 0 < mask.sum() < 4
    loss = np_cross_entropy(STRONG, label)
    close(output.unsupervised, loss)
    close(output.unsupervised_coefficient, 2.0 * mask / 4)
    np.testing.assert_array_equal(output.example_id, ID)
    close(output.unlabeled_head.features, STRONG[:, :2])
    close(output.unlabeled_head.gradient, np_softmax(STRONG) - np.eye(CLASSES)[label])
    close(output.metrics["loss_unsupervised_unweighted"], np.mean(mask * loss))


@pytest.mark.parametrize("graph", [False, True])
def test_mean_teacher_matches_numpy_term_by_term(graph):
    method = method_of("mean_teacher", unsupervised_weight=8.0, ramp_up=0.5)
    output = run(method, batch(), TRAIN_STEPS // 4, graph=graph)
    check_labeled(output)
    p, q = np_softmax(STRONG), np_softmax(WEAK)  # student's and teacher's
    close(output.unsupervised, np.mean((p - q) ** 2, -1))
    close(output.unsupervised_coefficient, np.full(4, 8.0 / 2 / 4))  # half of the ramp
    head = output.unlabeled_head
    close(head.logits, STRONG)
    jacobian = np.stack([np.diag(row) - np.outer(row, row) for row in p])
    close(head.gradient, 2 / CLASSES * np.einsum("ifc,ic->if", jacobian, p - q))
    close(head.cross_entropy, np.zeros(4))
    close(head.brier, np.full(4, 2 / CLASSES))
    assert not head.exact and output.labeled_head.exact


def test_teacher_gives_the_target_of_mean_teacher():
    seen = []
    method_of("mean_teacher")(counted(seen), batch(), 0)
    assert seen == [("teacher", 4), ("train", 9)]


def test_views_name_what_each_method_reads():
    read = {name: method_of(name).views for name in NAMES}
    strong = ("strong", *(f"strong_{k}" for k in range(2, 9)))
    assert read == {
        "supervised": (),
        "pseudo_label": ("weak",),
        "vat": ("weak",),
        "mean_teacher": ("weak", "weak_2"),
        "mixmatch": ("weak", "weak_2"),
        "remixmatch": ("weak", *strong),
        "uda": ("weak", "strong"),
        "fixmatch": ("weak", "strong"),
    }


@pytest.mark.parametrize("name", [name for name in NAMES if "ramp_up" in config.METHODS[name]])
def test_the_weight_of_the_unlabeled_loss_grows_linearly_and_then_stays(name):
    def coefficient(step, ramp_up):
        fields = {"entropy_weight": 0.0} if name == "vat" else {}
        fields |= {"confidence": 0.0} if name == "pseudo_label" else {}
        if name == "remixmatch":
            fields = {"unmixed_weight": 0.0, "rotation_weight": 0.0, "augmentations": 1}
        output = run(method_of(name, ramp_up=ramp_up, **fields), batch(), step)
        return float(tf.reduce_sum(output.unsupervised_coefficient))

    full = coefficient(0, 0.0)
    assert full == pytest.approx(config.METHODS[name]["unsupervised_weight"], rel=1e-5)
    shares = [coefficient(step, 0.5) / full for step in (0, 25, 100, 150, TRAIN_STEPS)]
    close(shares, [0, 0.25, 1, 1, 1])


def linear_gradients(method, data):
    """Gradients of the objective with respect to each input of a row-wise linear model."""
    weights = tf.constant(np.random.default_rng(0).normal(size=(CLASSES, CLASSES)), tf.float64)
    labeled, unlabeled = data["labeled"]["inputs"], data["unlabeled"]
    watched = [labeled] + [unlabeled[name] for name in method.views]
    with tf.GradientTape() as tape:
        tape.watch(watched)
        linear = base.Forward(*[lambda x: (x, x @ weights)] * 4)
        output = method(linear, data, TRAIN_STEPS)
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


@pytest.mark.parametrize(
    "name,view",
    [
        ("uda", "strong"),
        ("pseudo_label", "weak"),
        ("fixmatch", "strong"),
        ("mean_teacher", "weak_2"),
    ],
)
def test_head_gradient_is_the_derivative_of_the_rows_own_loss(name, view):
    data = batch(tf.float64)
    labeled, unlabeled = data["labeled"]["inputs"], data["unlabeled"][view]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([labeled, unlabeled])
        output = method_of(name)(PLAIN, data, TRAIN_STEPS)
    close(output.labeled_head.gradient, tape.gradient(output.supervised, labeled))
    close(output.unlabeled_head.gradient, tape.gradient(output.unsupervised, unlabeled))


@pytest.mark.parametrize("name,counts", [("uda", 0), ("pseudo_label", 0), ("fixmatch", 1)])
def test_mask_at_the_threshold_itself_is_as_published(name, counts):
    output = run(method_of(name, confidence=0.25), batch(weak=np.zeros([4, CLASSES])))
    close(output.unsupervised_coefficient, np.full(4, counts / 4))


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
    output = run(method_of("uda", tsa="exp"), batch(inputs=confident), 0)
    assert not np.any(output.supervised_coefficient)


def test_tsa_at_the_end_keeps_even_certain_rows():
    certain = np.eye(CLASSES)[LABEL] * 1000
    output = run(method_of("uda", tsa="linear"), batch(inputs=certain), TRAIN_STEPS)
    close(output.supervised_coefficient, np.full(5, 0.2))


@pytest.mark.parametrize(
    "name,field,value",
    [
        ("pseudo_label", "tsa", "log"),
        ("supervised", "confidence", 0.5),
        ("fixmatch", "temperature", 0.4),
        ("mixmatch", "target_forward", "separate"),
        ("uda", "augmentations", 2),
    ],
)
def test_a_setting_of_another_method_is_refused(name, field, value):
    with pytest.raises(config.ConfigError, match=f"{field}={value} has no effect with.*{name}"):
        method_of(name, **{field: value})


def test_learned_weights_need_an_unlabeled_loss():
    with pytest.raises(config.ConfigError, match="use weighting=fixed"):
        config.Config(method=config.MethodConfig("supervised"))


@pytest.mark.parametrize("name", ["vat", "mean_teacher", "mixmatch", "remixmatch"])
def test_unrolled_is_refused_where_losses_are_no_cross_entropies(name):
    weights = config.WeightConfig(inverse_hessian="unrolled")
    with pytest.raises(config.ConfigError, match=f"method={name} has others"):
        config.Config(method=config.MethodConfig(name), weights=weights)


def test_accuracy_of_pseudo_labels_counts_no_row_where_nothing_can_be_judged():
    for fields, truth in (({"confidence": 1.0}, TRUTH), ({"confidence": 0.0}, np.full(4, -1))):
        for name in ("uda", "pseudo_label"):
            output = run(method_of(name, **fields), batch(truth=truth))
            assert output.metrics["pseudo_label_accuracy"].numpy().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ROWWISE)
def test_truth_of_unlabeled_rows_moves_metrics_alone(name):
    outputs = [run(method_of(name), batch(truth=truth)) for truth in (TRUTH, np.full(4, -1))]
    for a, b in zip(*(tensors(output._replace(metrics={})) for output in outputs), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ROWWISE)
@pytest.mark.parametrize("half", [tf.float16, tf.bfloat16])
def test_losses_of_half_precision_outputs_are_float32(name, half):
    rounded = tf.nest.map_structure(
        lambda t: tf.cast(tf.cast(t, half), tf.float32) if t.dtype.is_floating else t, batch()
    )
    cast = base.Forward(*[lambda x: tuple(tf.cast(y, half) for y in forward(x))] * 4)
    output = method_of(name)(cast, rounded, TRAIN_STEPS)
    expected = run(method_of(name), rounded)
    for a, b in zip(tensors(output), tensors(expected), strict=True):
        assert a.dtype == b.dtype and a.dtype in (tf.float32, tf.int64)
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ROWWISE)
def test_metrics_are_float32_whatever_the_precision_of_the_logits(name):
    metrics = run(method_of(name, **({"tsa": "log"} if name == "uda" else {})), batch(tf.float64))
    for label, metric in metrics.metrics.items():
        assert metric.shape == ((2,) if label == "pseudo_label_accuracy" else ())
        assert metric.dtype == tf.float32


@pytest.mark.parametrize(
    "name,calls", [("uda", 13), ("pseudo_label", 9), ("supervised", 5), ("fixmatch", 13)]
)
def test_labeled_rows_and_views_share_one_forward_pass(name, calls):
    seen = []

    def counting(inputs):  # a plain function will do
        seen.append(inputs.shape[0])
        return forward(inputs)

    method_of(name)(counting, batch(), 0)
    assert seen == [calls]


@pytest.mark.parametrize("name", ["pseudo_label", "mean_teacher", "vat"])
def test_separate_passes_let_the_labeled_rows_alone_update_batch_norm(name):
    seen = []
    method_of(name, forward_pass="separate")(counted(seen), batch(), 0)
    passes = [call for call in seen if call[0] in ("train", "still")]
    assert passes[0] == ("train", 5) and set(passes[1:]) == {("still", 4)}
    seen.clear()
    method_of(name)(counted(seen), batch(), 0)
    assert [call[0] for call in seen if call[0] in ("train", "still")] == ["train"]


@pytest.mark.parametrize("name", ["pseudo_label", "mean_teacher", "vat"])
def test_joint_and_separate_passes_agree_where_rows_do_not_interact(name):
    joint, separate = (run(method_of(name, forward_pass=mode), batch()) for mode in FORWARD_PASSES)
    for a, b in zip(tensors(joint), tensors(separate), strict=True):
        close(a, b)


def counted(seen):
    """A forward that notes, call by call, the kind of the pass and its number of rows."""

    def make(kind):
        def call(inputs):
            seen.append((kind, inputs.shape[0]))
            return forward(inputs)

        return call

    return base.Forward(*map(make, base.Forward._fields))


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
    for a, b in zip(*map(tensors, (joint, separate)), strict=True):
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
    plain = PLAIN
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(parts)
        outputs = base.forward_with_target(plain, mode, *parts)
    for index, (part, output) in enumerate(zip(parts, outputs, strict=True)):
        np.testing.assert_array_equal(output.logits, part)
        np.testing.assert_array_equal(output.features, part[:, :2])
        for tensor in output:
            assert (tape.gradient(tensor, part) is None) == (index == 1)


@pytest.mark.parametrize("name", ROWWISE)
def test_batch_sizes_may_be_unknown_when_traced(name):
    data = batch()
    signature = tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), data)
    method = method_of(name)
    traced = tf.function(lambda data: tensors(run(method, data)), input_signature=[signature])
    for a, b in zip(traced(data), tensors(run(method, data)), strict=True):
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
