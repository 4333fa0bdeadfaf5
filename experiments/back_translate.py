r"""Writes paraphrases of the texts of a dataset: into another language and back, by local commands.

    python -m experiments.back_translate --dataset=movie_snippets --output=paraphrases.tsv \
        --forward="apertium -u -f line eng-spa" --backward="apertium -u -f line spa-eng" \
        --processes=2

and then trains with `--strong_view=paraphrases --paraphrases=paraphrases.tsv`: the augmentation of
UDA's experiments on texts. The translators above are `apt-get install apertium-eng-spa`; any
command will do that reads a text a line, in UTF-8, and writes one line for each. It is started
without a shell, once for every --chunk_size texts. Of apertium, -u keeps it from marking unknown
words by *, and -f line from moving words from one line to the next.

Takes the flags of a training run (or its --flagfile), reads the data as the run would, and
translates all examples that have an id; those of the test part have none. Data of your own are
named with an ending, as for a run: --dataset=csv:/data/reviews.csv.1@20-20. Whatever its numbers,
the file serves every split of them. Spaces and line breaks in a text become single spaces first. A
text that is translated to nothing is its own paraphrase. Where a text's last full stop is lost, as
`apertium -f line` loses it, it is put back.

What is finished is kept beside the output, in a folder that ends in .partial, until all is: after
an interruption the same command goes on from there. `ssl_influence.data.paraphrases` has the form
of the file.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import pathlib
import shlex
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent import futures

from absl import flags

from experiments import command, flags as shared_flags, translators as translators_lib
from ssl_influence import config as config_lib, files
from ssl_influence.data import examples, paraphrases, sources

shared_flags.define()
_OUTPUT = flags.DEFINE_string("output", None, "File to write.", required=True)
_FORWARD = flags.DEFINE_string(
    "forward", None, "Command that translates lines into another language.", required=True
)
_BACKWARD = flags.DEFINE_string(
    "backward", None, "Command that translates those lines back.", required=True
)
_PROCESSES = flags.DEFINE_integer("processes", 1, "Translators that run at once.", lower_bound=1)
_CHUNK_SIZE = flags.DEFINE_integer(
    "chunk_size", 1000, "Texts that a translator is started for.", lower_bound=1
)
_COPIES = flags.DEFINE_integer(
    "copies",
    1,
    "Paraphrases of each text, for translators that draw another one each time.",
    lower_bound=1,
)
flags.register_validator("output", lambda path: path != "", "name a file")

_log = logging.getLogger("ssl_influence")


def main() -> None:
    config = shared_flags.to_config()
    output = shared_flags.output_file(_OUTPUT)
    if output.exists():
        raise config_lib.ConfigError(
            f"--output={output} is there already: remove it, or name a new file."
        )
    commands = [_parsed("forward", _FORWARD.value), _parsed("backward", _BACKWARD.value)]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C

    source = sources.load(sources.parse_name(config.data.dataset), config.data)
    if source.kind != "text":
        raise config_lib.ConfigError(
            f"--dataset={config.data.dataset} holds no texts but {source.kind}s: name one of texts."
        )
    lines = [paraphrases.one_line(text) for text in source.inputs]
    # A translator may leave out empty lines: it gets none.
    rows = [row for row, line in enumerate(lines) if line]
    job = {
        "--dataset": f"{source.name} ({_digest(lines)})",
        "--forward": _FORWARD.value,
        "--backward": _BACKWARD.value,
        "--chunk_size": _CHUNK_SIZE.value,
        "--copies": _COPIES.value,
    }
    partial = output.with_name(f"{output.name}.partial")
    try:
        with _claimed(partial, job):
            copies = _translate_all(partial, commands, [lines[row] for row in rows])
            _write(output, source, rows, copies)
            shutil.rmtree(partial)
    except OSError as error:
        raise config_lib.ConfigError(
            f"--output={output} cannot be written ({error.strerror}): name another."
        ) from error
    _report(output, [lines[row] for row in rows], copies)


def _parsed(flag: str, text: str) -> list[str]:
    """The command and its arguments."""
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        raise config_lib.ConfigError(f"--{flag}={text} cannot be read: {error}.") from error
    if not arguments or shutil.which(arguments[0]) is None:
        raise config_lib.ConfigError(
            f"--{flag}={text}: there is no command {(arguments or [''])[0]!r}: install it, or name "
            "another."
        )
    if os.path.basename(arguments[0]) == "apertium":
        for option, effect in (
            ("-u", "unknown words are marked by *"),
            ("line", "words may move from one text to the next; as `-f line`"),
        ):
            if option not in arguments:
                _log.warning("--%s=%s lacks %r: %s.", flag, text, option, effect)
    return arguments


def _digest(lines: Sequence[str]) -> str:
    """What tells texts from others."""
    return hashlib.sha256("\n".join(lines).encode("utf-8")).hexdigest()[:16]


@contextlib.contextmanager
def _claimed(partial: pathlib.Path, job: dict) -> Iterator[None]:
    """The folder of what is finished, for this process alone.

    Raises:
      ConfigError: what it holds is of another job, or another process works there.
    """
    partial.mkdir(parents=True, exist_ok=True)
    with open(partial / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise config_lib.ConfigError(
                f"Another process translates into {partial}: wait for it, or name another --output."
            ) from error
        path, before = partial / "job.json", job
        if any(partial.glob("*.txt")):
            before = json.loads(path.read_text(encoding="utf-8"))
        changed = [
            f"{key}={before.get(key)} there, {job[key]} now"
            for key in job
            if before.get(key) != job[key]
        ]
        if changed:
            raise config_lib.ConfigError(
                f"{partial} holds translations of another command ({'; '.join(changed)}): give "
                "that one, or remove the folder."
            )
        files.write_atomically(path, json.dumps(job, indent=1) + "\n")
        yield


def _translate_all(
    partial: pathlib.Path, commands: Sequence[Sequence[str]], lines: Sequence[str]
) -> list[list[str]]:
    """What becomes of all lines under the commands in turn, for each of --copies.

    Raises:
      ConfigError: a command fails.
      UserError: SIGINT or SIGTERM came.
    """
    size = _CHUNK_SIZE.value
    chunks = {
        partial / f"{copy}-{start}.txt": lines[start : start + size]
        for copy in range(_COPIES.value)
        for start in range(0, len(lines), size)
    }
    missing = {path: chunk for path, chunk in chunks.items() if not path.exists()}
    done = len(chunks) - len(missing)
    if done:
        print(f"{done} of {len(chunks)} chunks are there already", flush=True)
    translators, pool = translators_lib.Translators(), futures.ThreadPoolExecutor(_PROCESSES.value)
    start_s, translated = time.monotonic(), 0
    try:
        pending = {
            pool.submit(_translate_chunk, translators, commands, chunk, path): chunk
            for path, chunk in missing.items()
        }
        for future in futures.as_completed(pending):
            future.result()
            done, translated = done + 1, translated + len(pending[future])
            rate = translated / (time.monotonic() - start_s)
            print(f"{done} of {len(chunks)} chunks, {rate:.0f} texts/s", flush=True)
    except KeyboardInterrupt as error:
        raise config_lib.UserError(
            f"interrupted; the same command goes on from {done} of {len(chunks)} chunks."
        ) from error
    finally:
        translators.end()
        pool.shutdown(cancel_futures=True)
    copies = [[] for _ in range(_COPIES.value)]
    for number, path in enumerate(chunks):
        found = path.read_text(encoding="utf-8").split("\n")[:-1]
        copies[number * len(copies) // len(chunks)] += found
    return copies


def _translate_chunk(
    translators: translators_lib.Translators,
    commands: Sequence[Sequence[str]],
    lines: Sequence[str],
    path: pathlib.Path,
) -> None:
    """Writes what becomes of the lines under the commands in turn, empty lines for nothing."""
    texts = lines
    for arguments in commands:
        kept = [row for row, line in enumerate(lines) if line]
        found = translators.translate(arguments, [lines[row] for row in kept])
        lines = [""] * len(lines)
        for row, line in zip(kept, found, strict=True):
            lines[row] = paraphrases.one_line(line)
    closed = map(_with_full_stop_of, texts, lines)
    files.write_atomically(path, "".join(f"{line}\n" for line in closed))


def _with_full_stop_of(text: str, paraphrase: str) -> str:
    """The paraphrase, with a full stop where the text has one and it ends in a letter or number."""
    lost = text.endswith(".") and paraphrase and paraphrase[-1].isalnum()
    return f"{paraphrase}." if lost else paraphrase


def _write(
    output: pathlib.Path,
    source: examples.Source,
    rows: Sequence[int],
    copies: Sequence[Sequence[str]],
) -> None:
    """Writes the file; texts without a word are their own paraphrases."""
    place = {row: i for i, row in enumerate(rows)}
    with files.replacing(output) as path, path.open("w", encoding="utf-8", newline="") as file:
        file.write(paraphrases.HEADER)
        for row, text in enumerate(source.inputs):
            for copy in copies:
                found = copy[place[row]] if row in place else ""
                file.write(paraphrases.row(row, text, found or text))


def _report(output: pathlib.Path, lines: Sequence[str], copies: Sequence[Sequence[str]]) -> None:
    """Says what was written, and how many paraphrases augment nothing."""
    pairs = [pair for copy in copies for pair in zip(lines, copy, strict=True)]
    print(
        f"{len(pairs)} paraphrases of {len(lines)} texts: "
        f"{sum(line == found for line, found in pairs)} equal their text, "
        f"{sum(not found for _, found in pairs)} were empty and are replaced by it"
    )
    print(f"wrote {output}")


if __name__ == "__main__":
    command.run(main)
