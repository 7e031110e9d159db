"""Blocks in turns, medians and ratios, on a clock that the test turns."""

import pytest
import torch

from virtualgrad.errors import VirtualGradError
from virtualgrad.lab.bench.medians import Median, median_of, median_ratio
from virtualgrad.lab.bench.timing import (
    MOST_STEPS,
    clock_of,
    interleave,
    reason,
    steps_per_block,
    time_block,
)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], Median(3.0, 3.0, 3.0)),
        ([1.0, 3.0], Median(2.0, 1.5, 2.5)),
        ([5.0, 1.0, 4.0, 2.0, 3.0], Median(3.0, 2.0, 4.0)),
        ([1.0, 2.0, 3.0, 4.0, 1e9], Median(3.0, 2.0, 4.0)),  # one disturbed block changes nothing
    ],
)
def test_median_and_quartiles(values, expected):
    found = median_of(values)
    assert found == expected
    assert found.spread == expected.upper - expected.lower


def test_a_drift_cancels_in_ratios_of_the_same_round():
    speed = [1.0, 2.0, 4.0, 8.0, 16.0]
    reference = [10 * factor for factor in speed]
    times = [15 * factor for factor in reversed(speed)]
    assert median_ratio([15 * factor for factor in speed], reference) == Median(1.5, 1.5, 1.5)
    assert median_ratio(times, reference).spread > 1  # of different rounds, it would not
    with pytest.raises(ValueError, match="longer"):
        median_ratio([1.0], [1.0, 2.0])


def test_a_block_lasts_as_long_as_it_should(clock):
    assert steps_per_block(clock.step("a", 0.001), 0.05, clock) == 50
    assert steps_per_block(clock.step("a", 0.5), 2.25, clock) == 4  # 4.5, rounded to even
    assert steps_per_block(clock.step("a", 7.0), 0.05, clock) == 1
    assert steps_per_block(clock.step("a", 0.0), 0.05, clock) == MOST_STEPS
    begin = clock.now
    assert time_block(clock.step("a", 0.25), 3, clock) == 0.75 and clock.now == begin + 0.75


def test_blocks_take_turns_there_and_back(clock):
    steps = {"a": clock.step("a", 1.0), "b": clock.step("b", 2.0), "c": clock.step("c", 3.0)}
    told = []
    timings = interleave(steps, rounds=3, seconds=1.0, clock=clock, on_block=told.append)
    assert clock.log == [*"abc", *"abc", *"cba", *"abc"] == told  # first, how long a block is
    assert timings.steps == {"a": 1, "b": 1, "c": 1}
    assert timings.time("b") == Median(2.0, 2.0, 2.0)
    assert timings.ratio("c", "b") == Median(1.5, 1.5, 1.5)
    assert timings.time("d") is None and timings.ratio("a", "d") is None


def test_a_clock_that_slows_down_changes_times_but_no_ratio(clock):
    blocks = []

    def slow_down_every_round(name):
        blocks.append(name)
        clock.speed = 2.0 ** max(0, (len(blocks) - 3) // 2)  # the first two only try it out

    steps = {"a": clock.step("a", 1.0), "b": clock.step("b", 1.25)}
    timings = interleave(steps, rounds=5, seconds=10.0, clock=clock, on_block=slow_down_every_round)
    assert timings.steps == {"a": 10, "b": 8}
    assert timings.seconds["a"] == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert timings.time("a") == Median(4.0, 2.0, 8.0)
    assert timings.ratio("b", "a") == Median(1.25, 1.25, 1.25)


def test_a_step_that_fails_is_given_up_and_the_others_go_on(clock):
    calls = []

    def fail_later():
        calls.append(1)
        clock.now += 1.0
        if len(calls) == 3:
            raise RuntimeError("out of\nmemory")

    def fail():
        raise MemoryError

    steps = {"a": clock.step("a", 1.0), "later": fail_later, "never": fail}
    timings = interleave(steps, rounds=3, seconds=1.0, clock=clock)
    assert timings.errors == {"later": "RuntimeError: out of", "never": "MemoryError"}
    assert timings.seconds == {"a": [1.0, 1.0, 1.0]}
    assert timings.time("later") is None and timings.ratio("later", "a") is None


def test_errors_of_ours_say_what_they_are():
    assert reason(VirtualGradError("given: this")) == "given: this"
    assert len(reason(ValueError("x" * 1000))) == 300


def test_the_clock_of_a_device_goes_on():
    clock = clock_of(torch.device("cpu"))
    assert clock() <= clock()
