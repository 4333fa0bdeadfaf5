"""Images in TFRecord files: a tf.train.Example for each, read when it is asked for."""

import array
import contextlib
import glob
import hashlib
import mmap
import os
import pathlib
import re
import struct
from collections.abc import Sequence

import numpy as np

from ssl_influence import config
from ssl_influence.data import crc32c, examples, images, names, released

# A record: its length (8 bytes), the masked checksum of that (4), the data, their checksum (4).
_HEAD, _TAIL = 12, 4
_READ_BATCH = 16  # records
_NAME = re.compile(r"\.tfrecords?(-\d{5,}-of-\d{5,})?$")
# A part's name as a folder, or as a word of the file's name (cifar10-train.tfrecord).
_PART_NAMES = {**examples.PART_NAMES, "unlabelled": examples.UNLABELED}
_PART = re.compile(rf"(?:^|[-_./])({'|'.join(_PART_NAMES)})(?=[-_./])", re.IGNORECASE)
_COLUMNS = {"image": "image/encoded", "label": "image/class/label"}
_RAW = ("height", "width", "depth")


def read(
    name: names.DatasetName, place: str | None, settings: config.DataConfig
) -> examples.Collection:
    """The images of TFRecord files, in the order of the files' names and of the records in them.

    Each record is a tf.train.Example with the bytes of an image file in `settings.image_column` and
    one number in `settings.label_column` (of `image/encoded` and `image/class/label`, where those
    are "image" and "label" and not there). Bytes beside the numbers `height`, `width` and `depth`
    are the pixels themselves, row by row. A label -1 is an unknown one; in the part "unlabeled" it
    may be missing.

    The classes are named by the lines of `labels.txt` or of `<label column>.labels.txt` beside the
    files, else by their numbers from 0 to the largest.

    Every record is read once here, for its label and its checksum. What stays in memory is where
    each begins and ends, 12 bytes, and its label, 4.

    Args:
      name: of the dataset.
      place: a file; a folder, with the files *.tfrecord, *.tfrecords and *.tfrecord-00000-of-00001
        in it or in folders within; or a pattern such as /data/*-train.rec. A file is of the part
        that its own name or its folder's says (train, test, validation, val or unlabeled, in any
        case, between any of -_./); of train if they say none and no other file's says train. Files
        of one part alone are of train where they were not found by a folder.
      settings: names of the columns, and how images are decoded.

    Raises:
      ConfigError: there is no such file; one is no TFRecord file, cut short, or damaged; a feature
        is missing; a label is none. The message names the file and the record.
    """
    root, files = _find(place)
    parts = {}
    for path in files:
        parts.setdefault(_part(path.relative_to(root)), []).append(path)
    if None in parts and examples.TRAIN in parts:
        raise config.ConfigError(
            f"{parts[None][0]} names no part ({', '.join(_PART_NAMES)}), and {parts['train'][0]} "
            "does: rename it, or move it away."
        )
    parts = {part or examples.TRAIN: paths for part, paths in parts.items()}
    if len(parts) == 1 and not pathlib.Path(place).is_dir():
        parts = {examples.TRAIN: files}
    where = f"{name.source}:{place}"
    shards = {part: _Records(root, paths, part, settings) for part, paths in parts.items()}
    class_names = _class_names(root, files, settings, shards)
    found = {}
    for part, records in shards.items():
        if len(wrong := np.flatnonzero(records.labels >= len(class_names))):
            raise config.ConfigError(
                f"{where}: {records[wrong[0]]} has the label {records.labels[wrong[0]]}, and "
                f"{len(class_names)} classes are named: mend the label or the list of names."
            )
        found[part] = images.examples_of(
            records.image_file, records, records.labels, records.stamp, settings, where=where
        )
    return examples.Collection(where, class_names, found)


def _find(place: str) -> tuple[pathlib.Path, list[pathlib.Path]]:
    """(the folder that all lie in, the files in the order of their paths below it)."""
    path = pathlib.Path(place)
    if path.is_dir():
        root = path
        found = [p for p in path.rglob("*") if _NAME.search(p.name) and p.is_file()]
    elif path.is_file():
        root, found = path.parent, [path]
    else:
        fixed = list(path.parts)
        while fixed and not pathlib.Path(*fixed).is_dir():
            fixed.pop()
        root = pathlib.Path(*fixed)
        found = [pathlib.Path(p) for p in glob.glob(str(path), recursive=True)]
        found = [p for p in found if p.is_file()]
    if not found:
        raise config.ConfigError(
            f"There is no TFRecord file at {path}: name a file, a folder with *.tfrecord, "
            "*.tfrecords or *.tfrecord-00000-of-00001, or a pattern of files."
        )
    for file in found:
        released.inside(root, file)
    return root, sorted(found, key=lambda p: os.fsencode(p.relative_to(root).as_posix()))


def _part(path: pathlib.PurePath) -> str | None:
    """The part that a path, relative to the folder of the data, names; None if it names none."""
    found = _PART.findall(path.as_posix())
    return _PART_NAMES[found[-1].lower()] if found else None


def _class_names(
    root: pathlib.Path,
    files: Sequence[pathlib.Path],
    settings: config.DataConfig,
    shards: "dict[str, _Records]",
) -> list[str]:
    folders = dict.fromkeys([root, *(file.parent for file in files)])
    for folder in folders:
        for file in ("labels.txt", f"{settings.label_column.replace('/', '_')}.labels.txt"):
            path = folder / file
            if not path.is_file():
                continue
            try:
                text = released.inside(root, path).read_text(encoding="utf-8-sig")
            except UnicodeDecodeError as error:
                raise config.ConfigError(f"{path} is no text in UTF-8: mend it.") from error
            named = [line.strip() for line in text.splitlines() if line.strip()]
            if len(set(named)) != len(named) or not named:
                raise config.ConfigError(
                    f"{path} names {len(named)} classes, {len(set(named))} of them different: one "
                    "name a line is expected, in the order of the labels."
                )
            return named
    largest = max(int(records.labels.max(initial=0)) for records in shards.values())
    return [str(c) for c in range(largest + 1)]


class _BadRecordError(Exception):
    """A record that cannot be used. The message goes on after the record's name."""


class _Records(Sequence):
    """The records of a part; as a sequence, what messages call each of them.

    Attributes:
      labels: int32 [n].
      stamp: a digest of the checksums of all records.
    """

    def __init__(
        self,
        root: pathlib.Path,
        paths: Sequence[pathlib.Path],
        part: str,
        settings: config.DataConfig,
    ):
        """Reads every record once.

        Raises:
          ConfigError: one cannot be had, or there is none.
        """
        self._root, self._part, self._settings = root, part, settings
        self._files = [path.relative_to(root).as_posix() for path in paths]
        digest = hashlib.sha256()
        pieces = [_index(path, digest) for path in paths]
        # Where each record's data begin in its file, and how many bytes they are.
        self._offsets, self._sizes = (
            np.concatenate([piece[i] for piece in pieces]) for i in range(2)
        )
        # The number of each file's first record; files without a record share theirs with the next.
        self._starts = np.cumsum([0] + [len(piece[0]) for piece in pieces])
        self.stamp = digest.hexdigest()
        if not len(self):
            raise config.ConfigError(
                f"{paths[0]} holds no record"
                + (f", nor do the {len(paths) - 1} others of its part" if len(paths) > 1 else "")
                + ": write it again."
            )
        self.labels = self._read_labels()

    def __len__(self):
        return len(self._offsets)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        file, record = self._place(range(len(self))[index])
        return f"{file} record {record}"

    def _place(self, row: int) -> tuple[str, int]:
        """(file, number of the record in it)."""
        shard = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._files[shard], int(row - self._starts[shard])

    def image_file(self, row: int) -> bytes:
        """The bytes of the record's image file; for pixels those of a PGM or PPM file.

        Raises:
          ConfigError: the data differ from their checksum, or hold no image.
          OSError: the file cannot be read.
        """
        try:
            return _image_file(_features(self._data(row)), self._settings)
        except _BadRecordError as error:
            raise self._error(row, error) from error

    def _error(self, row: int, reason: object) -> config.ConfigError:
        return config.ConfigError(f"{self._root / self[row]} {reason}")

    def _data(self, row: int) -> bytes:
        """The data of the record, compared with their checksum."""
        size = int(self._sizes[row])
        descriptor = os.open(self._root / self._place(row)[0], os.O_RDONLY)
        try:
            data = os.pread(descriptor, size + _TAIL, int(self._offsets[row]))
        finally:
            os.close(descriptor)
        if len(data) != size + _TAIL:
            raise self._error(row, "is cut short: the file has changed; start again.")
        data, stored = data[:size], int.from_bytes(data[size:], "little")
        if crc32c.masked(crc32c.crc32c(data)) != stored:
            raise self._error(row, "is damaged: its data have another checksum; get it again.")
        return data

    def _read_labels(self) -> np.ndarray:
        """int32 [n], from the data of all records in turn."""
        import tensorflow as tf

        labels, row = np.empty(len(self), np.int32), 0
        # Here and not in `_data`, TensorFlow compares the checksums: several times as fast.
        paths = [str(self._root / file) for file in self._files]
        dataset = tf.data.TFRecordDataset(paths, buffer_size=1 << 20).batch(_READ_BATCH)
        try:
            for batch in dataset.as_numpy_iterator():
                for data in batch:
                    labels[row] = _label(_features(data), self._part, self._settings)
                    row += 1
        except _BadRecordError as error:
            raise self._error(row, error) from error
        except tf.errors.DataLossError as error:
            for damaged in range(row, len(self)):
                self._data(damaged)  # raises; TensorFlow does not say which record it was
            reason = error.message.splitlines()[0]
            raise self._error(row, f"or one after it cannot be read: {reason}.") from error
        return labels


def _index(path: pathlib.Path, digest: "hashlib._Hash") -> tuple[np.ndarray, np.ndarray]:
    """(offset int64 [n], size uint32 [n]) of the data in a file; digests their checksums."""
    offsets, sizes = array.array("q"), array.array("I")
    start, total = 0, path.stat().st_size
    with contextlib.ExitStack() as stack:
        stack.enter_context(released.naming_damage(path))
        file = stack.enter_context(open(path, "rb"))
        if total:  # An empty file cannot be mapped.
            view = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        while start < total:
            if total - start < _HEAD:
                raise _cut(path, len(offsets), start, total)
            length, check = struct.unpack_from("<QI", view, start)
            if crc32c.masked(crc32c.crc32c(view[start : start + 8])) != check:
                raise config.ConfigError(_no_record(path, len(offsets), view[:2]))
            end = start + _HEAD + length + _TAIL
            if end > total:
                raise _cut(path, len(offsets), start, total)
            offsets.append(start + _HEAD)
            sizes.append(length)
            digest.update(view[end - _TAIL : end])
            start = end
    digest.update(b"end of file")
    return np.array(offsets, np.int64), np.array(sizes, np.uint32)


def _cut(path: pathlib.Path, record: int, start: int, total: int) -> config.ConfigError:
    return config.ConfigError(
        f"{path} record {record}, which begins at byte {start}, is cut short: the file ends after "
        f"{total} bytes; get it again."
    )


def _no_record(path: pathlib.Path, record: int, begin: bytes) -> str:
    if begin == b"\x1f\x8b" and not record:
        return f"{path} is compressed, and its records cannot be had one by one: gunzip it first."
    if not record:
        return f"{path} is no TFRecord file: it does not begin with a length and its checksum."
    return f"{path} is damaged: the length of record {record} has another checksum; get it again."


def _features(data: bytes):
    """The features of a record, by their names.

    Raises:
      _BadRecordError: the data are no tf.train.Example.
    """
    import tensorflow as tf
    from google.protobuf import message

    try:
        return tf.train.Example.FromString(data).features.feature
    except message.DecodeError as error:
        raise _BadRecordError("is no tf.train.Example: write it as one.") from error


def _column(features, kind: str, settings: config.DataConfig) -> str:
    """The name of the feature with the image or the label."""
    column = getattr(settings, f"{kind}_column")
    common = _COLUMNS[kind]
    return common if column == kind and column not in features and common in features else column


def _label(features, part: str, settings: config.DataConfig) -> int:
    column = _column(features, "label", settings)
    values = features[column].int64_list.value if column in features else ()
    if len(values) == 1 and -1 <= values[0] < 2**31:
        return values[0]
    absent = column not in features or features[column].WhichOneof("kind") is None
    if absent and part == examples.UNLABELED:
        return -1
    raise _BadRecordError(
        f"has no label: one int64 from -1 up is expected as {column!r}, of the features "
        f"{_listed(features)}; name another one by label_column."
    )


def _image_file(features, settings: config.DataConfig) -> bytes:
    column = _column(features, "image", settings)
    values = features[column].bytes_list.value if column in features else ()
    if len(values) != 1:
        raise _BadRecordError(
            f"has no image: the bytes of one are expected as {column!r}, of the features "
            f"{_listed(features)}; name another one by image_column."
        )
    sizes = [sum(features[side].int64_list.value) if side in features else 0 for side in _RAW]
    # Files with encoded images often state their sizes too; pixels have exactly that many bytes.
    if min(sizes) < 1 or len(values[0]) != np.prod(sizes, dtype=object):
        return values[0]
    if sizes[2] not in (1, 3):
        raise _BadRecordError(f"has the depth {sizes[2]}: 1 or 3 is expected.")
    return _as_file(np.frombuffer(values[0], np.uint8).reshape(sizes))


def _listed(features) -> str:
    return ", ".join(repr(name) for name in sorted(features)) or "(none)"


def _as_file(image: np.ndarray) -> bytes:
    """The bytes of a PGM or PPM file of an image, uint8 [H, W, C] with C 1 or 3."""
    height, width, channels = image.shape
    return b"P%d %d %d 255\n" % (5 if channels == 1 else 6, width, height) + image.tobytes()
