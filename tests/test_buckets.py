"""A run whose directory lies in a bucket, for which TensorFlow's file system in memory stands."""

import json
import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from absl import flags
from etils import epath
from etils.epath import backend, gpath, register

from experiments import flags as shared_flags, launch
from ssl_influence import checkpoints, config as config_lib, event_files, files, metrics, outer_loop
from ssl_influence.reporting import figures
from ssl_influence.serving import classifier, saved_model
from tests.experiments.processes import TINY

CHANGED = ("--model=mlp", "--train_steps=20", "--dataset=digits.1@20-40")


@pytest.fixture(scope="module", autouse=True)
def ram():
    """Lets epath take ram:// as it takes gs://, for TensorFlow to read and write."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpath, "_URI_PREFIXES", (*gpath._URI_PREFIXES, "ram://"))
        patch.setattr(gpath, "_URI_SCHEMES", gpath._URI_SCHEMES | {"ram"})
        patch.setitem(gpath._URI_MAP_ROOT, "ram://", "/ram/")
        patch.setitem(gpath._PREFIX_TO_BACKEND, "ram", backend.tf_backend)
        patch.setitem(register._URI_PREFIXES_TO_CLS, "ram://", gpath.PosixGPath)
        yield


def settings(*changed):
    values = flags.FlagValues()
    shared_flags.define(flag_values=values)
    values(["test", *TINY, *CHANGED, *changed])
    return shared_flags.to_config(flag_values=values)


def train(model_dir, stop_after=None):
    """Begins a run or goes on with it, as a new process does; stops after so many steps, if any."""
    keras.backend.clear_session()
    built = launch.build(settings())
    if stop_after is None:
        assert launch.train(built, model_dir, "experiments.uda_cifar")
        return built
    asked = []

    def should_stop():
        asked.append(None)
        return len(asked) == stop_after

    plain = outer_loop.train
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            outer_loop,
            "train",
            lambda *arguments, **more: plain(*arguments, **{**more, "should_stop": should_stop}),
        )
        assert not launch.train(built, model_dir, "experiments.uda_cifar")
    return built


@pytest.fixture(scope="module")
def runs(ram, tmp_path_factory):
    """{"bucket": a run that was stopped at step 13 and gone on with; "local": one that was not}."""
    bucket, local = "ram://bucket/run", tmp_path_factory.mktemp("local") / "run"
    train(bucket, stop_after=13)
    assert list(checkpoints.list_checkpoints(f"{bucket}/checkpoints")) == [10, 13]
    built = {"bucket": train(bucket), "local": train(local)}
    for name, place in (("bucket", bucket), ("local", local)):
        launch.evaluate(built[name], place)
    return {"bucket": files.path(bucket), "local": local}


def tensors(model_dir):
    path = checkpoints.newest(model_dir / "checkpoints")
    reader = tf.compat.v1.train.NewCheckpointReader(path)
    names = [name for name in reader.get_variable_to_shape_map() if "save_counter" not in name]
    return checkpoints.step_of(path), {name: np.array(reader.get_tensor(name)) for name in names}


def rows(model_dir):
    return [
        {name: value for name, value in row.items() if not name.startswith(("wall_s", "time/"))}
        for row in metrics.read_metrics(model_dir / "metrics.jsonl")
    ]


def test_a_place_in_a_bucket_keeps_its_scheme_and_others_are_pathlibs(tmp_path):
    inside = files.path("gs://bucket/run") / "checkpoints"
    assert str(inside) == str(files.path(inside)) == "gs://bucket/run/checkpoints"
    assert isinstance(inside, epath.Path) and not files.is_local(inside)
    for local in (tmp_path, str(tmp_path), "run", "a:/b", "~/run"):
        assert type(files.path(local)) is type(pathlib.Path(local)) and files.is_local(local)


def test_a_run_in_a_bucket_that_was_stopped_is_the_local_one(runs):
    ours, theirs = tensors(runs["bucket"]), tensors(runs["local"])
    assert ours[0] == theirs[0] == 20 and ours[1].keys() == theirs[1].keys()
    for name, value in ours[1].items():
        assert value.tobytes() == theirs[1][name].tobytes(), name
    assert rows(runs["bucket"]) == rows(runs["local"]) != []
    for name in ("flags.txt", "split.json", "inputs.json", "weights/weights-20.csv"):
        ours, theirs = ((runs[place] / name).read_bytes() for place in ("bucket", "local"))
        assert ours == theirs, name
    assert (runs["local"] / ".lock").exists()
    assert not (runs["bucket"] / ".lock").exists()  # there is no lock to take


def test_stopped_steps_are_cut_from_event_files_and_stay_whole(runs):
    def steps(folder):
        found = sorted(folder.glob("events.out.tfevents.*"))
        records = [tf.data.TFRecordDataset(str(path)).as_numpy_iterator() for path in found]
        events = [tf.compat.v1.Event.FromString(record) for part in records for record in part]
        return [event.step for event in events if event.HasField("summary")]

    logged = [row["step"] for row in rows(runs["local"])]
    assert steps(runs["bucket"] / "tensorboard") == steps(runs["local"] / "tensorboard") == logged
    copies = files.path("ram://bucket/copies")
    copies.mkdir(parents=True)
    for path in (runs["bucket"] / "tensorboard").glob("events.*"):
        (copies / path.name).write_bytes(path.read_bytes())
    event_files.cut(copies, 12)
    assert steps(copies) == [step for step in logged if step <= 12]


def test_results_are_those_of_the_local_run_and_are_kept(runs):
    for name in ("results.jsonl", "summary.json", "flags.txt"):
        ours, theirs = ((runs[place] / "eval" / name).read_text() for place in ("bucket", "local"))
        if name == "results.jsonl":
            ours, theirs = (
                [row for row in map(json.loads, text.splitlines()) if row["step"] % 10 == 0]
                for text in (ours, theirs)
            )
        assert ours == theirs, name
    built = launch.build(settings(), evaluated_in=runs["bucket"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "read", None)  # nothing is computed again
        again = launch.evaluate(built, runs["bucket"], follow_s=0)
    assert again == json.loads((runs["bucket"] / "eval" / "summary.json").read_text())


def test_following_evaluates_what_is_in_the_bucket(runs):
    results = runs["bucket"] / "eval" / "results.jsonl"
    before = results.read_text()
    results.unlink()
    launch.evaluate(launch.build(settings(), runs["bucket"]), runs["bucket"], follow_s=0)
    assert results.read_text() == before


def test_figures_are_drawn_into_the_bucket(runs, tmp_path):
    for draw, name in ((figures.curve, "curve.png"), (figures.weight_histogram, "weights.png")):
        draw(runs["bucket"], runs["bucket"] / name)
        draw(runs["local"], tmp_path / name)
        assert (runs["bucket"] / name).read_bytes() == (tmp_path / name).read_bytes()


def test_predictions_and_exports_are_those_of_the_local_run(runs, tmp_path):
    config = shared_flags.read_flagfile(runs["bucket"] / "flags.txt")
    images = np.random.default_rng(0).integers(0, 255, (5, 8, 8, 1), np.uint8)
    found = {}
    for place, output in (("bucket", "ram://bucket/model"), ("local", tmp_path / "model")):
        loaded = classifier.load(runs[place], config)
        found[place] = loaded.predict(images)
        saved_model.write(loaded, output)
        served = tf.saved_model.load(str(output)).signatures["serving_default"](
            inputs=tf.constant(images)
        )
        np.testing.assert_array_equal(served["probabilities"], found[place][0])
    np.testing.assert_array_equal(found["bucket"][0], found["local"][0])
    with pytest.raises(config_lib.ConfigError, match="not an empty folder"):
        saved_model.write(loaded, "ram://bucket/model")


def test_other_settings_are_refused_in_a_bucket_too(runs):
    with pytest.raises(config_lib.ConfigError, match=r"ram://bucket/run holds a run with other"):
        launch.train(launch.build(settings("--width=3")), runs["bucket"], "experiments.uda_cifar")


def test_a_damaged_checkpoint_is_passed_over_and_its_stamp_tells_of_changes(runs):
    folder = files.path("ram://bucket/damaged")
    folder.mkdir(parents=True)
    for path in (runs["bucket"] / "checkpoints").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    found = checkpoints.list_checkpoints(folder)
    data = folder / "ckpt-20.data-00000-of-00001"
    before = checkpoints.stamp(found[20])
    contents = data.read_bytes()
    data.unlink()  # in memory, what is written to a file that there is comes after its end
    data.write_bytes(contents[:-100])
    assert before != checkpoints.stamp(found[20]) is not None
    assert checkpoints.newest(folder) == found[max(step for step in found if step < 20)]
    data.unlink()
    assert checkpoints.stamp(found[20]) is None


def test_what_tensorflow_says_of_a_bucket_is_an_error_of_the_system_with_a_reason():
    place = "ram://bucket/x"
    with pytest.raises(OSError, match="no room") as caught, files.os_errors(place):
        raise tf.errors.ResourceExhaustedError(None, None, "no room\nat all")
    assert (caught.value.strerror, caught.value.filename) == ("no room", place)
    with pytest.raises(FileNotFoundError) as caught, files.os_errors(place):
        files.path(place).read_bytes()
    assert caught.value.strerror
    with pytest.raises(tf.errors.ResourceExhaustedError), files.os_errors("local"):
        raise tf.errors.ResourceExhaustedError(None, None, "of a device")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("s3://bucket/run", "cannot be reached"),  # a file system that TensorFlow lacks
        ("gcs://bucket/run", "named as gs://bucket/run"),
    ],
)
def test_a_bucket_out_of_reach_is_named_at_once(place, message):
    values = flags.FlagValues()
    flags.DEFINE_string("model_dir", place, "", flag_values=values)
    values(["test"])
    with pytest.raises(config_lib.ConfigError, match=f"--model_dir={place}.*{message}"):
        shared_flags.model_dir(values)
    assert not os.path.exists(place.split("/")[0])
