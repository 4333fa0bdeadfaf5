"""Near copies of images: what they are, and that a pool takes them for strangers."""

import numpy as np
import pytest
from PIL import Image

from ssl_influence import config as config_lib
from ssl_influence.data import duplicates, sources, splits
from tests.experiments.processes import assert_refused, run, succeeded


def test_a_copy_is_its_original_moved_by_a_pixel_at_most():
    random = np.random.default_rng(0)
    images = random.integers(256, size=(3, 6, 5, 1), dtype=np.uint8)
    copies = duplicates.near_copies(images, 50, 0.0, random)
    assert copies.shape == (50, 6, 5, 1) and copies.dtype == np.uint8
    places = set()
    for number, copy in enumerate(copies):
        rim = np.pad(images[number % 3], [(1, 1), (1, 1), (0, 0)], mode="edge")
        found = [
            (down, right)
            for down in range(3)
            for right in range(3)
            if np.array_equal(copy, rim[down : down + 6, right : right + 5])
        ]
        assert len(found) == 1
        places |= set(found)
    assert len(places) == 9


def test_noise_has_the_deviation_asked_for_and_stays_in_range():
    images = np.full((1, 40, 40, 3), 128, np.uint8)
    copies = duplicates.near_copies(images, 20, 4.0, np.random.default_rng(0))
    assert copies.std() == pytest.approx(4.0, rel=0.02)
    white = duplicates.near_copies(images + 127, 20, 4.0, np.random.default_rng(0))
    assert white.max() == 255 and white.min() > 225


def test_a_pool_takes_the_file_s_examples_for_strangers(tmp_path):
    path = tmp_path / "copies.npz"
    arguments = ["--dataset=digits.1@20-200", "--count=30", f"--output={path}"]
    assert "30 near copies" in succeeded(run("near_copies", *arguments, "--originals=4")).stdout
    joined = {"unlabeled_data": f"npz:{path}", "unlabeled_mismatch": 0.25}
    name = sources.parse_name("digits.1@20-200")
    settings = config_lib.DataConfig(**joined)
    source = sources.load(name, settings)
    assert source.strangers.sum() == 30
    assert set(source.labels[source.strangers]) == {-1}
    pool = splits.draw(source, name, settings).unlabeled
    assert source.strangers[pool].sum() == 30 and len(pool) == 120
    again = tmp_path / "again.npz"
    succeeded(run("near_copies", *arguments[:2], f"--output={again}", "--originals=4"))
    np.testing.assert_array_equal(
        np.load(path)["unlabeled_images"], np.load(again)["unlabeled_images"]
    )


def test_pictures_that_are_read_as_needed_are_copied_too(tmp_path):
    random = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(4):
            picture = Image.fromarray(random.integers(256, size=(6, 5), dtype=np.uint8))
            picture.save(tmp_path / "pictures" / name / f"{number}.png")
    for memory in ("0", "4"):
        output = f"--output={tmp_path / memory}.npz"
        flags = [f"--dataset=folder:{tmp_path / 'pictures'}.1@2-2", f"--max_memory_gb={memory}"]
        succeeded(run("near_copies", *flags, "--count=7", "--originals=3", output))
    read, held = (np.load(tmp_path / f"{m}.npz")["unlabeled_images"] for m in ("0", "4"))
    assert read.shape == (7, 6, 5, 1)
    np.testing.assert_array_equal(read, held)


@pytest.mark.parametrize(
    ("flag", "part"),
    [
        ("--output=/tmp/copies.txt", "ends in .npz"),
        ("--output=/dev/null/copies.npz", "cannot be written"),
        ("--dataset=two_moons", "has no images"),
        ("--originals=100000", "originals=100000"),
        ("--noise=nan", "noise=nan"),
        ("--count=100000000000000", "count=100000000000000"),
        ("--output=gs://bucket/copies.npz", "name a local file"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, flag, part):
    arguments = ["--dataset=digits.1@20-200", "--count=3", f"--output={tmp_path / 'c.npz'}"]
    assert_refused(run("near_copies", *arguments, flag), part)
    assert not list(tmp_path.iterdir())
