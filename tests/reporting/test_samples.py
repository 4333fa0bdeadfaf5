import dataclasses

import numpy as np
import pytest
from PIL import Image

from ssl_influence import config
from ssl_influence.data import examples, rows, splits
from ssl_influence.reporting import samples

SIZE = 8  # magnified ten times


def plain(count, color_of):
    """Images of one color each, by which they are recognized."""
    images = np.empty((count, SIZE, SIZE, 3), np.uint8)
    for row in range(count):
        images[row] = color_of(row)
    return images


def make_source(per_class=12, num_classes=4, **fields):
    """Row r is of class r % num_classes. Colors: training red = row, test green = row."""
    count = per_class * num_classes
    labels = np.arange(count) % num_classes
    given = {
        "name": "plain",
        "inputs": plain(count, lambda row: (row, 10, 250)),
        "labels": labels.astype(np.int32),
        "test_inputs": plain(3 * num_classes, lambda row: (10, row % 256, 240)),
        "test_labels": (np.arange(3 * num_classes) % num_classes).astype(np.int32),
        "class_names": [f"class {c}" for c in range(num_classes)],
        "flip": False,
    }
    return examples.Source(**{**given, **fields})


def make_split(source, labeled=8, validation=8):
    ids = np.arange(len(source.labels))
    return splits.Split(
        labeled=ids[:labeled],
        validation=ids[labeled : labeled + validation],
        unlabeled=ids[labeled + validation :],
    )


def found(path, size=80):
    """(place in the data, y, x) of each plain image in a picture, checking that it is whole."""
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    shown = []
    for kind, (own, fixed, blue) in {"train": (0, 1, 250), "test": (1, 0, 240)}.items():
        mask = (pixels[..., 2] == blue) & (pixels[..., fixed] == 10)
        for row in np.unique(pixels[..., own][mask]):
            ys, xs = np.nonzero(mask & (pixels[..., own] == row))
            # One color over a full square and nowhere else: magnified without smoothing.
            assert len(ys) == size * size, (kind, row)
            assert np.ptp(ys) == np.ptp(xs) == size - 1
            shown.append((kind, int(row), int(ys[0]), int(xs[0])))
    return shown


def test_lines_are_classes_and_columns_are_roles(tmp_path):
    source = make_source()
    split = make_split(source)
    samples.draw_classes(source, split, tmp_path / "samples.png", title="plain.1@8-8")
    shown = found(tmp_path / "samples.png")
    assert len(shown) == 4 * (2 + 2 + 2 + 2)
    lines = sorted({y for _, _, y, _ in shown})
    roles = ("labeled", "validation", "unlabeled", "test")
    columns = {role: [] for role in roles}
    for kind, row, y, x in shown:
        label = (source.labels if kind == "train" else source.test_labels)[row]
        assert lines.index(y) == label
        role = "test" if kind == "test" else next(r for r in roles if row in getattr(split, r))
        columns[role].append(x)
    spans = [(min(columns[role]), max(columns[role])) for role in roles]
    assert all(a[1] < b[0] for a, b in zip(spans, spans[1:], strict=False))


def test_unlabeled_examples_of_unknown_and_of_other_classes_come_last(tmp_path):
    source = make_source()
    labels, strangers = source.labels.copy(), np.zeros(48, bool)
    labels[24:] = -1
    strangers[40:] = True
    source = dataclasses.replace(source, labels=labels, strangers=strangers)
    samples.draw_classes(source, make_split(source), tmp_path / "samples.png", title="plain")
    place = {row: y for kind, row, y, _ in found(tmp_path / "samples.png") if kind == "train"}
    of_class = max(y for row, y in place.items() if row < 24)
    other = [place[row] for row in range(40, 48)]  # all are shown
    unknown = [place[row] for row in range(24, 40)]
    assert of_class < min(other) <= max(other) < min(unknown)
    assert len(set(unknown)) == 2  # ten a line


def test_the_draw_follows_the_seed(tmp_path):
    source = make_source(per_class=50)
    drawn = []
    for number, seed in enumerate((1, 1, 2)):
        path = tmp_path / f"{number}.png"
        samples.draw_classes(source, make_split(source), path, title="plain", seed=seed)
        drawn.append({row for kind, row, _, _ in found(path) if kind == "train"})
    assert drawn[0] == drawn[1] != drawn[2]


def test_of_a_hundred_classes_twenty_are_drawn_the_first_and_the_last_among_them(tmp_path):
    source = make_source(per_class=2, num_classes=100)
    nothing = {"test_inputs": source.test_inputs[:0], "test_labels": source.test_labels[:0]}
    source = dataclasses.replace(source, **nothing)
    ids = np.arange(200)
    split = splits.Split(labeled=ids[:100], validation=ids[100:], unlabeled=ids[:0])
    samples.draw_classes(source, split, tmp_path / "samples.png", title="plain")
    shown = {row for kind, row, _, _ in found(tmp_path / "samples.png") if kind == "train"}
    classes = sorted({row % 100 for row in shown})
    assert len(classes) == 20 and classes[0] == 0 and classes[-1] == 99
    width, height = Image.open(tmp_path / "samples.png").size
    assert width < 1500 and height < 2200


@pytest.mark.parametrize("shape", [(300, 200, 3), (200, 300, 1), (400, 4, 1), (4, 400, 3)])
def test_large_and_narrow_images_are_reduced_and_stay_in_the_picture(shape, tmp_path):
    images = np.full((8, *shape), 77, np.uint8)
    source = make_source(
        per_class=2, inputs=images, test_inputs=images[:0], test_labels=np.zeros(0, np.int32)
    )
    split = make_split(source, labeled=4, validation=4)
    samples.draw_classes(source, split, tmp_path / "samples.png", title="large")
    picture = np.asarray(Image.open(tmp_path / "samples.png").convert("L"))
    assert max(picture.shape) < 800
    scale = 112 / max(shape)
    expected = 8 * max(1, round(shape[0] * scale)) * max(1, round(shape[1] * scale))
    # Text has pixels of this gray too, but few.
    assert expected <= np.count_nonzero(picture == 77) < expected + 60


@pytest.mark.parametrize("name", ["$x^2$ $", "\udcff\n", "", "long " * 100, r"\frac"])
def test_any_class_name_can_be_drawn(name, tmp_path):
    source = make_source(class_names=[name, "b", "c", "d"])
    samples.draw_classes(source, make_split(source), tmp_path / "samples.png", title=name)
    assert len(found(tmp_path / "samples.png")) == 32


def test_a_long_text_loses_its_middle():
    assert samples.shortened("abcdefghij", 10) == "abcdefghij"
    assert samples.shortened("abcdefghijk", 7) == "abc…ijk"
    assert (
        samples.shortened("a\nb\udc80", 9) == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"
    )


def random_source(**fields):
    images = np.random.default_rng(0).integers(0, 256, (48, SIZE, SIZE, 3), dtype=np.uint8)
    return make_source(inputs=images, **fields)


NOTHING = {"operations": 0, "cutout": 0.0, "flip": False, "shift": 0}


def test_views_without_augmentation_are_the_images_bit_for_bit():
    source = random_source()
    split = make_split(source)
    settings = config.Config().replace(augment=NOTHING)
    ids, weak, strong = samples.views(source, split, settings)
    assert len(set(ids.tolist())) == 6 and np.isin(ids, split.unlabeled).all()
    assert len(weak) == 3 and len(strong) == 5
    for view in (*weak, *strong):
        np.testing.assert_array_equal(view, source.inputs[ids])


def test_views_are_those_of_the_flags_and_the_seed_and_differ_from_one_another():
    source = random_source()
    split = make_split(source)
    settings = config.Config().replace(augment={**NOTHING, "cutout": 0.5, "shift": 2})
    ids, weak, strong = samples.views(source, split, settings)
    original = source.inputs[ids]
    assert all(np.any(a != b) for a, b in ((weak[0], weak[1]), (strong[0], strong[1])))
    assert all(np.any(view != original) for view in (*weak, *strong))
    # The square that closes strong views is painted gray; weak views have the image's own pixels.
    gray = [
        np.mean(np.all((view == 127) | (view == 128), axis=-1)) for view in (weak[0], strong[0])
    ]
    assert gray[0] == 0 and gray[1] > 0.05
    again = samples.views(source, split, settings)
    np.testing.assert_array_equal(again[2][0], strong[0])
    other = samples.views(source, split, settings.replace(train={"seed": 2}))
    assert not np.array_equal(other[0], ids)


def test_squares_are_painted_in_the_mean_color_where_inputs_are_standardized():
    source = make_source(inputs=np.full((48, SIZE, SIZE, 3), (9, 99, 199), np.uint8))
    source.inputs[:, 0] = (19, 109, 209)  # an eighth of the pixels
    augment = {**NOTHING, "cutout": 1.0, "normalization": "standardize"}
    _, _, strong = samples.views(
        source, make_split(source), config.Config().replace(augment=augment)
    )
    assert np.any(np.all(strong[0] == (10, 100, 200), axis=-1))


def test_pictures_of_views_show_lazy_images_and_data_without_unlabeled_examples(tmp_path):
    images = plain(48, lambda row: (row, 10, 250))
    lazy = rows.LazyImages(48, images.shape[1:], images.__getitem__, "stamp")
    source = make_source(inputs=lazy)
    ids = np.arange(48)
    split = splits.Split(labeled=ids[:30], validation=ids[30:], unlabeled=ids[:0])
    settings = config.Config().replace(augment=NOTHING)
    samples.draw_views(source, split, settings, tmp_path / "views.png", title="plain")
    pixels = np.asarray(Image.open(tmp_path / "views.png").convert("RGB"))
    is_tile = (pixels[..., 1] == 10) & (pixels[..., 2] == 250)
    assert np.count_nonzero(is_tile) == 6 * 9 * 80 * 80
    assert len(np.unique(pixels[is_tile][:, 0])) == 6 and pixels[is_tile][:, 0].max() < 30


def test_views_of_ctaugment_are_drawn_with_all_its_magnitudes():
    source = random_source()
    settings = config.Config().replace(augment={"strong": "ctaugment"})
    ids, _, strong = samples.views(source, make_split(source), settings)
    assert all(np.any(view != source.inputs[ids]) for view in strong)
