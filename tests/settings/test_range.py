"""range_test(): a parabola, on which the rate of divergence is known."""

import dataclasses
import math
import sys

import pytest
import torch
from torch import nn

from virtualgrad import range_test
from virtualgrad.errors import HyperparameterError, LossError
from virtualgrad.settings import MatplotlibMissingError, RangeCurve, RangeTest, SettingsError

X, Y = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
EPS = 1e-6


def half_square(output, target):
    return (output - target).square().sum() / 2


def parabola():
    """J = w^2 / 2 so near to 0 that r << eps: T multiplies by s / sqrt(eps)."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 1e-6)
    return model


@pytest.mark.parametrize("scale", [0.01, 0.1])
def test_the_loss_turns_where_the_parabola_says(scale):
    """w <- (1 - lr s / sqrt(eps)) w grows as soon as lr > 2 sqrt(eps) / s."""
    critical = 2 * math.sqrt(EPS) / scale
    steps, low, high = 60, critical / 30, critical * 30
    found = range_test(
        parabola(),
        half_square,
        [(X, Y)],
        scales=[scale],
        lr_min=low,
        lr_max=high,
        steps=steps,
        smoothing=0,
    )
    (curve,) = found.curves
    ratio = (high / low) ** (1 / (steps - 1))
    # The loss of a step is that of before it: the lowest stands at the first rate above.
    assert critical <= curve.lr_lowest <= critical * ratio
    assert curve.diverged
    assert curve.lr_diverged == curve.lr[-1] < high
    assert found.best == (curve.lr_lowest / 10, scale)


def test_every_loss_by_hand():
    scale, rates = 0.01, (0.01, 0.02, 0.04)
    (curve,) = range_test(
        parabola(), half_square, [(X, Y)], scales=[scale], lr_min=0.01, lr_max=0.04, steps=3
    ).curves
    assert curve.lr == pytest.approx(rates)
    w, losses = 1e-6, []
    for lr in rates:
        losses.append(w * w / 2)
        w *= 1 - lr * scale / math.sqrt(EPS)
    assert curve.loss == pytest.approx(losses, rel=1e-5)
    a, smoothed = 0.0, []
    for k, loss in enumerate(losses):
        a = 0.9 * a + 0.1 * loss
        smoothed.append(a / (1 - 0.9 ** (k + 1)))
    assert curve.smoothed == pytest.approx(smoothed, rel=1e-5)
    assert not curve.diverged and curve.lr_diverged is None


def test_a_gradient_that_is_not_finite_ends_a_curve():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1e3)

    def loss_fn(output, target):
        return output.square().square().sum()  # runs away, and overflows

    (curve,) = range_test(
        model, loss_fn, [(X.float(), Y.float())], scales=[1.0], lr_min=1e6, lr_max=1e9, steps=20,
        blow_up=math.inf,
    ).curves  # fmt: skip
    assert curve.diverged
    assert len(curve.lr) < 20
    assert all(map(math.isfinite, curve.loss))


def test_every_scale_sees_the_same():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    batches = [(torch.randn(6, 3), torch.randn(6, 2)) for _ in range(3)]
    settings = {"scales": (0.01, 0.01), "steps": 8, "lr_max": 0.1}
    first, second = range_test(model, half_square, batches, **settings).curves
    assert first == second
    (once,) = range_test(model, half_square, iter(batches), **settings | {"scales": (0.01,)}).curves
    assert once == first  # an iterator is kept for as long as it is needed


CURVES = (
    RangeCurve(0.01, (0.1, 1.0, 10.0), (3.0, 1.0, 2.0), (3.0, 2.0, 2.5), False),
    RangeCurve(0.1, (0.1, 1.0), (3.0, 9.0), (3.0, 9.0), True),
)


def test_the_table():
    found = RangeTest(CURVES)
    assert found.best == (0.1, 0.01) and found.best.lr == 0.1
    assert found.table()[0] == {
        "scale": 0.01,
        "lowest loss": 2.0,
        "lr there": 1.0,
        "lr suggested": 0.1,
        "diverged at lr": None,
    }
    assert found.table()[1]["diverged at lr"] == 1.0
    header, _, *rows, _, best = str(found).splitlines()
    assert header.split("  ")[-1].strip() == "diverged at lr"
    assert [row.split() for row in rows] == [
        ["0.01", "2", "1", "0.1", "-"],
        ["0.1", "3", "0.1", "0.01", "1"],
    ]
    assert best == "best: lr=0.1, scale=0.01"
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.curves = ()


def test_the_plot(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.figure import Figure

    own = Figure().subplots()
    assert RangeTest(CURVES).plot(own) is own
    new = RangeTest(CURVES).plot()
    assert new is not own and new.get_xscale() == "log"
    assert [text.get_text() for text in new.get_legend().get_texts()] == ["0.01", "0.1"]
    lines = [tuple(line.get_xdata()) for line in new.lines]
    assert CURVES[0].lr in lines and CURVES[1].lr in lines
    marked = {line.get_marker(): list(line.get_xdata()) for line in new.lines}
    assert (marked["x"], marked["*"]) == ([1.0], [0.1])
    assert "lr=0.1, scale=0.01" in new.texts[0].get_text()
    low, high = new.get_ylim()
    assert low < 2.0 and 3.0 < high < 9.0  # what blew up does not flatten the rest
    new.figure.canvas.draw()
    pyplot.close(new.figure)


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MatplotlibMissingError, match="pip install matplotlib"):
        RangeTest(CURVES).plot()
    assert "best" in str(RangeTest(CURVES))


@pytest.mark.parametrize(
    ("wrong", "given"),
    [
        ({"scales": ()}, "no scales"),
        ({"lr_min": 0.0}, "lr_min=0.0"),
        ({"lr_min": 1.0, "lr_max": 0.1}, "lr_min=1.0, lr_max=0.1"),
        ({"steps": 1}, "steps=1"),
        ({"smoothing": 1.0}, "smoothing=1.0"),
        ({"blow_up": 1.0}, "blow_up=1.0"),
        ({"scales": (-1.0,)}, "scale=-1.0"),
    ],
)
def test_what_is_refused(wrong, given):
    with pytest.raises(HyperparameterError, match=f"given: {given}"):
        range_test(parabola(), half_square, [(X, Y)], **wrong)


def test_other_refusals():
    for empty in ([], iter(())):
        with pytest.raises(SettingsError, match="no batches"):
            range_test(parabola(), half_square, empty)
    with pytest.raises(LossError, match="shape"):
        range_test(parabola(), lambda output, target: output.repeat(2, 1), [(X, Y)])


def test_a_loss_that_only_grew_is_said_so():
    curve = RangeCurve(0.01, (1e-4, 1e-3, 1e-2), (1.0, 2.0, 3.0), (1.0, 1.5, 2.0), diverged=False)
    assert "no rate of this range lowers it" in str(RangeTest((curve,)))


def test_a_loss_that_still_fell_is_said_so():
    curve = RangeCurve(0.01, (1e-4, 1e-3, 1e-2), (3.0, 2.0, 1.0), (3.0, 2.0, 1.0), diverged=False)
    assert "take a larger lr_max" in str(RangeTest((curve,)))
