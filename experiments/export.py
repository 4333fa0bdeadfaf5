"""Writes the model of a run as a TensorFlow SavedModel, for programs without this library.

    python -m experiments.export --model_dir=/tmp/run --output=/tmp/model

    model = tf.saved_model.load("/tmp/model")
    model.signatures["serving_default"](inputs=images)  # uint8 [B, H, W, C], as data have them
    model.signatures["encoded"](inputs=files)  # the bytes of PNG or JPEG files, string [B]

Both give {"probabilities": float32 [B, C], "class": int32 [B], "class_name": string [B]}. A model
of vectors takes float32 [B, d] and one of texts string [B], which needs `import tensorflow_text`
before it is loaded; both have no signature `encoded`. That one scales images of another size so
that they cover the model's, and cuts them to the middle, as experiments.predict --resize does, but
takes no notice of the orientation that Exif gives. One file in a batch that is no image fails the
whole batch.

--output must be new or empty. Class names also lie there in class_names.txt, one a line.
"""

from absl import flags

from experiments import command, trained
from ssl_influence import files

trained.define_flags()
_OUTPUT = flags.DEFINE_string("output", None, "Folder to write; new or empty.", required=True)
flags.register_validator("output", bool, "name a folder")


def main() -> None:
    classifier, _ = trained.load()
    from ssl_influence.serving import saved_model

    saved_model.write(classifier, files.path(_OUTPUT.value).expanduser())


if __name__ == "__main__":
    command.run(main)
