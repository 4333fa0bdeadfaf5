"""Runs a binary under TFDS mock data: python -m tests.experiments.mock_tfds EXAMPLES MODULE
[--flag=value ...].

The mock gives random images of the real shape; nothing is downloaded.
"""

import runpy
import sys

import tensorflow_datasets as tfds

with tfds.testing.mock_data(num_examples=int(sys.argv[1])):
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
