"""Layers of tf_keras compute in float64 here."""

import pytest
import tf_keras as keras


@pytest.fixture(autouse=True)
def double_precision():
    # Layers follow floatx only as long as no policy was ever set in the process.
    policy = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy("float64")
    keras.backend.set_floatx("float64")
    yield
    keras.backend.set_floatx("float32")
    keras.mixed_precision.set_global_policy(policy)
