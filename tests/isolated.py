"""A SavedModel in a process that knows neither this library nor the folder it lies in."""

import json
import subprocess
import sys

import numpy as np

_CODE = """
import json, pathlib, sys
import numpy as np
import tensorflow as tf

model, inputs, folder = sys.argv[1:]
given = {"serving_default": np.load(inputs)}
if given["serving_default"].dtype.kind == "U":
    import tensorflow_text
files = [path.read_bytes() for path in sorted(pathlib.Path(folder).iterdir())]
if files:
    given["encoded"] = np.array(files, object)
signatures = tf.saved_model.load(model).signatures
assert set(given) == set(signatures), list(signatures)
found = {}
for name, rows in given.items():
    whole = signatures[name](inputs=tf.constant(rows))
    for size in (1, 3):  # batches of any size
        part = signatures[name](inputs=tf.constant(rows)[:size])
        for key in whole:
            assert len(part[key]) == size, key
        assert np.allclose(part["probabilities"], whole["probabilities"][:size], atol=1e-6)
    dtypes = {key: value.dtype.name for key, value in whole.items()}
    assert dtypes == {"probabilities": "float32", "class": "int32", "class_name": "string"}
    found[name] = {key: value.numpy().tolist() for key, value in whole.items()}
    found[name]["class_name"] = [name.decode() for name in found[name]["class_name"]]
assert not {"ssl_influence", "tf_keras"} & set(sys.modules)
print(json.dumps(found))
"""


def signatures(tmp_path, model, inputs, files):
    """What each signature of a saved model gives, by its name.

    Args:
      tmp_path: an empty folder or one to write to.
      model: the saved model's folder.
      inputs: of serving_default, an array; of texts, one of fixed width.
      files: of encoded, the bytes of each file; empty where the model has no such signature.
    """
    np.save(tmp_path / "inputs.npy", inputs)
    folder = tmp_path / "files"
    folder.mkdir()
    for i, data in enumerate(files):
        (folder / f"{i:04}").write_bytes(data)
    result = subprocess.run(
        [sys.executable, "-I", "-c", _CODE, model, tmp_path / "inputs.npy", folder],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)
