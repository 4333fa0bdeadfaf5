"""Kills a run again and again, at random moments, and compares it with one that was left alone.

    python -m tests.kills --kills=50

Not part of the tests, as it takes a quarter of an hour. A moment is drawn from the time in which
the process trains; every second step is a weight step and every third is saved, so that kills fall
into both and into the writing of checkpoints. Prints where each fell and exits with code 1 if
anything but the steps since the last checkpoint was lost.
"""

import argparse
import pathlib
import random
import re
import tempfile
import time

from tests.experiments.processes import TINY, assert_same_contents, contents, finish, run, start

STEPS = 900
SMALL = [
    "--model=mlp",
    "--hidden_units=8",
    "--inner_steps=2",
    "--checkpoint_every=3",
    "--keep_checkpoints=4",
    "--log_every=7",
    "--eval_every=50",
    f"--train_steps={STEPS}",
]


def newest(model_dir):
    """The step that the checkpoint file names; 0 without one."""
    file = model_dir / "checkpoints" / "checkpoint"
    found = re.search(r'ckpt-(\d+)"', file.read_text()) if file.exists() else None
    return int(found.group(1)) if found else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    settings = parser.parse_args()
    draw = random.Random(settings.seed)
    folder = pathlib.Path(tempfile.mkdtemp())
    whole, killed = folder / "whole", folder / "killed"
    began = time.monotonic()
    result = run("uda_cifar", *TINY, *SMALL, f"--model_dir={whole}")
    assert result.returncode == 0, result.stderr[-2000:]
    print(f"left alone: {time.monotonic() - began:.0f} s", flush=True)
    before, kills, partial = 0, 0, 0
    while kills < settings.kills:
        process = start("-m", "experiments.uda_cifar", *TINY, *SMALL, f"--model_dir={killed}")
        while newest(killed) <= before and process.poll() is None:  # until it trains again
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.25))
        process.kill()
        ended = finish(process)
        if ended.returncode == 0:
            break
        resumed = re.search(r"Resuming from step (\d+)", ended.stderr)
        assert (int(resumed.group(1)) if resumed else 0) == before, ended.stderr[-2000:]
        kills, before = kills + 1, newest(killed)
        left = sorted(p.name for p in (killed / "checkpoints").glob(f"ckpt-{before + 3}*"))
        partial += bool(left)
        print(
            f"kill {kills}: newest checkpoint {before}; of the next: {left or 'nothing'}",
            flush=True,
        )
    result = run("uda_cifar", *TINY, *SMALL, f"--model_dir={killed}")
    assert result.returncode == 0, result.stderr[-2000:]
    assert_same_contents(contents(whole, STEPS), contents(killed, STEPS))
    print(f"{kills} kills, {partial} of them within the writing of a checkpoint: the same run.")


if __name__ == "__main__":
    main()
