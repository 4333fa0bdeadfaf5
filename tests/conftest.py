"""Settings of TensorFlow for the tests' own process, made before anything imports it."""

import os

# oneDNN rewrites every graph when it is first run, which takes a third of the time of tests that
# trace much and compute little. Binaries run as processes have it, as with users: see `processes`.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
