"""Seconds, peak memory and their ratios."""

import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Rows = dict[str, dict[str, float]]


class Ratio(NamedTuple):
    """(top - sum of minus) / bottom of one quantity, where each is the name of a row."""

    top: str
    bottom: str
    minus: tuple[str, ...] = ()
    quantities: tuple[str, ...] = ("median_s", "cpu_s")


def interleaved(calls: Mapping[str, Callable[[], Any]], repeats: int, warmup: int = 2) -> Rows:
    """Times every call `repeats` times, one after the other in turn, every other turn backwards.

    The noise of a machine that others use thus reaches all of them alike, and none profits from
    what ran just before it.

    Args:
      calls: row -> a function that returns when its work is done.
      repeats: how often each is timed.
      warmup: calls of each before that, not timed.

    Returns:
      row -> median_s, min_s and max_s, seconds by the clock, and cpu_s, the median of the seconds
      that all threads of the process spent.
    """
    for call in calls.values():
        for _ in range(warmup):
            call()
    wall = {name: [] for name in calls}
    cpu = {name: [] for name in calls}
    for turn in range(repeats):
        for name, call in list(calls.items())[:: -1 if turn % 2 else 1]:
            start, cpu_start = time.perf_counter(), time.process_time()
            call()
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - cpu_start)
    return {
        name: {
            "median_s": statistics.median(wall[name]),
            "min_s": min(wall[name]),
            "max_s": max(wall[name]),
            "cpu_s": statistics.median(cpu[name]),
        }
        for name in calls
    }


def peak_memory() -> int:
    """The most memory that this process has held, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def ratios(wanted: Mapping[str, Ratio], rows: Rows) -> Rows:
    """The ratios, name -> quantity -> value, without those of a row that was not measured."""
    return {
        name: {
            quantity: (rows[ratio.top][quantity] - sum(rows[row][quantity] for row in ratio.minus))
            / rows[ratio.bottom][quantity]
            for quantity in ratio.quantities
        }
        for name, ratio in wanted.items()
        if {ratio.top, ratio.bottom, *ratio.minus} <= rows.keys()
    }
