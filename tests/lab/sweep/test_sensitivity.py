"""The share of a range that does well, against what the formula of the errors gives."""

import numpy as np
import pytest
from sweep_fakes import BEST_ERROR, LR, SLOPE, error_at, trial

from virtualgrad.lab.sweep.pruning import LEAST_FINISHED, MARGIN, hopeless
from virtualgrad.lab.sweep.search import End
from virtualgrad.lab.sweep.sensitivity import CELLS, best_of, share_within
from virtualgrad.lab.sweep.spaces import Range

ONE = {"lr": LR}
TWO = {"lr": LR, "scale": Range(1e-3, 10)}
CELL = 1 / CELLS[1]


def test_cells_end_halfway_between_neighbours():
    # places 0.1, 0.4, 0.8 of the range: cells [0, 0.25], [0.25, 0.6], [0.6, 1]
    trials = [trial(n, LR.at(p), e) for n, (p, e) in enumerate([(0.1, 3), (0.4, 2), (0.8, 2.4)])]
    assert share_within(trials, ONE) == pytest.approx(0.75, abs=CELL)
    assert share_within(trials, ONE, within=0.1) == pytest.approx(0.35, abs=CELL)
    assert share_within(trials, ONE, within=1.0) == 1.0


def test_the_limit_belongs_to_the_range_that_does_well():
    trials = [trial(0, LR.at(0.25), 2.0), trial(1, LR.at(0.75), 2.5)]
    assert share_within(trials, ONE) == 1.0


def test_closed_form_in_one_dimension():
    """Errors rise by 3 points a decade: half a point is a sixth of one, either side, of four."""
    trials = [trial(n, LR.at(p)) for n, p in enumerate(np.linspace(0, 1, 801))]
    assert share_within(trials, ONE) == pytest.approx(2 * (0.5 / SLOPE) / 4, abs=0.002)


def test_crowded_trials_do_not_count_more():
    """As a search leaves them: most trials where errors are low. Their share of all is 97 %."""
    rng = np.random.default_rng(0)
    near = rng.uniform(0.47, 0.53, 2000)  # all within half a point
    far = np.linspace(0, 1, 60)
    trials = [trial(n, LR.at(p)) for n, p in enumerate([*near, *far])]
    best = best_of(trials).spread.mean
    well = [error_at(t.settings) <= best + 0.5 for t in trials]
    assert np.mean(well) > 0.95
    assert share_within(trials, ONE) == pytest.approx(2 * (0.5 / SLOPE) / 4, abs=0.02)


def test_closed_form_in_two_dimensions():
    """|x| + |y| <= 1/6 of a decade is a square of area 2/36 in 16 decades^2."""
    places = np.linspace(0, 1, 97)
    trials = [
        trial(n, TWO["lr"].at(x), scale=TWO["scale"].at(y))
        for n, (x, y) in enumerate((x, y) for x in places for y in places)
        if abs(x - 0.5) + abs(y - 0.5) < 0.12 or n % 7 == 0
    ]
    assert share_within(trials, TWO) == pytest.approx(2 / 36 / 16, rel=0.25)


def test_pruned_and_diverged_trials_count_as_outside():
    trials = [
        trial(0, LR.at(0.25), 2.0),
        trial(1, LR.at(0.75), 1.0, end=End.PRUNED),  # an error in the middle of a run
    ]
    assert best_of(trials).number == 0
    assert share_within(trials, ONE) == pytest.approx(0.5, abs=CELL)
    assert share_within([trial(0, 0.1, 100.0, end=End.DIVERGED)], ONE) is None
    assert share_within([], ONE) is None and best_of([]) is None


def test_equally_good_trials_the_first_wins():
    assert best_of([trial(3, 0.1, 2.0), trial(1, 0.2, 2.0)]).number == 1
    assert best_of([trial(0, 0.01)]).spread.mean == BEST_ERROR


def curves(*ends):
    return [{10: 50.0, 20: end} for end in ends]


def test_hopeless_is_far_behind_the_upper_quartile():
    others = curves(2, 3, 4, 5, 6)  # the upper quartile is 5
    assert not hopeless({10: 90.0, 20: 5 + MARGIN}, others, 0)
    assert hopeless({10: 90.0, 20: 5.01 + MARGIN}, others, 0)
    assert not hopeless({10: 9.0, 20: 80.0}, others, 0)  # its lowest counts
    assert not hopeless({10: 90.0, 20: 90.0}, others, 21)  # still warming up
    assert not hopeless({10: 90.0, 20: 90.0}, others[: LEAST_FINISHED - 1], 0)
    assert not hopeless({10: 90.0, 30: 90.0}, others, 0)  # nothing to compare with at that step
