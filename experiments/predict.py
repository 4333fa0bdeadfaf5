"""Predicts the classes of images, of texts or of vectors, with the model of a run.

    python -m experiments.predict --model_dir=/tmp/run --inputs=photo.jpg,/data/more_photos
    python -m experiments.predict --model_dir=/tmp/snippets --text="Funny and moving."

prints a table, a row for each input: its name, the class predicted, its probability, and the
probability of every class (CSV; --format=json gives a line of JSON for each). Messages go to the
error stream, so the output can be piped; --output writes a file instead, all of it or nothing.

--inputs are image files; folders, for all images below them; and .npz files with an array named
images, x or inputs, or a single array: uint8 images [n, H, W, C] or, for models of vectors, numbers
[n, d]. For models of texts they are .csv and .tsv files, whose column of texts has the name that
the run's --text_column gives; folders, for all .txt files below them, one text each; and other
files, one text a line. --text gives a text itself, and may be repeated. A path with a comma in it
goes in double quotes. The dataset of the run is not needed: flags.txt, inputs.json (of texts also
encoder.json) and a checkpoint are.

Images are decoded as they were for training, with its --image_size and --image_channels. Those that
do not have the model's shape then are an error, unless --resize is given.
"""

import os
import pathlib
import sys
from collections.abc import Iterable

from absl import flags

from experiments import command, flags as shared_flags, trained
from ssl_influence import config as config_lib, files, serving

trained.define_flags()
_INPUTS = flags.DEFINE_list("inputs", [], "Files and folders of inputs.")
_TEXT = flags.DEFINE_multi_string("text", [], "A text to predict for, for models of texts.")
_FORMAT = flags.DEFINE_enum("format", "csv", serving.FORMATS, "Form of the table.")
_OUTPUT = flags.DEFINE_string("output", None, "File to write (default: standard output).")
_TOP = flags.DEFINE_integer(
    "top",
    None,
    "Give only so many of the most probable classes, in descending order (default: all classes).",
    lower_bound=1,
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size",
    None,
    "Inputs a batch (default: 500, or the run's --rows_per_pass if that is less).",
    lower_bound=1,
)
_RESIZE = flags.DEFINE_boolean(
    "resize",
    False,
    "Scale images of another size so that they cover the model's and cut them to its middle; make "
    "them gray or colored as it has them.",
)
_ON_BAD_EXAMPLE = flags.DEFINE_enum(
    "on_bad_example",
    "error",
    config_lib.ON_BAD_EXAMPLE,
    "What to do about an input that cannot be read: end with an error that names it, or leave it "
    "out and count it.",
)
flags.register_validator("inputs", all, "name files or folders")
flags.register_validator("output", lambda path: path != "", "name a file, or leave it out")


def main() -> None:
    output = shared_flags.output_file(_OUTPUT)
    if not _INPUTS.value and not _TEXT.value:
        raise config_lib.ConfigError("Name what to predict for: --inputs, or --text for a text.")
    classifier, config = trained.load()
    from ssl_influence.serving import predictions, reading

    paths = [pathlib.Path(path).expanduser() for path in _INPUTS.value]
    parts = reading.find(paths, classifier.spec, config.data, resize=_RESIZE.value)
    if _TEXT.value:
        if classifier.spec.kind != "text":
            raise config_lib.ConfigError(
                f"--text={_TEXT.value[0]!r} is for models of texts, and this one takes "
                f"{classifier.spec.kind}s: name files of them as --inputs."
            )
        parts.append(reading.texts(_TEXT.value))
    batch_size = _BATCH_SIZE.value or config.train.evaluation_batch_size
    batches = reading.batches(parts, batch_size, _ON_BAD_EXAMPLE.value)
    table = predictions.table(classifier, batches, _FORMAT.value, _TOP.value)
    if output is None:
        _print(table)
        return
    try:
        with files.replacing(output) as path, _open(path) as file:
            file.writelines(table)
    except OSError as error:
        raise config_lib.ConfigError(
            f"--output={output} cannot be written ({error.strerror}): name another."
        ) from error


def _open(path: pathlib.Path):
    # Names of files need not be UTF-8: their bytes stay what they are.
    return path.open("w", encoding="utf-8", errors="surrogateescape", newline="")


def _print(table: Iterable[str]) -> None:
    sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape", newline="")
    try:
        for text in table:
            sys.stdout.write(text)
            sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read it, such as `head`, has enough. Python would flush once more, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    command.run(main)
