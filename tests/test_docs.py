"""The guides in ssl_influence/docs say what the code beside them does."""

import ast
import functools
import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from experiments import sweep_files
from ssl_influence import config as config_lib, training
from ssl_influence.influence import weight_gradients
from ssl_influence.methods import fixmatch
from ssl_influence.models import mlp

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "ssl_influence" / "docs"
PAGES = sorted(DOCS.glob("*.md"))
WILDCARD = "\N{HORIZONTAL ELLIPSIS}"


def sections():
    """Heading -> text, of the guide to extending."""
    text = (DOCS / "extending.md").read_text(encoding="utf-8")
    return {part.partition("\n")[0]: part for part in re.split(r"^## ", text, flags=re.M)[1:]}


def blocks(heading, language):
    return re.findall(rf"```{language}\n(.*?)```", sections()[heading], re.S)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Runs the program of a section once; from a file, as AutoGraph reads sources."""

    @functools.cache
    def run(heading):
        path = tmp_path_factory.mktemp("docs") / f"{heading.lower().replace(' ', '_')}.py"
        path.write_text("\n".join(blocks(heading, "python")), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return run


def test_the_method_moves_weights_and_stays_finite(program):
    guide = program("A base algorithm")
    assert int(guide.trainer.skipped_weight_steps) == 0
    assert np.count_nonzero(guide.weights.update_counts()) > 100
    assert np.ptp(guide.weights.values()) > 0.04
    assert all(np.all(np.isfinite(value)) for value in guide.metrics.values())


def test_the_hypergradient_of_the_method_is_that_of_a_matrix_written_out(program):
    guide = program("A base algorithm")
    trainer, batch = guide.trainer, guide.make_batch()
    head, damping = trainer.head, trainer.config.weights.damping
    output = trainer.method(trainer._passes(trainer.step), batch, trainer.step)
    example_weight = tf.constant(np.random.RandomState(3).uniform(0.2, 2, 48), tf.float32)
    features, logits = trainer.model(guide.validation["inputs"])
    label = guide.validation["label"]
    found, info = trainer.weight_gradient(output, example_weight, features, logits, label)
    assert info.converged and info.curvature == "gauss_newton"

    def with_ones(x):
        return np.concatenate([x, np.ones([len(x), 1])], 1).astype(np.float64)

    def outer_jacobians(x, logits, weight):
        p = tf.nn.softmax(tf.cast(logits, tf.float64)).numpy()
        jacobian = np.einsum("nc,cd->ncd", p, np.eye(3)) - np.einsum("nc,nd->ncd", p, p)
        return np.einsum("n,na,nb,ncd->acbd", weight, x, x, jacobian).reshape([x.shape[1] * 3] * 2)

    labeled, unlabeled = output.labeled_head, output.unlabeled_head
    pseudo_label = np.argmax(-unlabeled.gradient.numpy(), 1)  # p - onehot is negative there alone
    p_label = tf.nn.softmax(unlabeled.logits).numpy()[np.arange(48), pseudo_label]
    coefficient = output.unsupervised_coefficient.numpy()
    rows = with_ones(unlabeled.features.numpy())
    matrix = outer_jacobians(
        with_ones(labeled.features.numpy()),
        labeled.logits,
        output.supervised_coefficient.numpy(),
    ) + outer_jacobians(rows, unlabeled.logits, coefficient * example_weight.numpy() * p_label**0.7)
    l2 = [trainer.l2_of(head.kernel)] * head.kernel.shape[0] + [trainer.l2_of(head.bias)]
    matrix += np.diag(np.repeat(l2, 3) + damping)
    probabilities = tf.nn.softmax(logits).numpy()
    slope = with_ones(features.numpy()).T @ (probabilities - np.eye(3)[label.numpy()]) / len(label)
    direction = np.linalg.solve(matrix, slope.ravel()).reshape(slope.shape)
    error = tf.nn.softmax(unlabeled.logits).numpy() - np.eye(3)[pseudo_label]
    expected = -coefficient * np.sum((rows @ direction) * p_label[:, None] ** 0.7 * error, 1)
    assert np.ptp(expected) > 0
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


def test_the_dataset_is_read_split_and_batched_row_by_row(program, tmp_path):
    guide = program("A dataset")
    files = {
        "set": "3 1:0.5 3:-2\n7 2:1\n3 1:4\n7 3:1\n3 2:0.25\n7 1:-1\n",
        "set.unlabeled": "0 1:9\n0 2:8\n",
        "set.t": "7 3:6\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    name = guide.names.DatasetName("svmlight", seed=1, labels=2, validation=2)
    data = config_lib.DataConfig(
        labeled_batch_size=2, unlabeled_batch_size=4, validation_batch_size=2
    )
    source = guide.examples.assemble(guide.read(name, str(tmp_path / "set"), data))
    inputs = [[0.5, 0, -2], [0, 1, 0], [4, 0, 0], [0, 0, 1], [0, 0.25, 0], [-1, 0, 0]]
    np.testing.assert_array_equal(source.inputs, [*inputs, [9, 0, 0], [0, 8, 0]])
    np.testing.assert_array_equal(source.labels, [0, 1, 0, 1, 0, 1, -1, -1])
    assert (source.class_names, source.test_labels.tolist()) == (["3", "7"], [1])

    split = guide.splits.draw(source, name, data)
    assert {len(split.labeled), len(split.validation)} == {2} and len(split.unlabeled) == 4
    assert {6, 7} <= set(split.unlabeled.tolist())
    pipeline = guide.pipeline_lib.Pipeline(
        source, split, data, config_lib.AugmentConfig(), seed=1, views=("weak",)
    )
    batch = pipeline.train_batch(0)["unlabeled"]
    np.testing.assert_array_equal(batch["weak"], source.inputs[batch["example_id"].numpy()])
    assert sorted(batch["example_id"].numpy()) == split.unlabeled.tolist()

    (tmp_path / "set.t").write_text("5 3:6\n")
    with pytest.raises(config_lib.ConfigError, match="has the label 5"):
        guide.read(name, str(tmp_path / "set"), data)
    with pytest.raises(config_lib.ConfigError, match="cannot be read"):
        guide.read(name, str(tmp_path / "nothing"), data)


def test_the_run_on_the_dataset_leaves_what_the_guide_says(program):
    guide = program("A dataset")
    run = guide.folder / "run"
    assert {p.name for p in (run / "weights").iterdir()} == {
        f"weights-{step}.csv" for step in (20, 40, 60)
    }
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [20, 40, 60]
    assert lines[-1]["weights/share_updated"] > 0.5
    assert guide.summary["test"]["ema"]["last"]["error"] < 30  # a third of chance's 67


def test_the_kernels_agree_with_single_examples(program):
    guide = program("A kernel for a layer")
    for method in ("kernels", "ghost"):
        difference = guide.per_example.check(
            guide.model, guide.x, guide.y, guide.loss_fn, method=method, examples=20
        )
        assert difference < 1e-5
    layers = [guide.keras.Input([8]), guide.LowRankDense(3, rank=2)]  # no axis of positions
    vectors = tf.random.stateless_normal([4, 8], [0, 1])
    labels = tf.constant([0, 1, 2, 0])
    model = guide.keras.Sequential(layers)
    assert guide.per_example.check(model, vectors, labels, guide.loss_fn) < 1e-5


def test_the_solver_agrees_with_a_direct_one_where_a_series_falls_short(program):
    guide = program("A solver")
    truth = np.linalg.solve(guide.matrix.numpy() + 0.1 * np.eye(30), guide.b[0].numpy())
    np.testing.assert_allclose(guide.found[0], truth, rtol=1e-6)
    assert guide.of_chebyshev.converged and int(guide.of_chebyshev.iterations) == 80
    assert guide.of_series.residual > 1e6 * guide.of_chebyshev.residual


def test_the_solver_tells_of_negative_curvature_and_needs_damping(program):
    guide = program("A solver")
    matrix = tf.linalg.diag([1.0, -0.5, 2.0])
    rhs = [tf.ones([3])]

    def product(vector):
        return [tf.linalg.matvec(matrix, vector[0])]

    _, info = guide.chebyshev(product, rhs, damping=0.1, terms=20)
    assert info.negative_curvature and not info.converged
    with pytest.raises(config_lib.ConfigError, match="damping=0.0 has to be above 0"):
        guide.chebyshev(product, rhs, damping=0.0, terms=20)


def test_the_solver_gives_the_influence_over_all_variables(program):
    guide = program("A solver")
    settings = config_lib.WeightConfig(inverse_hessian="cg", damping=0.1)
    expected, _ = weight_gradients.of_model(
        guide.model,
        guide.labeled,
        guide.pool,
        guide.validation,
        guide.loss_fn,
        l2=1e-3,
        settings=settings,
    )
    np.testing.assert_allclose(guide.hurts, expected, atol=1e-4 * np.abs(expected).max())


def test_the_solver_moves_weights_in_training(program):
    guide = program("A solver")
    config = config_lib.Config().replace(
        weights={"damping": 0.1}, optimizer={"schedule": "constant", "weight_decay": 0.01}
    )
    random = np.random.RandomState(0)
    batch = {
        "labeled": {"inputs": random.randn(8, 4), "label": random.randint(3, size=8)},
        "unlabeled": {
            "weak": random.randn(20, 4),
            "strong": random.randn(20, 4),
            "label": np.full(20, -1),
            "example_id": np.arange(20),
        },
    }
    validation = {"inputs": random.randn(10, 4), "label": random.randint(3, size=10)}
    batch, validation = (
        tf.nest.map_structure(
            lambda x: tf.constant(x, tf.float32 if x.dtype == np.float64 else tf.int64), part
        )
        for part in (batch, validation)
    )
    weights, gradients = {}, {}
    for trainer_class in (training.BilevelTrainer, guide.ChebyshevTrainer):
        model = mlp.build([4], 3, seed=2, hidden_units=(6,))
        table = training.make_example_weights(config.weights, 20)
        trainer = trainer_class(model, fixmatch.FixMatch(confidence=0.0), table, config)
        output = trainer.method(trainer._passes(trainer.step), batch, trainer.step)
        on_validation = model(validation["inputs"])
        gradients[trainer_class], info = trainer.weight_gradient(
            output, tf.ones([20]), *on_validation, validation["label"]
        )
        assert info.converged
        trainer.bilevel_step(batch, validation)
        assert int(trainer.skipped_weight_steps) == 0
        weights[trainer_class] = table.values()
    expected, found = gradients.values()
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    expected, found = weights.values()
    assert np.ptp(expected) > 0
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_the_binary_trains_and_takes_its_defaults(tmp_path):
    [code] = blocks("An experiment", "python")
    tiny = [
        *("--model=mlp", "--hidden_units=8", "--train_steps=2", "--log_every=1"),
        *("--labeled_batch_size=4", "--unlabeled_batch_size=4", "--validation_batch_size=8"),
    ]
    result = subprocess.run(
        [sys.executable, "-c", code, *tiny, f"--model_dir={tmp_path}/run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    written = (tmp_path / "run" / "flags.txt").read_text().splitlines()
    assert {"--method=vat", "--dataset=digits.1@20-200", "--ema_decay=0.99"} <= set(written)
    assert "python -m experiments.vat_digits" in written[0]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_sweep_file_plans_its_cells(tmp_path):
    [text] = blocks("An experiment", "json")
    (tmp_path / "vat.json").write_text(text)
    sweep = sweep_files.read(tmp_path / "vat.json")
    cells = sweep_files.cells(sweep, tmp_path / "out")
    assert len(cells) == 2 * 2 * 3
    described = {
        (cell.row, cell.seed, cell.config.method.vat_radius, cell.config.weights.weighting)
        for cell in cells
    }
    assert ("large/per_example", 3, 6.0, "per_example") in described
    assert ("small/fixed", 1, 2.0, "fixed") in described
    assert {cell.config.method.name for cell in cells} == {"vat"}


def literals(node):
    """The texts that a node may print, with a wildcard for each value in them."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [re.sub(r"%[.\d]*[sdrgf]", WILDCARD, node.value)]
    if isinstance(node, ast.JoinedStr):
        parts = [p.value if isinstance(p, ast.Constant) else WILDCARD for p in node.values]
        return ["".join(parts)]
    return []


@functools.cache
def printed_texts():
    texts = [(ROOT / "experiments" / "environment.sh").read_text(encoding="utf-8")]
    for folder in ("ssl_influence", "experiments", "third_party"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                texts += literals(node)
    return texts


def is_printed(quote):
    """Whether one text of the source has all pieces of a quote, in order, and values between."""
    pieces = [re.escape(piece.strip()) for piece in quote.split("...") if piece.strip()]
    pattern = re.compile(rf".*?{WILDCARD}.*?".join(pieces), re.S)
    return any(pattern.search(text) for text in printed_texts())


def quotes():
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    return [
        line
        for block in re.findall(r"```text\n(.*?)```", text, re.S)
        for line in block.split("\n")[:-1]
    ]


def test_messages_that_are_quoted_are_those_of_the_source():
    assert len(quotes()) > 80
    assert not [quote for quote in quotes() if not is_printed(quote)]


@pytest.mark.parametrize(
    ("quote", "expected"),
    [
        ("the mask rate is ...: hardly any unlabeled example passes --confidence=...", True),
        ("the mask rate is ...: hardly any unlabeled example fails --confidence=...", False),
        ("hardly any unlabeled example passes the mask rate is ...", False),
        ("Going back to ...", True),
        ("Left out since they could not be read: ... The first: ...", True),
    ],
)
def test_the_check_of_quotes_tells_right_from_wrong(quote, expected):
    assert is_printed(quote) == expected


@functools.cache
def flags_of(binary):
    code = (
        "import sys, importlib; from absl import flags;"
        "importlib.import_module(sys.argv[1]); print(*flags.FLAGS)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, f"experiments.{binary}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return frozenset([*result.stdout.split(), "flagfile"])  # absl's own


def is_flag(name, known):
    return name in known or (name.startswith("no") and name[2:] in known)


# Of pip.
FOREIGN_FLAGS = {"no-deps", "use-pep517"}
# What the guide has the reader write, and what the changelog says is gone.
NOT_THERE = {"vat_digits", "methods_study"}


def commands(text):
    """(binary, flags) of each command, also over several lines."""
    joined = text.replace("\\\n", " ")
    for match in re.finditer(r"python -m experiments\.(\w+)([^\n`]*)", joined):
        yield match[1], re.findall(r"--([\w-]+)", match[2])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_flags_exist(page):
    text = page.read_text(encoding="utf-8")
    wrong, used = [], set()
    for binary, names in commands(text):
        if binary in NOT_THERE:
            continue
        used.add(binary)
        wrong += [f"{binary}: {name}" for name in names if not is_flag(name, flags_of(binary))]
    used |= set(re.findall(r"`experiments\.(\w+)", text)) - NOT_THERE
    known = set().union(*map(flags_of, {*used, "uda_cifar", "evaluate"}))
    named = set(re.findall(r"(?<![\w-])--([a-z][\w-]*)", text)) - FOREIGN_FLAGS
    wrong += [name for name in sorted(named) if not is_flag(name, known)]
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-")
        for line in re.findall(r"^#+ (.*)$", text, re.M)
    }
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        place, _, anchor = link.partition("#")
        if place and not (page.parent / place).exists():
            missing.append(link)
        if anchor and not place and anchor not in headings:
            missing.append(link)
    named = re.findall(r"`((?:experiments|ssl_influence|tests|third_party)/[\w./-]*\w/?)`", text)
    named += [
        f"ssl_influence/{path}" for path in re.findall(r"`((?:methods|data)/[\w./]*\.py)`", text)
    ]
    missing += [
        path
        for path in named
        if not (ROOT / path).exists() and pathlib.Path(path).stem not in NOT_THERE
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_parts_of_the_readme_that_are_named_are_there(page):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    joined = " ".join(page.read_text(encoding="utf-8").split())
    found = re.findall(r'((?:"[^"]+"(?: and )?)+) in the \[?README', joined)
    parts = [part for group in found for part in re.findall(r'"([^"]+)"', group)]
    titles = re.findall(r"^#+ (.*)$|\*\*([^*]+?)\.?\*\*", readme, re.M)
    assert not set(parts) - {title for pair in titles for title in pair}


def version():
    return re.search(r'version="([^"]+)"', (ROOT / "setup.py").read_text(encoding="utf-8"))[1]


def test_the_changelog_begins_with_the_version_of_now():
    text = (DOCS / "changelog.md").read_text(encoding="utf-8")
    assert re.search(r"^## ([\w.]+)", text, re.M)[1] == version()


def test_the_citation_is_of_this_version_and_of_the_paper():
    yaml = pytest.importorskip("yaml")
    held = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (held["cff-version"], held["version"]) == ("1.2.0", version())
    paper = held["preferred-citation"]
    assert [author["family-names"] for author in paper["authors"]] == ["Ren", "Yeh", "Schwing"]
    assert paper["year"] == 2020 and "doi" not in held
