"""Data that cannot work, of every kind that users have: one line that names the place, or skipped.

A case is a function that makes the data in a folder and returns what names it. What is said must
match the case's pattern, under `on_bad_example="skip"` too, unless the case is one bad example
among good ones: then that one is left out.
"""

import io
import os
import pathlib
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from ssl_influence import config
from ssl_influence.data import names, rows
from ssl_influence.data.readers import folder, npz, table

# pytest puts its own filters of warnings in the place of the module's.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:PIL"),
    pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning"),
]

READERS = {"folder": folder, "npz": npz, "csv": table, "tsv": table}


class Case(NamedTuple):
    """Malformed data.

    Attributes:
      id: of the test.
      kind: of the source.
      make: a folder -> the place, of which messages must say the whole.
      says: pattern of the message.
      settings: of DataConfig.
      good: how many rows stay under "skip"; None: it is an error under either.
    """

    id: str
    kind: str
    make: Callable[[pathlib.Path], pathlib.Path]
    says: str
    settings: dict = {}
    good: int | None = None


def encoded(image, file_format="PNG", **options):
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


NOISE = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
RGB = Image.fromarray(NOISE)
GOOD = encoded(RGB)


def png_header(width, height):
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n\0\0\0\r" + body + struct.pack(">I", zlib.crc32(body))


def changed(data, place, value):
    return data[:place] + bytes([value]) + data[place + 1 :]


# name -> the file, and what is said of it.
BAD_IMAGES = {
    "zero bytes": (b"", "is empty"),
    "one byte": (b"\x89", "not an image"),
    "text": (b"not an image, but a note\n", "not an image"),
    "web page": (b"<!DOCTYPE html><html><h1>404 Not Found</h1></html>", "not an image"),
    "vector graphics": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "not an image"),
    "pdf": (b"%PDF-1.4\n%%EOF\n", "not an image"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", "not an image"),
    "git lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "not an image",
    ),
    "zip": (b"PK\x05\x06" + bytes(18), "not an image"),
    "zeros": (bytes(500), "not an image"),
    "random bytes": (np.random.default_rng(1).bytes(500), "not an image"),
    "icon": (encoded(RGB, "ICO"), "not an image"),
    "png signature alone": (GOOD[:8], "not an image|damaged"),
    "png header alone": (GOOD[:33], "damaged"),
    "png cut at half": (GOOD[: len(GOOD) // 2], "damaged or cut short"),
    "png with a flipped header": (changed(GOOD, 20, 255), "not an image|damaged"),
    "png with a flipped pixel": (changed(GOOD, 60, GOOD[60] ^ 255), "damaged"),
    "png in text mode": (GOOD.replace(b"\r\n", b"\n"), "not an image"),
    "png of no width": (png_header(0, 8), "not an image|damaged"),
    "jpeg cut at half": (encoded(RGB, "JPEG")[:400], "damaged or cut short"),
    "jpeg start alone": (b"\xff\xd8\xff\xe0", "not an image|damaged"),
    "gif cut at half": (encoded(RGB, "GIF")[:-60], "damaged or cut short"),
    "webp cut at half": (encoded(RGB, "WEBP")[:60], "not an image|damaged"),
    "bmp cut at half": (encoded(RGB, "BMP")[:100], "damaged or cut short"),
    "tiff cut at half": (encoded(RGB, "TIFF")[:-100], "damaged or cut short"),
    "ppm cut at half": (encoded(RGB, "PPM")[:100], "damaged or cut short"),
    "ppm without numbers": (b"P6\nwide high 255\n", "not an image|damaged"),
    "tiff of floats": (encoded(Image.new("F", (8, 8)), "TIFF"), "pixels of type F"),
    "tiff of 32 bits": (encoded(Image.new("I", (8, 8)), "TIFF"), "pixels of type I"),
    "bomb": (png_header(60_000, 60_000) + GOOD[33:], "more than .* pixels"),
    "bomb that pillow warns of": (png_header(10_000, 10_000) + GOOD[33:], "more than .* pixels"),
    "another size": (encoded(RGB.resize((9, 8))), "8x9 .*8x8.*--image_size"),
    "gray": (encoded(RGB.convert("L")), "1 channels.* 3.*--image_channels"),
}


def write(root, files):
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


def folder_with(data):
    return lambda tmp: write(tmp, {"cat/1.png": GOOD, "cat/2 b.png": data, "dog/1.png": GOOD})


def list_with(data):
    return lambda tmp: (
        write(
            tmp,
            {
                "a.png": GOOD,
                "b.png": data,
                "c.png": GOOD,
                "l.csv": b"image,label\nc.png,0\nb.png,1\na.png,1\n",
            },
        )
        / "l.csv"
    )


def folders(*paths, empty=(), links=(), root=""):
    """Good images at these paths, empty folders, and links (from, to)."""

    def make(tmp):
        write(tmp, {path: GOOD for path in paths})
        for path in empty:
            (tmp / path).mkdir(parents=True)
        for source, target in links:
            os.symlink(target, tmp / source)
        return tmp / root

    return make


def pipe(tmp):
    os.mkfifo(folder_with(GOOD)(tmp) / "cat" / "3.png")
    return tmp


def locked(path):
    """The folder of two classes with one thing in it that may not be read."""

    def make(tmp):
        if os.geteuid() == 0:
            pytest.skip("root may read everything")
        os.chmod(folder_with(GOOD)(tmp) / path, 0)
        return tmp

    return make


FOLDERS = [
    *(
        Case(f"folder, {name}", "folder", folder_with(data), rf"'cat/2 b\.png'.*({says})", {}, 2)
        for name, (data, says) in BAD_IMAGES.items()
    ),
    *(
        Case(
            f"list, {name}",
            "csv",
            list_with(BAD_IMAGES[name][0]),
            rf"'b\.png'.*({BAD_IMAGES[name][1]})",
            {},
            2,
        )
        for name in (
            "zero bytes",
            "text",
            "png cut at half",
            "tiff of floats",
            "bomb",
            "another size",
        )
    ),
    Case("no folder", "folder", lambda tmp: tmp / "nowhere", "there is no folder"),
    Case("a file", "folder", lambda tmp: write(tmp, {"f": b""}) / "f", "there is no folder"),
    Case("nothing in it", "folder", folders(empty=["d"], root="d"), "has no image"),
    Case(
        "no image in it",
        "folder",
        lambda tmp: write(tmp, {"a.txt": b"", ".b.png": GOOD}),
        "no image",
    ),
    Case(
        "empty class",
        "folder",
        folders("a/1.png", empty=["b c"]),
        "'b c/' is a class folder without",
    ),
    Case(
        "class of other files",
        "folder",
        lambda tmp: write(tmp, {"a/1.png": GOOD, "b/1.heic": b"x", "b/.1.png": GOOD}),
        "'b/' is a class folder without an image",
    ),
    Case(
        "class of empty folders",
        "folder",
        folders("a/1.png", empty=["b/c/d"]),
        "'b/' is a class folder without",
    ),
    Case("empty train", "folder", folders("test/a/1.png", empty=["train"]), "'train/' is empty"),
    Case("empty test", "folder", folders("train/a/1.png", empty=["test"]), "'test/' is empty"),
    Case(
        "empty class of test",
        "folder",
        folders("train/a/1.png", "test/a/1.png", empty=["test/b"]),
        "'test/b/' is a class folder without",
    ),
    Case(
        "empty folders of unlabeled",
        "folder",
        folders("train/a/1.png", empty=["unlabeled/a"]),
        "the unlabeled part has no image",
    ),
    Case(
        "two folders of validation",
        "folder",
        folders("train/a/1.png", "val/a/1.png", "validation/a/1.png"),
        "'validation/' and 'val/' are one part",
    ),
    Case(
        "train twice",
        "folder",
        folders("train/a/1.png", "Train/a/1.png"),
        "'train/' and 'Train/' are one part",
    ),
    Case(
        "a class beside parts",
        "folder",
        folders("train/a/1.png", "bird/1.png"),
        "'bird/' lies beside folders of parts",
    ),
    Case(
        "an image beside parts",
        "folder",
        folders("train/a/1.png", "1.png"),
        "'1.png' lies beside folders of parts",
    ),
    Case("classes of other case", "folder", folders("Cat/1.png", "cat/1.png"), "'Cat'.*'cat'"),
    Case(
        "classes of other normalization",
        "folder",
        folders("\u00e9/1.png", "e\u0301/1.png"),
        r"'\\xe9'.*differ in case|'e\\u0301'.*differ in case",
    ),
    Case("link to itself", "folder", folders("a/1.png", links=[("a/l", "l")]), "symbolic links"),
    Case(
        "link to its folder",
        "folder",
        folders("a/1.png", links=[("a/l", ".")]),
        "'a/l' is a symbolic link that leads in a circle",
    ),
    Case(
        "link to the root",
        "folder",
        folders("a/1.png", links=[("a/l", "..")]),
        "'a/l' is a symbolic link that leads in a circle",
    ),
    Case(
        "links to each other",
        "folder",
        folders("a/1.png", "b/1.png", links=[("a/l", "../b"), ("b/l", "../a")]),
        "'a/l/l' is a symbolic link that leads in a circle",
    ),
    Case(
        "link to a folder outside",
        "folder",
        folders("in/a/1.png", "out/1.png", links=[("in/b", "../out")], root="in"),
        "'b' is a symbolic link that leads out of the folder",
    ),
    Case(
        "link to an image outside",
        "folder",
        folders("in/a/1.png", "out.png", links=[("in/a/2.png", "../../out.png")], root="in"),
        "'a/2.png' is a symbolic link that leads out of the folder",
    ),
    Case(
        "link to nothing",
        "folder",
        folders("a/1.png", "a/3.png", links=[("a/2.png", "gone.png")]),
        "'a/2.png' cannot be read: No such file",
        good=2,
    ),
    Case("pipe", "folder", pipe, "'cat/3.png' cannot be read: it is not a regular file", good=3),
    Case("locked image", "folder", locked("cat/1.png"), "'cat/1.png' cannot be read", good=2),
    Case("locked class", "folder", locked("cat"), "'cat/' cannot be listed"),
]


IMAGES = np.stack([NOISE] * 4)
LABELS = np.array([0, 1, 0, 1])
VECTORS = np.arange(8, dtype=np.float32).reshape(4, 2)


def arrays(**given):
    def make(tmp):
        np.savez(tmp / "d.npz", **given)
        return tmp / "d.npz"

    return make


def images_and(**given):
    return arrays(**{"images": IMAGES, "labels": LABELS, **given})


def npy(array, version=(1, 0)):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version, allow_pickle=True)
    return file.getvalue()


def members(*pairs, **options):
    """A zip of these names and contents."""

    def make(tmp):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of two members of one name
            with zipfile.ZipFile(tmp / "d.npz", "w", **options) as file:
                for name, data in pairs:
                    file.writestr(name, data)
        return tmp / "d.npz"

    return make


def damaged_zip(change, make=images_and()):  # noqa: B008
    def make_damaged(tmp):
        path = make(tmp)
        path.write_bytes(change(path.read_bytes()))
        return path

    return make_damaged


def file_of(data, name="d.npz"):
    return lambda tmp: write(tmp, {name: data}) / name


def header_of(shape, data=b"", descr="|u1"):
    """An .npy file whose header says this shape."""
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header + data


def vectors_with(value):
    vectors = VECTORS.copy()
    vectors[2, 1] = value
    return arrays(inputs=vectors, labels=LABELS)


LABELS_NPY = ("labels.npy", npy(LABELS))
NPZ = [
    Case("no file", "npz", lambda tmp: tmp / "gone.npz", "cannot be read: No such file"),
    Case("a folder", "npz", lambda tmp: tmp, "cannot be read: Is a directory"),
    Case("empty file", "npz", file_of(b""), "is no .npz file"),
    Case("text file", "npz", file_of(b"text"), "is no .npz file"),
    Case("an npy file", "npz", file_of(npy(IMAGES)), "is no .npz file.*numpy.savez"),
    Case("zip cut at half", "npz", damaged_zip(lambda data: data[: len(data) // 2]), "is no .npz"),
    Case(
        "zip without its start",
        "npz",
        damaged_zip(lambda data: data[300:]),
        "is no .npz|cannot be read",
    ),
    Case(
        "flipped pixel",
        "npz",
        damaged_zip(lambda d: changed(d, 400, d[400] ^ 255)),
        "'images' cannot be",
    ),
    Case("empty zip", "npz", members(), "has no array of inputs, only none at all"),
    Case("no npy in it", "npz", members(("images.txt", b"1")), "has no array of inputs"),
    Case(
        "unknown names",
        "npz",
        arrays(foo=IMAGES, bar=LABELS),
        "no array of inputs, only bar, foo: ",
    ),
    Case(
        "labels alone",
        "npz",
        arrays(labels=LABELS),
        "labels 'labels' but not.*'images' or 'inputs'",
    ),
    Case(
        "other labels",
        "npz",
        images_and(y_test=LABELS),
        "labels 'y_test' but not their inputs 'x_test'",
    ),
    Case("inputs twice", "npz", images_and(x_train=IMAGES), "both 'x_train' and 'images'"),
    Case(
        "array twice",
        "npz",
        members(("images.npy", npy(IMAGES)), ("images.npy", npy(IMAGES)), LABELS_NPY),
        "two arrays called 'images'",
    ),
    Case("no header", "npz", members(("images.npy", b""), LABELS_NPY), "'images' cannot be read"),
    Case(
        "other magic",
        "npz",
        members(("images.npy", b"x" * 99), LABELS_NPY),
        "'images' cannot be read",
    ),
    Case(
        "header cut",
        "npz",
        members(("images.npy", npy(IMAGES)[:20]), LABELS_NPY),
        "'images' cannot be",
    ),
    Case(
        "array cut",
        "npz",
        members(("images.npy", npy(IMAGES)[:-9]), LABELS_NPY),
        "'images' is damaged",
    ),
    Case(
        "array too long",
        "npz",
        members(("images.npy", npy(IMAGES) + b"more"), LABELS_NPY),
        "'images' is damaged",
    ),
    Case(
        "header that runs",
        "npz",
        members(("images.npy", header_of("exit(3)", bytes(9))), LABELS_NPY),
        "'images' cannot be read",
    ),
    Case(
        "negative shape",
        "npz",
        members(("images.npy", header_of("(-1, -4, 2, 1)", bytes(8))), LABELS_NPY),
        "'images' is damaged",
    ),
    Case(
        "shape beyond the file",
        "npz",
        members(
            ("images.npy", header_of("(10**5, 10**5, 10**5)".replace("10**5", "100000"))),
            LABELS_NPY,
        ),
        "'images' is damaged.*needs 1000000000000000",
    ),
    Case(
        "unknown type",
        "npz",
        members(("images.npy", header_of("(1, 1)", b"\0", "|q9")), LABELS_NPY),
        "'images' cannot be read",
    ),
    Case(
        "zip bomb",
        "npz",
        members(
            ("images.npy", header_of("(30, 1000, 1000)", bytes(30_000_000))),
            LABELS_NPY,
            compression=zipfile.ZIP_DEFLATED,
        ),
        r"'images' has shape \(30, 1000, 1000\).*max_memory_gb=0.01",
        {"max_memory_gb": 0.01},
    ),
    Case(
        "objects", "npz", images_and(images=np.array([IMAGES, 1], object)), "'images' holds pickled"
    ),
    Case(
        "labels of objects",
        "npz",
        images_and(labels=LABELS.astype(object)),
        "'labels' holds pickled",
    ),
    Case(
        "names of objects",
        "npz",
        images_and(class_names=np.array(["a", "b"], object)),
        "'class_names' holds",
    ),
    Case(
        "structured", "npz", images_and(images=np.zeros(4, "u1,u1")), "'images' are .*must be uint8"
    ),
    Case(
        "images of floats",
        "npz",
        images_and(images=IMAGES / 255),
        r"'images' are float64 .*astype\('uint8'\)",
    ),
    Case("images of int64", "npz", images_and(images=IMAGES.astype(int)), "'images' are int64"),
    Case("images of bools", "npz", images_and(images=IMAGES > 9), "'images' are bool"),
    Case(
        "channels first",
        "npz",
        images_and(images=np.moveaxis(IMAGES, 3, 1)),
        r"\(4, 3, 8, 8\).*moveaxis",
    ),
    Case(
        "four channels",
        "npz",
        images_and(images=np.zeros((4, 8, 8, 4), "u1")),
        r"'images'.*x\[\.\.\., :3\]",
    ),
    Case("no pixels", "npz", images_and(images=np.zeros((4, 0, 8, 3), "u1")), "at least one pixel"),
    Case("one axis", "npz", images_and(images=np.zeros(4, "u1")), r"'images' are uint8 \(4,\)"),
    Case("no axis", "npz", images_and(images=np.uint8(4)), "'images'"),
    Case(
        "flat images",
        "npz",
        images_and(images=IMAGES.reshape(4, -1)),
        r"'images' are uint8 \(4, 192\)",
    ),
    Case("five axes", "npz", images_and(images=IMAGES[None]), r"'images' are uint8 \(1, 4, 8"),
    Case("texts", "npz", images_and(images=np.array(["a"] * 4)), "'images' are <U1"),
    Case(
        "complex vectors",
        "npz",
        arrays(inputs=VECTORS * 1j, labels=LABELS),
        "'inputs' are complex64",
    ),
    Case(
        "vectors of nothing",
        "npz",
        arrays(inputs=VECTORS[:, :0], labels=LABELS),
        "at least one entry",
    ),
    Case(
        "fewer labels",
        "npz",
        images_and(labels=LABELS[:3]),
        r"'labels' are int64 \(3,\).*'images' has 4",
    ),
    Case(
        "more labels",
        "npz",
        images_and(labels=np.arange(9)),
        r"'labels' are int64 \(9,\).*'images' has 4",
    ),
    Case("one-hot", "npz", images_and(labels=np.eye(4)), "'labels'.*argmax"),
    Case("labels of floats", "npz", images_and(labels=LABELS * 1.0), "'labels' are float64"),
    Case("labels of texts", "npz", images_and(labels=np.array(list("abab"))), "'labels' are <U1"),
    Case("one label", "npz", images_and(labels=np.int64(1)), r"'labels' are int64 \(\)"),
    Case(
        "label below -1", "npz", images_and(labels=LABELS - 2), "the label -2 in row 0 of 'labels'"
    ),
    Case(
        "huge label",
        "npz",
        images_and(labels=LABELS * 10**9),
        "the label 1000000000 in row 1 of 'labels'",
    ),
    Case(
        "label without name",
        "npz",
        images_and(class_names=["a"]),
        "label 1 in row 1 of 'labels' has no name",
    ),
    Case("a name twice", "npz", images_and(class_names=["a", "a"]), "'class_names' has 'a' twice"),
    Case("numbers as names", "npz", images_and(class_names=[1, 2]), "'class_names' is int64"),
    Case("no names", "npz", images_and(class_names=np.zeros(0, "U1")), "'class_names' is <U1"),
    Case("nan", "npz", vectors_with(np.nan), "row 2 of 'inputs' holds nan", good=3),
    Case("infinity", "npz", vectors_with(-np.inf), "row 2 of 'inputs' holds -inf", good=3),
    Case(
        "beyond float32",
        "npz",
        arrays(inputs=np.array([[1.0], [1e39]]), labels=LABELS[:2]),
        r"row 1 of 'inputs' holds 1e\+39",
        good=1,
    ),
]


def csv_case(name, text, says, good=None, kind="csv", **settings):
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    return Case(f"{kind}, {name}", kind, file_of(data, f"d.{kind}"), says, settings, good)


def row_case(name, row, says, columns="text,label", good_row="fine,1", **settings):
    """A csv of four good rows, with a bad one in line 4."""
    lines = [columns, good_row, good_row, row, good_row, good_row]
    return csv_case(name, "\n".join(lines), f"line 4.*{says}", 4, **settings)


def tsv_case(name, row, says, columns="text\tlabel", good_row="fine\t1", **settings):
    return row_case(name, row, says, columns, good_row, kind="tsv", **settings)


def list_of(*lines, files=("a.png", "b.png", "c.png")):
    def make(tmp):
        text = "\n".join(["image,label", *lines]).encode()
        return write(tmp, {**{path: GOOD for path in files}, "data.csv": text}) / "data.csv"

    return make


def locked_table(tmp):
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    path = file_of(b"text,label\na,1\n", "d.csv")(tmp)
    os.chmod(path, 0)
    return path


def list_with_folder(tmp):
    (tmp / "b.png").mkdir()
    return list_of("a.png,1", "b.png,0", "c.png,1", files=("a.png", "c.png"))(tmp)


VECTOR = {"columns": "a,b,label", "good_row": "1,2,0"}
PARTED = {"columns": "text,label,part", "good_row": "fine,1,train"}
TABLES = [
    Case(
        "csv, no file",
        "csv",
        lambda tmp: tmp / "no.csv",
        "cannot be read: No such file or directory; name a table",
    ),
    Case("csv, a folder", "csv", lambda tmp: tmp, "cannot be read: Is a directory"),
    Case("csv, locked", "csv", locked_table, "cannot be read: Permission denied"),
    csv_case("empty file", "", "is empty"),
    csv_case("mark alone", b"\xef\xbb\xbf", "is empty"),
    csv_case("empty lines", "\n\r\n\n", "is empty"),
    csv_case("empty file", "", "is empty", kind="tsv"),
    csv_case("header alone", "text,label\n", "has column names but no row"),
    csv_case("header alone", "text\tlabel\n", "has column names but no row", kind="tsv"),
    csv_case("column twice", "text,label,label\na,1,2\n", "two columns called 'label'"),
    csv_case("two columns without names", "text,,\na,1,2\n", "two columns called ''"),
    csv_case("column twice in the settings", "a,1\n", "two columns called 't'", columns=("t", "t")),
    csv_case("text and image", "text,image,label\na,b,1\n", "both 'text' and 'image'"),
    csv_case("labels alone", "label\n1\n", "no column of inputs, only 'label'"),
    csv_case(
        "index of pandas", ",x,label\n0,1.5,1\n", "column of numbers without a name.*index=False"
    ),
    csv_case(
        "header that settings repeat",
        "text,label\na,1\n",
        "line 1 names.*--columns",
        columns=("text", "label"),
    ),
    csv_case("header not utf-8", b"caf\xe9,label\na,1\n", "line 1 has the byte 0xe9"),
    csv_case("utf-16", "text,label\na,1\n".encode("utf-16"), "line 1 has the byte 0xff"),
    csv_case("zip", b"PK\x03\x04\x14\0\0\0", "line 1 has a NUL"),
    csv_case("other separator", "text;label\na;1\n", "line 2.*'text;label'.*--text_column"),
    csv_case(
        "texts of another name",
        "review,label\ngood,1\n",
        "line 2: 'good' in the column 'review' is no number.* no column 'text' of texts "
        r"\(--text_column\) or 'image' of images \(--image_column\), only 'review', 'label'",
    ),
    csv_case(
        "no column of the name given",
        "text,label\ngood,1\n",
        "line 2: 'good' in the column 'text' is no number.* no column 'review' of texts",
        text_column="review",
    ),
    csv_case(
        "fewer columns in the settings", "a,1,x\n", "line 1 has 3 cells", columns=("text", "label")
    ),
    csv_case("open quotation mark", 'text,label\na,1\n"b,0\nc,1\n', "line 3.*quotation mark"),
    csv_case("open quotation mark in the header", '"text,label\na,1\n', "line 1.*quotation mark"),
    csv_case("huge cell", "text,label\na,1\n" + "b" * 140_000 + ",0\n", "line 3: field larger"),
    row_case("too many cells", "a,1,2", "has 3 cells, there are 2"),
    row_case("too few cells", "a", "has 1 cells, there are 2"),
    row_case("comma without quotes", "well, fine,1", "has 3 cells"),
    row_case("text after quotes", '"a"b,1', "malformed"),
    row_case("not utf-8", "caf\udce9,1", "0xe9, which is not UTF-8"),
    row_case("utf-8 cut", "caf\udcc3,1", "0xc3, which is not UTF-8"),
    row_case("surrogate in utf-8", "\udced\udca0\udc80,1", "0xed, which is not UTF-8"),
    row_case("label not utf-8", "a,\udcff", "0xff, which is not UTF-8"),
    row_case("nul", "a\0b,1", "NUL"),
    csv_case(
        "not utf-8 in the second line of a cell",
        b'text,label\n"a\nb\xff",1\nc,1\n',
        "line 3 has the byte 0xff",
        1,
    ),
    row_case("unknown part", "a,1,training", "'training' in the column 'part'", **PARTED),
    row_case("empty part", "a,1,", "'' in the column 'part'", **PARTED),
    row_case("no number", "1,two,0", "'two' in the column 'b' is no number", **VECTOR),
    row_case("empty number", "1,,0", "'' in the column 'b' is no number", **VECTOR),
    row_case("number with underscore", "1_0,2,0", "'1_0' in the column 'a' is no number", **VECTOR),
    row_case("hexadecimal number", "0x1,2,0", "'0x1' in the column 'a' is no number", **VECTOR),
    row_case("decimal comma", '"1,5",2,0', "'1,5' in the column 'a' is no number", **VECTOR),
    row_case("nan", "nan,2,0", "'nan' in the column 'a' is no finite", **VECTOR),
    row_case("infinity", "1,-inf,0", "'-inf' in the column 'b' is no finite", **VECTOR),
    row_case("beyond float32", "1,1e39,0", "'1e39' in the column 'b' is no finite", **VECTOR),
    row_case("number of many lines", '"x\ny",2,0', r"'x\\ny' in the column 'a'", **VECTOR),
    row_case(
        "number of many characters", "x" * 5000 + ",2,0", r"'x+\.\.\.' in the column 'a'", **VECTOR
    ),
    tsv_case("too many cells", "a\t1\t", "has 3 cells"),
    tsv_case("too few cells", "a 1", "has 1 cells"),
    tsv_case("not utf-8", "\udc80\t1", "0x80, which is not UTF-8"),
    tsv_case("nul", "a\0\t1", "NUL"),
    Case(
        "missing image",
        "csv",
        list_of("a.png,1", "no.png,0", "c.png,1"),
        "line 3: .*'no.png'.*No such file",
        {},
        2,
    ),
    Case(
        "empty image path",
        "csv",
        list_of("a.png,1", ",0", "c.png,1"),
        "line 3 names no image",
        {},
        2,
    ),
    Case("folder as image", "csv", list_with_folder, "line 3.*'b.png'.*not a regular file", {}, 2),
    Case(
        "long image path",
        "csv",
        list_of("a.png,1", "x" * 300 + ",0", "c.png,1"),
        "line 3.*too long",
        {},
        2,
    ),
    Case(
        "image twice",
        "csv",
        list_of("b.png,1", "a.png,0", "b.png,0"),
        "line 4 .*'b.png', as line 2",
        {},
        2,
    ),
    Case(
        "image twice by other paths",
        "csv",
        list_of("b.png,1", "x/../b.png,1"),
        "line 3 .*'b.png', as line 2",
        {},
        1,
    ),
    Case("image above", "csv", list_of("a.png,1", "../a.png,0"), "line 3.*'../a.png' lies outside"),
    Case("absolute image", "csv", list_of("a.png,1", "/etc/a.png,0"), "line 3.*lies outside"),
]

CASES = FOLDERS + NPZ + TABLES


def load(case, path, choice):
    """Everything there is to read, read."""
    name = names.DatasetName(case.kind, 1, 1, 1)
    settings = config.DataConfig(on_bad_example=choice, **case.settings)
    found = READERS[case.kind].read(name, str(path), settings)
    for part in found.parts.values():
        assert len(rows.in_memory(part.inputs)) == len(part.labels)
    return found


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_it_is_named_on_one_line_and_skipping_leaves_out_exactly_that(tmp_path, case):
    path = case.make(tmp_path)
    with pytest.raises(config.ConfigError, match=case.says) as error:
        load(case, path, "error")
    message = str(error.value)
    assert message.startswith(f"{case.kind}:{path}")
    assert "\n" not in message and message.isprintable() and len(message) < 600 + len(str(path))
    if case.good is None:
        with pytest.raises(config.ConfigError, match=case.says):
            load(case, path, "skip")
        return
    found = load(case, path, "skip")
    assert sum(len(part) for part in found.parts.values()) == case.good
    (line,) = [line for part in found.parts.values() for line in part.skipped]
    assert line.startswith(f"{case.kind}:{path}") and "\n" not in line


def test_there_are_more_than_a_hundred_of_them_and_no_two_of_one_name():
    assert len({case.id for case in CASES}) == len(CASES) > 100
