"""What the README shows is true of the code beside it."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


@pytest.mark.parametrize("code", BLOCKS, ids=["trainer", "toolbox"])
def test_python_examples_run_as_printed(code):
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    printed = re.match(r"\[([\d\s]+)\]", result.stdout).group(1)
    assert len(printed.split()) == 10
