"""CIFAR-10 and CIFAR-100 as they were released, at https://www.cs.toronto.edu/~kriz/cifar.html."""

import dataclasses
import functools
import io
import pathlib
import pickle
from typing import Any

import numpy as np

from ssl_influence import config
from ssl_influence.data import examples, images as images_lib, names, released

_PIXELS = 32 * 32 * 3


@dataclasses.dataclass(frozen=True)
class _Form:
    """One of the forms that a set was released in.

    Attributes:
      archive: name of the archive.
      folder: name of the folder in it.
      train: names of the files of training images, in order.
      test: name of the file of test images.
      meta: name of the file with the names of the classes.
    """

    archive: str
    folder: str
    train: list[str]
    test: str
    meta: str


_BATCHES = [f"data_batch_{number}" for number in range(1, 6)]
# The binary form comes first: it is preferred.
_FORMS = {
    "cifar10": (
        _Form(
            "cifar-10-binary.tar.gz",
            "cifar-10-batches-bin",
            [f"{batch}.bin" for batch in _BATCHES],
            "test_batch.bin",
            "batches.meta.txt",
        ),
        _Form(
            "cifar-10-python.tar.gz", "cifar-10-batches-py", _BATCHES, "test_batch", "batches.meta"
        ),
    ),
    "cifar100": (
        _Form(
            "cifar-100-binary.tar.gz",
            "cifar-100-binary",
            ["train.bin"],
            "test.bin",
            "fine_label_names.txt",
        ),
        _Form("cifar-100-python.tar.gz", "cifar-100-python", ["train"], "test", "meta"),
    ),
}
# Training images for each test image, per training file.
_TRAIN_PER_TEST = {"cifar10": 1, "cifar100": 5}

_FINE_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach
couch crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster
house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket
rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip
turtle wardrobe whale willow_tree wolf woman worm
"""
# In the order of their labels.
_CLASS_NAMES = {
    "cifar10": [
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ],
    "cifar100": _FINE_CLASSES.split(),
}


def read(
    name: names.DatasetName, place: str | None, settings: config.DataConfig
) -> examples.Collection:
    """Images uint8 [n, 32, 32, 3] with labels, those of CIFAR-100 the fine ones.

    Ids are positions in the archive: data_batch_1 to data_batch_5, each from its beginning. That is
    the order which published lists of ids refer to (those of FixMatch and of TorchSSL), and another
    one than that of TensorFlow Datasets. The binary and the python archive have it in common.

    Args:
      name: its source is "cifar10" or "cifar100".
      place: the archive, its unpacked folder, or a folder that holds either. The binary form is
        taken where there are both.
      settings: how images are brought to a size.

    Raises:
      ConfigError: it is not there, damaged, cut short, or not what the dataset consists of.
    """
    kind, forms = name.source, _FORMS[name.source]
    path = _locate(released.existing(place, f"{forms[0].archive} or its unpacked folder"), forms)
    wanted = {file for form in forms for file in (*form.train, form.test, form.meta)}
    files = released.read_files(path, wanted, released.read_all)
    form = next((form for form in forms if form.train[0] in files), forms[0])
    for file in (*form.train, form.test):
        if file not in files:
            raise config.ConfigError(
                f"{path} holds no {file}: it is not the whole of {form.archive}; get it again."
            )
    parse = _parse_binary if form is forms[0] else _parse_python
    read_batch = functools.partial(parse, kind=kind)
    train = [read_batch(files.pop(file), label=f"{path}: {file}") for file in form.train]
    test = read_batch(files.pop(form.test), label=f"{path}: {form.test}")
    for file, (_, labels) in zip(form.train, train, strict=True):
        if len(labels) != _TRAIN_PER_TEST[kind] * len(test[1]):
            raise config.ConfigError(
                f"{path}: {file} holds {len(labels)} images beside the {len(test[1])} of "
                f"{form.test}, and should hold {_TRAIN_PER_TEST[kind]} for each: one is cut short; "
                "get it again."
            )
    class_names = _CLASS_NAMES[kind]
    if form.meta in files:
        class_names = _class_names(files[form.meta], f"{path}: {form.meta}", form is forms[0], kind)
    parts = {}
    for part, batches in ((examples.TRAIN, train), (examples.TEST, [test])):
        images = np.concatenate([images for images, _ in batches])
        labels = np.concatenate([labels for _, labels in batches])
        if len(wrong := np.flatnonzero((labels < 0) | (labels >= len(class_names)))):
            raise config.ConfigError(
                f"{path}: the label of {part} image {wrong[0]} is {labels[wrong[0]]}, and {kind} "
                f"has {len(class_names)} classes: it is damaged; get it again."
            )
        images = images_lib.fit(images, settings)
        parts[part] = examples.Examples(images, labels.astype(np.int32))
    return examples.Collection(f"{kind}:{place}", class_names, parts)


def _locate(path: pathlib.Path, forms: tuple[_Form, ...]) -> pathlib.Path:
    """The archive or the folder with the batches: the path itself, or what lies in it."""
    if not path.is_dir() or any((path / form.train[0]).is_file() for form in forms):
        return path
    for form in forms:
        for inner in (path / form.folder, path / form.archive):
            if inner.exists():
                return released.inside(path, inner)
    raise config.ConfigError(
        f"{path} holds none of {', '.join(form.archive for form in forms)} nor what is in them: "
        "put the archive there, or name it."
    )


def _parse_binary(data: bytes, *, label: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(images [n, 32, 32, 3], labels [n]); a record: its labels, the fine one last, its pixels."""
    label_bytes = {"cifar10": 1, "cifar100": 2}[kind]
    size = label_bytes + _PIXELS
    if not data or len(data) % size:
        raise config.ConfigError(
            f"{label} has {len(data)} bytes, which is no multiple of the {size} of an image: it is "
            "cut short; get it again."
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, size)
    return _upright(records[:, label_bytes:]), records[:, label_bytes - 1]


def _parse_python(data: bytes, *, label: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(images [n, 32, 32, 3], labels [n]) of a pickled batch."""
    batch = _unpickle(data, label)
    key = {"cifar10": b"labels", "cifar100": b"fine_labels"}[kind]
    pixels, labels = batch.get(b"data"), np.asarray(batch.get(key))
    if not (
        isinstance(pixels, np.ndarray)
        and pixels.dtype == np.uint8
        and pixels.ndim == 2
        and pixels.shape[1] == _PIXELS
        and labels.shape == pixels.shape[:1]
        and np.issubdtype(labels.dtype, np.integer)
    ):
        raise config.ConfigError(
            f"{label} does not hold {_PIXELS} bytes and one of {key.decode()!r} for each image: it "
            "is another file."
        )
    return _upright(pixels), labels


def _upright(pixels: np.ndarray) -> np.ndarray:
    """uint8 [n, 32, 32, 3] of [n, 3 * 32 * 32]: all of red row by row, then green, then blue."""
    return np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _class_names(data: bytes, label: str, is_text: bool, kind: str) -> list[str]:
    expected = len(_CLASS_NAMES[kind])
    try:
        if is_text:
            found = [line.strip() for line in data.decode().splitlines() if line.strip()]
        else:
            key = {"cifar10": b"label_names", "cifar100": b"fine_label_names"}[kind]
            found = [
                text.decode() if isinstance(text, bytes) else str(text)
                for text in _unpickle(data, label).get(key, ())
            ]
    except UnicodeDecodeError as error:
        raise config.ConfigError(f"{label} is no text of class names; get it again.") from error
    if len(set(found)) != expected:
        raise config.ConfigError(
            f"{label} names {len(set(found))} classes, and {kind} has {expected}; get it again."
        )
    return found


class _ArrayUnpickler(pickle.Unpickler):
    """Builds plain Python values and NumPy arrays, nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            # NumPy 2 and later calls the module _core; Python 3 writes bytes by _codecs.
            ("numpy.core.multiarray", "_reconstruct"): _new_array,
            ("numpy._core.multiarray", "_reconstruct"): _new_array,
            ("_codecs", "encode"): _encode_latin1,
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return allowed[module, name]


def _new_array(subtype: type, shape: tuple[int, ...], dtype: bytes) -> np.ndarray:
    """The empty array that a pickled one is restored into."""
    if subtype is not np.ndarray:
        raise pickle.UnpicklingError(f"it asks for an array of type {subtype!r}")
    return np.ndarray(shape, dtype)


def _encode_latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding!r}")
    return text.encode("latin1")


def _unpickle(data: bytes, label: str) -> dict[bytes, Any]:
    try:
        value = _ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # The pickle module names no end of what damaged data may raise.
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise config.ConfigError(
            f"{label} is no file of the released archive ({reason}); get it again."
        ) from error
    if not isinstance(value, dict):
        raise config.ConfigError(f"{label} is no file of the released archive; get it again.")
    return {key.encode() if isinstance(key, str) else key: item for key, item in value.items()}
