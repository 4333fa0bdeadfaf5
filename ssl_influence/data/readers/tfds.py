"""Image and text classification sets of TensorFlow Datasets."""

import contextlib
import dataclasses
import difflib
import os
import re
from collections.abc import Iterator
from concurrent import futures

import numpy as np

from ssl_influence import config
from ssl_influence.data import examples, images, names

_READ_BATCH = 1024

# The splits of each part; of several the first one that there is.
_SPLITS = {
    examples.TRAIN: ("train",),
    examples.UNLABELED: ("unlabelled", "unlabeled", "unsupervised"),
    examples.VALIDATION: ("validation",),
    examples.TEST: ("test",),
}
# Sources whose training part is more than the split of this name: (set, its training part).
_JOINED = {"svhn_cropped_extra": ("svhn_cropped", "train+extra")}
# Unlabeled splits of sets with a name of their own here.
_UNLABELED = {"stl10": {"unlabelled"}, "imdb_reviews": {"unsupervised"}}

# Of IMDb's reviews: what becomes a space, and what goes.
_SPACE = re.compile(r"<br />|<p>|\\n|\\")
_LINK = re.compile(r"<a href=[^>]*>|</a>")


def read(
    name: names.DatasetName, place: str | None, settings: config.DataConfig
) -> examples.Collection:
    """An image or a text classification set of TensorFlow Datasets, prepared first where it is not.

    Its splits train, validation, test and unlabelled (or unsupervised) are the parts, as far as
    there are such. Ids are positions in the prepared files, which TFDS shuffles: another order than
    that of the released ones. Labels -1 are unknown ones.

    Inputs are images where the set has a feature `image_column` that is one, else the texts of the
    feature `text_column`. They are held in memory; where `image_size` or `image_channels` is set,
    only what they leave of images.

    The classes of `imdb_reviews` are neg, 0, and pos, 1; UDA's code has pos 0 and neg 1. By this
    name its reviews come as UDA's code has them (google-research/uda, text/utils): without spaces
    around them and without links, with spaces for line breaks (<br />) and backslashes, and before
    their length is looked at. `tfds:imdb_reviews` has them as they are.

    Args:
      name: its source is the set, where no place is named.
      place: the set, as TFDS calls it: `name`, `name/config`, `name:1.0.0` or `name/config:1.0.0`.
      settings: names of the features with the image or the text and the label, how images are
        decoded, and the folder of prepared sets, which may be a bucket (gs://...).

    Raises:
      ConfigError: there is no such set, it cannot be prepared, it does not hold images or texts and
        one label for each, images differ in size and image_size is not set, a text is not UTF-8, or
        memory may not hold them.
    """
    wanted, train = _JOINED.get(name.source, (place or name.source, "train"))
    full_name = str(dataclasses.replace(name, source=f"{name.source}:{place}") if place else name)
    builder = _opened(full_name, wanted, settings)
    kind = _check_features(builder, wanted, settings)  # before anything is downloaded
    _prepare(builder, full_name, wanted)
    label = builder.info.features[settings.label_column]
    # A builder of TFDS's mock data lists no splits.
    splits = set(builder.info.splits) or {"train", "test"} | _UNLABELED.get(builder.name, set())
    if "train" not in splits:
        raise config.ConfigError(
            f"tfds:{wanted} has no split 'train', only {', '.join(sorted(splits))}: name another."
        )
    chosen = {
        part: next(split for split in candidates if split in splits)
        for part, candidates in _SPLITS.items()
        if splits.intersection(candidates)
    }
    chosen[examples.TRAIN] = train
    read_split = _read_images if kind == "image" else _read_texts
    parts = {part: read_split(builder, split, settings) for part, split in chosen.items()}
    if name.source == "imdb_reviews":
        parts = {part: _without_markup(reviews) for part, reviews in parts.items()}
    return examples.Collection(
        name=name.source,
        class_names=list(label.names or map(str, range(label.num_classes))),
        parts=parts,
    )


def _without_markup(reviews: examples.Examples) -> examples.Examples:
    inputs = np.empty(len(reviews), object)
    inputs[:] = [
        _SPACE.sub(" ", _LINK.sub("", text.strip()).replace("&quot;", '"'))
        for text in reviews.inputs
    ]
    return dataclasses.replace(reviews, inputs=inputs)


def _opened(full_name: str, wanted: str, settings: config.DataConfig):
    """The builder of a set."""
    import tensorflow_datasets as tfds

    # As text: pathlib would take the second slash from gs://bucket.
    data_dir = settings.data_dir and os.path.expanduser(settings.data_dir)
    try:
        return tfds.builder(wanted, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError as error:
        base = wanted.partition("/")[0].partition(":")[0]
        near = difflib.get_close_matches(base, tfds.list_builders(), n=3)
        raise config.ConfigError(
            f"dataset={full_name!r}: TensorFlow Datasets has no {base!r}"
            + (f"; did you mean {' or '.join(near)}?" if near else ".")
        ) from error
    except Exception as error:  # No such config or version, no network: no common base class.
        raise config.ConfigError(
            f"dataset={full_name!r}: TensorFlow Datasets cannot open {wanted!r} "
            f"({_reason(error)}): write name, name/config or name/config:version as its "
            "catalog does."
        ) from error


def _prepare(builder, full_name: str, wanted: str) -> None:
    """Downloads and prepares the files of a set, where they are not."""
    try:
        builder.download_and_prepare()
    except ImportError as error:
        raise config.ConfigError(
            f"dataset={full_name!r} cannot be prepared without the package {error.name!r}, which "
            "TFDS needs: install it with pip and start again."
        ) from error
    except Exception as error:  # Network, disk, checksum, parser: TFDS has no common base class.
        folder = str(builder.data_dir).rpartition(f"/{builder.name}/")[0]
        raise config.ConfigError(
            f"dataset={full_name!r} could not be prepared in data_dir={folder} "
            f"({_reason(error)}). Its files come from {builder.info.homepage}: "
            f"where those can be reached, run `tfds build {wanted} --data_dir=DIR`, copy "
            f"DIR/{builder.name} to {folder}/{builder.name} and start again."
        ) from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _check_features(builder, wanted: str, settings: config.DataConfig) -> str:
    """What the inputs are, "image" or "text".

    Raises:
      ConfigError: there are not one of these and a label of the names that are set.
    """
    import tensorflow as tf
    import tensorflow_datasets as tfds

    features = builder.info.features
    found = dict(features.items()) if isinstance(features, tfds.features.FeaturesDict) else {}
    text = found.get(settings.text_column)
    if isinstance(found.get(settings.image_column), tfds.features.Image):
        kind = "image"
    elif text is not None and (text.shape, getattr(text, "tf_dtype", None)) == ((), tf.string):
        kind = "text"
    else:
        raise _no_feature(
            f"Image called {settings.image_column!r} nor Text called {settings.text_column!r}",
            f"tfds:{wanted}",
            found,
            "image_column or text_column",
        )
    if not isinstance(found.get(settings.label_column), tfds.features.ClassLabel):
        raise _no_feature(
            f"ClassLabel called {settings.label_column!r}", f"tfds:{wanted}", found, "label_column"
        )
    return kind


def _no_feature(what: str, where: str, found: dict, setting: str) -> config.ConfigError:
    listed = ", ".join(f"{key} ({type(value).__name__})" for key, value in found.items())
    return config.ConfigError(
        f"{where} has no {what}, only {listed or 'others'}: name it by {setting}, or name a set "
        "for the classification of images or texts."
    )


def _dataset(builder, split: str, columns: tuple[str, str], decoders=None):
    """(input, label) of each example of a split, in the order of the prepared files."""
    import tensorflow_datasets as tfds

    # Files one after the other: ids are positions, so the order must be that of the files alone.
    read_config = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
    dataset = builder.as_dataset(
        split=split, shuffle_files=False, read_config=read_config, decoders=decoders
    )
    return dataset.map(lambda example: tuple(example[column] for column in columns))


@contextlib.contextmanager
def _naming_damage(where: str, builder) -> Iterator[None]:
    import tensorflow as tf

    try:
        yield
    except tf.errors.OpError as error:
        raise config.ConfigError(
            f"{where} cannot be read from {builder.data_dir} ({_reason(error)}): delete that "
            "folder and prepare the dataset again."
        ) from error


def _check_complete(builder, split: str, read: int, total: int) -> None:
    """Raises ConfigError if not all examples could be read; `total` is negative if not known."""
    if not read or (total > 0 and read != total):
        raise config.ConfigError(
            f"{builder.name}: {read} of {max(total, 1)} examples of the split {split!r} could be "
            f"read from {builder.data_dir}: delete that folder and prepare the dataset again."
        )


def _read_texts(builder, split: str, settings: config.DataConfig) -> examples.Examples:
    """The texts of a split, object [n] of str, in the order of the prepared files."""
    where = f"{builder.info.full_name} {split}"
    dataset = _dataset(builder, split, (settings.text_column, settings.label_column))
    texts, labels, skipped, size = [], [], [], 0
    with _naming_damage(where, builder):
        for number, (data, label) in enumerate(dataset.as_numpy_iterator()):
            size += len(data)
            if size > settings.max_memory_gb * 2**30:
                raise config.ConfigError(
                    f"The texts of {where} take more memory than max_memory_gb="
                    f"{settings.max_memory_gb}: set that higher, or name a smaller set."
                )
            try:
                texts.append(data.decode("utf-8"))
                labels.append(label)
            except UnicodeDecodeError as error:
                fault = f"{where} example {number} is no text in UTF-8 ({error.reason})"
                if settings.on_bad_example == "error":
                    raise config.ConfigError(
                        f"{fault}: leave such examples out by on_bad_example=skip."
                    ) from error
                skipped.append(f"{fault}.")
    _check_complete(builder, split, len(labels) + len(skipped), int(dataset.cardinality()))
    inputs = np.empty(len(texts), object)
    inputs[:] = texts
    return examples.Examples(inputs, np.array(labels, np.int32), skipped=skipped)


def _read_images(builder, split: str, settings: config.DataConfig) -> examples.Examples:
    """The images uint8 [n, H, W, C] of a split, in the order of the prepared files."""
    import tensorflow_datasets as tfds

    where = f"{builder.info.full_name} {split}"
    columns = (settings.image_column, settings.label_column)
    shape = builder.info.features[settings.image_column].shape
    sized = bool(settings.image_size or settings.image_channels)
    if not settings.image_size and None in shape[:2]:
        raise config.ConfigError(
            f"The images of {where} differ in size: bring them to one by image_size."
        )
    skip = {settings.image_column: tfds.decode.SkipDecoding()}
    dataset = _dataset(builder, split, columns, skip if sized else None)
    total = int(dataset.cardinality())  # Negative where not recorded.
    batches = dataset.batch(_READ_BATCH).as_numpy_iterator()
    skipped = []
    if sized:
        # TFDS gives all images of a set the channels that it states.
        channels = settings.image_channels or {1: 1, 3: 3}.get(shape[2])
        settings = dataclasses.replace(settings, image_channels=channels)
        batches = _decoded(batches, where, settings, skipped)
    with _naming_damage(where, builder):
        inputs, labels = _gathered(batches, total, where, settings, builder)
    _check_complete(builder, split, len(labels) + len(skipped), total)
    return examples.Examples(inputs, labels, skipped=skipped)


def _gathered(
    batches: Iterator[tuple[np.ndarray, np.ndarray]],
    total: int,
    where: str,
    settings: config.DataConfig,
    builder,
) -> tuple[np.ndarray, np.ndarray]:
    """(images uint8 [n, H, W, C], labels int32 [n]) of all batches; n is at most `total`."""
    pieces, labels, done = [], [], 0
    for rows, of_rows in batches:
        if not done:
            _check_images(where, rows, max(total, 1), settings, builder)
            if total > 0:
                # Filled in place, so that the peak is one copy of the data and a batch of it.
                pieces = np.empty((total, *rows.shape[1:]), np.uint8)
        if total > 0:
            pieces[done : done + len(rows)] = rows
        else:
            pieces.append(rows)
        labels.append(of_rows.astype(np.int32))
        done += len(rows)
    if not done:
        return np.zeros((0, 1, 1, 1), np.uint8), np.zeros(0, np.int32)
    return pieces[:done] if total > 0 else np.concatenate(pieces), np.concatenate(labels)


def _decoded(
    batches: Iterator[tuple[np.ndarray, np.ndarray]],
    where: str,
    settings: config.DataConfig,
    skipped: list[str],
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The batches with images for their bytes; lines about those left out go to `skipped`."""

    def decode(data: bytes, number: int) -> np.ndarray | config.ConfigError:
        try:
            return images.decode(data, f"{where} example {number}", settings)
        except config.ConfigError as error:
            if settings.on_bad_example == "error":
                raise
            return error

    first = 0
    with futures.ThreadPoolExecutor(max(4, os.cpu_count() or 1), "decode") as pool:
        for rows, labels in batches:
            decoded = list(pool.map(decode, rows.tolist(), range(first, first + len(rows))))
            first += len(rows)
            skipped.extend(str(d) for d in decoded if isinstance(d, config.ConfigError))
            good = [row for row, d in enumerate(decoded) if isinstance(d, np.ndarray)]
            if good:
                yield np.stack([decoded[row] for row in good]), labels[good]


def _check_images(
    where: str, rows: np.ndarray, total: int, settings: config.DataConfig, builder
) -> None:
    if rows.dtype != np.uint8:
        raise config.ConfigError(
            f"The images of {where} are {rows.dtype}: images of bytes (uint8) are needed."
        )
    size = total * rows[0].nbytes / 2**30
    if size > settings.max_memory_gb:
        raise config.ConfigError(
            f"The {total} images of {where} take {size:.2f} GB of memory, and max_memory_gb="
            f"{settings.max_memory_gb}: set that higher, make them smaller by image_size, or name "
            f"the prepared files as tfrecord:{builder.data_dir}, which are read when asked for."
        )
