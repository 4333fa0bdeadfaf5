"""experiments.back_translate, with stand-ins for translators and with a real one where there is."""

import fcntl
import os
import shlex
import shutil
import signal
import sys
import time

import numpy as np
import pytest

from experiments import translators
from ssl_influence import config
from ssl_influence.data import paraphrases, sources
from tests.experiments import processes

TEXTS = [f"Text number {i} is  good." for i in range(10)]
EACH = "import sys\nfor line in sys.stdin: "
UPPER = EACH + "print(line.strip().upper())"
LOWER = EACH + "print(line.strip().lower())"


def _python(code):
    return shlex.join([sys.executable, "-c", code])


def _table(folder, texts=TEXTS):
    """A table of these training texts and of one to test on; what names it as a dataset."""
    rows = [(text, str(i % 2), "train") for i, text in enumerate(texts)]
    table = [("text", "label", "part"), *rows, ("a test text", "0", "test")]
    path = folder / "texts.tsv"
    path.write_text("".join("\t".join(row) + "\n" for row in table), encoding="utf-8")
    return f"tsv:{path}.1@2-2"


def _arguments(folder, forward=UPPER, backward=LOWER):
    return [
        f"--dataset=tsv:{folder / 'texts.tsv'}.1@2-2",
        f"--output={folder / 'out.tsv'}",
        f"--forward={_python(forward)}",
        f"--backward={_python(backward)}",
        "--chunk_size=3",
        "--processes=2",
    ]


def _run(folder, *more, **commands):
    # Fresh: it does without TensorFlow, and says nothing on standard error.
    return processes.run("back_translate", *_arguments(folder, **commands), *more, fresh=True)


def _read(folder):
    texts = sources.load(sources.parse_name(f"tsv:{folder / 'texts.tsv'}.1@2-2")).inputs
    needed = np.arange(len(texts))
    return texts, paraphrases.read(folder / "out.tsv", texts, needed)


def test_all_texts_with_ids_come_out_in_their_order_once_for_each_copy(tmp_path):
    _table(tmp_path, [*TEXTS, "   ", "nothing", "same"])
    forward = EACH + "print('' if 'nothing' in line else line.strip().upper())"
    backward = EACH + "print(line.strip().lower().replace(' is', '\\t').removesuffix('.'))"
    result = processes.succeeded(_run(tmp_path, "--copies=2", forward=forward, backward=backward))
    texts, read = _read(tmp_path)
    assert np.diff(read.starts).tolist() == [2] * 13
    expected = [f"text number {i} good." for i in range(10)]
    assert read.texts == [t for text in [*expected, "", "nothing", "same"] for t in (text, text)]
    assert "24 paraphrases of 12 texts: 2 equal their text, 2 were empty" in result.stdout
    assert "8 of 8 chunks" in result.stdout and not result.stderr
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out.tsv"]
    again = _run(tmp_path)
    processes.assert_refused(again, f"--output={tmp_path / 'out.tsv'} is there already")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_same_command_goes_on_where_it_was_ended(number, tmp_path):
    _table(tmp_path)
    gate, calls, held = (tmp_path / name for name in ("gate", "calls", "held"))
    # Stops at the text 7, in a process of its own that holds a lock, as long as there is no gate.
    slow = (
        "import fcntl, pathlib, subprocess, sys\n"
        f"open({str(calls)!r}, 'a').write('x')\n"
        "lines = sys.stdin.read()\n"
        f"if 'number 7' in lines and not pathlib.Path({str(gate)!r}).exists():\n"
        f"    held = open({str(held)!r}, 'w')\n"
        "    fcntl.flock(held, fcntl.LOCK_EX)\n"
        "    sleep = subprocess.Popen(['sleep', '100'], pass_fds=[held.fileno()])\n"
        "    print(sleep.pid, file=held, flush=True)\n"
        "    sleep.wait()\n"
        "print(lines, end='')\n"
    )
    process = processes.start(
        "-m", "experiments.back_translate", *_arguments(tmp_path, forward=slow), fresh=True
    )
    partial = tmp_path / "out.tsv.partial"
    deadline = time.monotonic() + 60
    while len(list(partial.glob("0-*.txt"))) < 3 or not _is_locked(held):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    if number == signal.SIGINT:
        second = _run(tmp_path, forward=slow)
        processes.assert_refused(second, f"Another process translates into {partial}")
    process.send_signal(number)
    result = processes.finish(process, timeout=30)
    if number == signal.SIGKILL:
        os.kill(int(held.read_text()), signal.SIGTERM)  # what nobody was left to end
    else:
        processes.assert_refused(result, "the same command goes on from 3 of 4 chunks")
        assert not _is_locked(held)
    assert not (tmp_path / "out.tsv").exists()
    other = _run(tmp_path, forward=UPPER)
    processes.assert_refused(other, "another command (--forward=", str(partial), "remove the")
    gate.touch()
    calls.unlink()
    finished = processes.succeeded(_run(tmp_path, forward=slow))
    assert "3 of 4 chunks are there already" in finished.stdout and calls.read_text() == "x"
    assert _read(tmp_path)[1].texts == [" ".join(text.lower().split()) for text in TEXTS]


def _is_locked(path):
    if not path.exists() or not path.read_text():
        return False
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.parametrize(
    "code, says",
    [
        (EACH + "print(line + 'and more')", "wrote 6 lines for 3"),
        (EACH + "pass", "wrote 0 lines for 3"),
        ("import sys; sys.exit('first\\nno such mode')", "exit code 1; .*no such mode"),
        ("import sys; sys.stdout.buffer.write(b'\\xe9\\n' * 3)", "byte 0xe9, which is not UTF-8"),
    ],
)
def test_a_translator_that_fails_is_named_with_what_is_wrong(code, says):
    with pytest.raises(config.ConfigError, match=says) as caught:
        translators.Translators().translate([sys.executable, "-c", code], ["a", "b", "c"])
    assert sys.executable in str(caught.value)


def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path):
    _table(tmp_path)
    failing = _run(tmp_path, backward="import sys; sys.exit('no such mode')")
    processes.assert_refused(failing, "ended with exit code 1; the last it said: no such mode")
    other = _run(tmp_path, forward="import sys; sys.exit('nor this one')")
    processes.assert_refused(other, "nor this one")  # nothing of the first is there to go on from
    shutil.rmtree(tmp_path / "out.tsv.partial")
    for more, says in (
        (["--forward=no_such_translator -u"], "there is no command 'no_such_translator'"),
        (["--backward='open"], "--backward='open cannot be read: No closing quotation"),
        (["--dataset=digits"], "--dataset=digits holds no texts but images"),
        ([f"--dataset=tsv:{tmp_path / 'texts.tsv'}"], "csv:/data/reviews.csv.1@20-20"),
        ([f"--output={tmp_path / 'texts.tsv'}/x"], "cannot be written (Not a directory)"),
    ):
        processes.assert_refused(_run(tmp_path, *more), says)
    assert [path.name for path in tmp_path.iterdir()] == ["texts.tsv"]


@pytest.mark.skipif(shutil.which("apertium") is None, reason="apertium is not installed")
def test_a_real_translator_paraphrases(tmp_path):
    _table(tmp_path, ["In spite", "of all, the film is good.", "A café [sic] <b>wonder</b> $5^"])
    there, back = (f"apertium -u -f line {pair}" for pair in ("eng-spa", "spa-eng"))
    result = processes.succeeded(_run(tmp_path, f"--forward={there}", f"--backward={back}"))
    texts, read = _read(tmp_path)
    assert len(read.texts) == 3 and not result.stderr
    assert read.texts[1].endswith("film is well.") and "<b>" in read.texts[2]
    assert not any("*" in text for text in read.texts)
