import dataclasses

import numpy as np
import pytest
import tf_keras as keras
from PIL import Image

from ssl_influence import checkpoints, config
from ssl_influence.data import examples, splits
from ssl_influence.reporting import boundaries

RANDOM = np.random.default_rng(0)
# The truth is the sign of x; the model's boundary is a x + b y + c = 0 by its kernel and bias.
TRAIN = RANDOM.normal(size=(30, 2)).astype(np.float32)
TEST = RANDOM.normal(size=(50, 2)).astype(np.float32)


def side(points):
    return points[:, 0].astype(np.float64)


@pytest.fixture(scope="module")
def source():
    return examples.Source(
        name="halves",
        inputs=TRAIN,
        labels=(side(TRAIN) > 0).astype(np.int32),
        test_inputs=TEST,
        test_labels=(side(TEST) > 0).astype(np.int32),
        class_names=["0", "1"],
        flip=False,
    )


@pytest.fixture(scope="module")
def split():
    ids = np.arange(30)
    return splits.Split(labeled=ids[:4], validation=ids[4:10], unlabeled=ids[10:])


@pytest.fixture(scope="module")
def model():
    inputs = keras.layers.Input((2,))
    features = keras.layers.Activation("linear")(inputs)
    return keras.Model(inputs, [features, keras.layers.Dense(2, name="head")(features)])


# Row -> step -> (a, b, c). Step 7 has no partner; weight of example i at step k is i + k / 100.
LINES = {
    "ours": {5: (1.0, 1.0, 0.5), 7: (9.0, 9.0, 9.0), 20: (2.0, 0.0, 0.0)},
    "supervised": {5: (0.0, 1.0, 0.0), 20: (-1.0, 0.0, 1.0)},
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory, model, split):
    folder = tmp_path_factory.mktemp("rows")
    for row, lines in LINES.items():
        saver = checkpoints.Checkpointer(folder / row / "checkpoints", 10, model=model)
        for step, (a, b, c) in lines.items():
            # Half on each class, so that it is the difference of the logits that counts.
            kernel = np.array([[-a, a], [-b, b]]) / 2
            model.get_layer("head").set_weights([kernel, np.array([-c, c]) / 2])
            saver.save(step)
            checkpoints.export_weights(
                folder / row / "weights" / f"weights-{step}.csv",
                split.unlabeled[::-1],  # found by id, not by place
                np.arange(30) + step / 100,
                np.zeros(30, int),
            )
    return {row: folder / row for row in LINES}


@pytest.fixture(scope="module")
def history(source, split, model, rows):
    return boundaries.read("Halves", source, split, side, model, rows)


def test_a_frame_is_read_for_each_step_that_every_row_has(history, split):
    assert [frame.step for frame in history.frames] == [5, 20]
    np.testing.assert_array_equal(history.labeled, TRAIN[:4])
    np.testing.assert_array_equal(history.unlabeled, TRAIN[split.unlabeled])
    for frame in history.frames:
        np.testing.assert_allclose(frame.weight, np.arange(10, 30) + frame.step / 100)


def test_scores_errors_and_pseudo_labels_are_those_of_the_checkpoint(history):
    x, y = np.meshgrid(history.x, history.y)
    np.testing.assert_array_equal(np.sign(history.truth), np.sign(x))
    for frame in history.frames:
        for row, lines in LINES.items():
            a, b, c = lines[frame.step]
            np.testing.assert_allclose(frame.scores[row], a * x + b * y + c, atol=1e-5)
            predicted = TEST @ [a, b] + c > 0
            wrong = predicted != (side(TEST) > 0)
            assert frame.test_errors[row] == pytest.approx(100 * wrong.mean())
        a, b, c = LINES["ours"][frame.step]
        np.testing.assert_array_equal(frame.pseudo_label, history.unlabeled @ [a, b] + c > 0)
    assert history.frames[1].test_errors["ours"] == 0.0


def test_the_plane_holds_all_unlabeled_points(history):
    low, high = history.unlabeled.min(axis=0), history.unlabeled.max(axis=0)
    assert (low > [history.x[0], history.y[0]]).all()
    assert (high < [history.x[-1], history.y[-1]]).all()


def test_the_boundary_lies_where_the_score_is_zero_and_runs_through_the_plane(history):
    (line,) = boundaries.boundary(history.x, history.y, history.frames[0].scores["ours"])
    np.testing.assert_allclose(line @ [1.0, 1.0] + 0.5, 0.0, atol=1e-5)
    assert np.ptp(line[:, 0]) > 0.5 * np.ptp(history.x)


def test_a_closed_boundary_is_found_whole():
    x, y = np.linspace(-2, 2, 161), np.linspace(-1.5, 1.5, 121)
    (line,) = boundaries.boundary(x, y, 1 - np.hypot(*np.meshgrid(x, y)))
    np.testing.assert_allclose(np.hypot(*line.T), 1.0, atol=1e-3)
    np.testing.assert_array_equal(line[0], line[-1])


def test_a_score_of_one_sign_has_no_boundary():
    assert boundaries.boundary(np.arange(3.0), np.arange(4.0), np.ones((4, 3))) == []


def test_rows_without_a_common_step_are_refused(source, split, model, rows, tmp_path):
    with pytest.raises(checkpoints.CheckpointError, match="no step .*--checkpoint_every"):
        boundaries.read("Halves", source, split, side, model, {**rows, "other": tmp_path})


def test_missing_weights_and_those_of_another_split_are_named(source, split, model, rows):
    path = rows["supervised"] / "weights" / "weights-20.csv"
    only = {"supervised": rows["supervised"]}
    other = dataclasses.replace(split, unlabeled=np.arange(5, 30))
    with pytest.raises(checkpoints.CheckpointError, match="weights-5.csv.* no example 5"):
        boundaries.read("Halves", source, other, side, model, only)
    aside = path.rename(path.with_suffix(".aside"))
    try:
        with pytest.raises(checkpoints.CheckpointError, match="weights-20.csv is missing"):
            boundaries.read("Halves", source, split, side, model, only)
    finally:
        aside.rename(path)


def test_a_source_that_is_not_of_two_classes_in_the_plane_is_refused(source, split, model, rows):
    for change in (
        {"class_names": ["0", "1", "2"]},
        {"inputs": np.zeros((30, 3), np.float32), "test_inputs": np.zeros((50, 3), np.float32)},
    ):
        other = dataclasses.replace(source, **change)
        with pytest.raises(config.ConfigError, match="halves has"):
            boundaries.read("Halves", other, split, side, model, rows)


def test_more_rows_than_lines_are_refused(source, split, model, rows):
    many = {str(index): rows["ours"] for index in range(4)}
    with pytest.raises(ValueError, match="1 to 3 rows, not for 4"):
        boundaries.read("Halves", source, split, side, model, many)


def test_panels_are_a_png_of_page_width_and_the_same_bytes_each_time(history, tmp_path):
    drawn = []
    for name in ("a.png", "b.png"):
        boundaries.panels([history, history], tmp_path / name, steps=[5, 20, 5])
        drawn.append((tmp_path / name).read_bytes())
    with Image.open(tmp_path / "a.png") as image:
        assert image.format == "PNG"
        assert image.width == pytest.approx(1800, abs=1)
    assert drawn[0] == drawn[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"]


def test_panels_show_the_asked_steps(history, tmp_path):
    boundaries.panels([history], tmp_path / "both.png", steps=[5, 20])
    boundaries.panels([history], tmp_path / "default.png")
    boundaries.panels([history], tmp_path / "last.png", steps=[20])
    assert (tmp_path / "both.png").read_bytes() == (tmp_path / "default.png").read_bytes()
    assert (tmp_path / "both.png").read_bytes() != (tmp_path / "last.png").read_bytes()
    with pytest.raises(ValueError, match=r"Halves: no frame of steps \[7\], only of \[5, 20\]"):
        boundaries.panels([history], tmp_path / "none.png", steps=[5, 7])
    assert not (tmp_path / "none.png").exists()


def frames_of(path):
    with Image.open(path) as image:
        frames = []
        for index in range(image.n_frames):
            image.seek(index)
            frames.append((image.info["duration"], np.asarray(image.convert("RGB"))))
        return image.info["loop"], frames


def test_the_animation_has_a_frame_a_step_loops_and_holds_the_last(history, tmp_path):
    for name in ("a.gif", "b.gif"):
        boundaries.animation([history], tmp_path / name)
    assert (tmp_path / "a.gif").read_bytes() == (tmp_path / "b.gif").read_bytes()
    loop, frames = frames_of(tmp_path / "a.gif")
    (first_time, first), (last_time, last) = frames
    assert loop == 0
    assert last_time > first_time >= 100
    assert first.shape == last.shape
    assert (first != last).any()
    assert (first[0, 0] == 255).all() and (last[0, 0] == 255).all()


def test_an_animation_may_leave_out_steps_and_refuses_those_it_lacks(history, tmp_path):
    boundaries.animation([history, history], tmp_path / "one.gif", steps=[20])
    assert len(frames_of(tmp_path / "one.gif")[1]) == 1
    short = dataclasses.replace(history, title="Short", frames=history.frames[:1])
    with pytest.raises(ValueError, match=r"Short: no frame of steps \[20\]"):
        boundaries.animation([history, short], tmp_path / "none.gif")


def test_shades_mean_the_same_weight_whatever_the_others_are(history, tmp_path):
    """A point's color is a function of its own weight: the scale does not follow the data."""

    def drawn(weight, name):
        frame = dataclasses.replace(history.frames[0], weight=np.full(20, weight))
        boundaries.panels([dataclasses.replace(history, frames=[frame])], tmp_path / name)
        return np.asarray(Image.open(tmp_path / name).convert("RGB")).astype(int)

    light, start, heavy = (drawn(w, f"{w}.png") for w in (0.0, 1.0, 2.0))
    assert (light - start).mean() > 0 and (start - heavy).mean() > 0
    np.testing.assert_array_equal(heavy, drawn(3.0, "3.png"))
