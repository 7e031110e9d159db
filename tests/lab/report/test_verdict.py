"""The sentences follow from the numbers, also where they are unwelcome."""

import pytest

from virtualgrad.lab.report.sections import gather
from virtualgrad.lab.report.verdict import verdict


def cells(make, recipe="mlp", **lowest):
    """Two seeds per optimizer, 0.01 to either side of a mean."""
    return [
        make(recipe, optimizer, seed, lowest=mean + (-0.01, 0.01)[seed])
        for optimizer, mean in lowest.items()
        for seed in (0, 1)
    ]


def findings(records):
    (section,) = gather(records)
    return [(finding.text, finding.holds) for finding in verdict(section)]


def test_success(make):
    assert findings(cells(make, svgd=1.62, sgd=1.76, adam=1.9)) == [
        # Deviation sqrt(2)/100 over two seeds: standard error sqrt(2 * 2e-4 / 2) = 0.014.
        (
            "SVGD has the lowest mean error, 1.62 %: 0.14 points below SGD (standard error 0.01).",
            True,
        ),
        (
            "SVGD's mean of 1.62 % lies 0.02 points above the paper's 1.60 %: "
            "within the tolerance of 0.3.",
            True,
        ),
    ]


def test_failure(make):
    assert findings(cells(make, svgd=2.0, sgd=1.76)) == [
        (
            "SGD has the lowest mean error, 1.76 %: 0.24 points below SVGD (standard error 0.01). "
            "SVGD lies 0.24 points above it.",
            False,
        ),
        (
            "SVGD's mean of 2.00 % lies 0.40 points above the paper's 1.60 %: "
            "outside the tolerance of 0.3.",
            False,
        ),
    ]


@pytest.mark.parametrize(
    ("recipe", "paper", "tolerance"),
    [("mlp", 1.6, 0.3), ("vgg", 17.07, 0.8), ("resnet20", 8.62, 1)],
)
def test_tolerances_include_their_edge(make, recipe, paper, tolerance):
    for distance, holds in ((tolerance, True), (tolerance + 0.02, False), (-tolerance, True)):
        *_, (_, found) = findings(cells(make, recipe, svgd=paper + distance))
        assert found is holds


@pytest.mark.parametrize(("sgd", "word", "holds"), [(10.2, "met", True), (10.0, "missed", False)])
def test_resnet20_must_lead_by_a_margin(make, sgd, word, holds):
    lead = [
        finding
        for finding in findings(cells(make, "resnet20", svgd=8.7, sgd=sgd))
        if "goal" in finding[0]
    ]
    assert lead == [
        (
            f"SVGD is {sgd - 8.7:.2f} points better than SGD; the goal of 1.5 points is {word}.",
            holds,
        )
    ]


def test_a_lead_within_the_noise_is_called_so(make):
    text, _ = findings(cells(make, svgd=1.75, sgd=1.76))[0]
    assert "these seeds cannot tell the two apart" in text


def test_one_seed_cannot_tell_chance_from_merit(make):
    text, _ = findings([make(lowest=1.6), make(optimizer="sgd", lowest=1.8)])[0]
    assert text == (
        "SVGD has the lowest mean error, 1.60 %: 0.20 points below SGD "
        "(with one seed, chance cannot be told from merit)."
    )


def test_another_order_at_the_end_is_told(make):
    texts = [
        text
        for text, _ in findings(
            [make(lowest=1.6, last=1.9), make(optimizer="sgd", lowest=1.7, last=1.7)]
        )
    ]
    assert "By the last error SGD is best, 1.70 % on mean." in texts


def test_without_anything_to_compare(make):
    assert findings([make("vgg", "adam", lowest=18.0)]) == [
        ("Only Adam has finished runs: nothing to compare it with.", None)
    ]


def test_without_svgd_nothing_is_met_or_missed(make):
    ((text, holds),) = findings(cells(make, sgd=1.7, adam=1.9))
    assert text.startswith("SGD has the lowest mean error")
    assert holds is None


def test_no_goal_is_met_on_digits(make, digits):
    records = [make(lowest=1.6, data=digits), make(optimizer="sgd", lowest=1.8, data=digits)]
    found = findings(records)
    assert all(holds is None for _, holds in found)
    assert found[-1][0] == (
        "Not comparable with the paper: the data is digits (embedded), not the paper's."
    )
    assert not any("tolerance" in text for text, _ in found)
