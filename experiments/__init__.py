"""One short absl binary per experiment."""

import os

# TensorFlow reads this when it is imported, which launch.py does: keep its start-up notes off
# stderr.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
