"""The readings against closed forms of their first step, and against each other."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny_lab import TINY, TINY_COLOURS, tiny_colours, tiny_data

from virtualgrad.errors import HyperparameterError
from virtualgrad.lab.networks import MLP
from virtualgrad.lab.optimizers import OPTIMIZERS, state_bytes
from virtualgrad.lab.readings import LEFT_OUT, READINGS, with_readings
from virtualgrad.lab.recipes import RECIPES
from virtualgrad.lab.run import Run, Setup

# scale, eps, per sample, r of before, shared over positions, where; m is 32 and 128
SETTINGS = {
    "mlp": {
        "released": (0.1, 1e-6, False, True, False, "weights_only"),
        "updated-first": (0.1, 1e-6, False, False, False, "weights_only"),
        "per-sample": (3.2, 0.001024, True, True, False, "weights_only"),
        "per-sample-as-printed": (3.2, 1e-6, True, True, False, "weights_only"),
        "every-linear-op": (0.1, 1e-6, False, True, False, "every_linear_site"),
        "algorithm-1": (3.2, 1e-6, True, False, False, "every_linear_site"),
    },
    "resnet20": {
        "released": (0.01, 1e-6, False, True, False, "weights_only"),
        "updated-first": (0.01, 1e-6, False, False, False, "weights_only"),
        "per-sample": (1.28, 0.016384, True, True, False, "weights_only"),
        "per-sample-as-printed": (1.28, 1e-6, True, True, False, "weights_only"),
        "every-linear-op": (0.01, 1e-6, False, True, False, "every_linear_site"),
        "shared-positions": (0.01, 1e-6, False, True, True, "weights_only"),
        "algorithm-1": (1.28, 1e-6, True, False, False, "every_linear_site"),
    },
}
KEYS = ("scale", "eps", "per_sample", "stale", "share_positions", "where")
LR, M, S, RHO, EPS = TINY.optimizers["svgd"].lr[0], TINY.batch_size, 0.1, 0.9, 1e-6


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name):
    readings = with_readings(RECIPES[name]).optimizers
    assert list(readings) == list(SETTINGS[name])
    for reading, expected in SETTINGS[name].items():
        scale, eps, *choices, where = map(readings[reading].options.get, KEYS)
        assert (scale, eps) == pytest.approx(expected[:2], rel=1e-12)
        assert (*choices, where.__name__) == expected[2:]


@pytest.mark.parametrize("name", RECIPES)
def test_all_else_is_the_recipes(name):
    recipe, column = RECIPES[name], RECIPES[name].optimizers["svgd"]
    with_them = with_readings(recipe)
    assert replace(with_them, optimizers=recipe.optimizers) == recipe
    for tuned in with_them.optimizers.values():
        assert (tuned.method, tuned.lr, tuned.paper_error) == (column.method, column.lr, None)
    assert set(READINGS) == {*with_them.optimizers, *LEFT_OUT.get(name, {})}


def test_other_settings_of_the_column_are_kept():
    tuned = replace(TINY.optimizers["svgd"], options={"rho": 0.5, "eps": 1e-4})
    readings = with_readings(replace(TINY, optimizers={"svgd": tuned})).optimizers
    assert all(reading.options["rho"] == 0.5 for reading in readings.values())
    assert readings["released"].options["scale"] == 1
    assert readings["per-sample"].options["eps"] == pytest.approx(64e-4)


def test_a_recipe_without_svgd_is_named():
    recipe = replace(TINY, optimizers={"sgd": TINY.optimizers["sgd"]})
    with pytest.raises(HyperparameterError, match=r"'tiny' without the optimizer 'svgd'.*sgd"):
        with_readings(recipe)


def trained(reading, *, recipe=TINY_COLOURS, data=tiny_colours, steps=1):
    """Network before and after some steps, and the gradient that the first of them saw."""
    torch.manual_seed(0)
    model = recipe.network().double()
    before = copy.deepcopy(model)
    tuned = with_readings(recipe).optimizers[reading]
    optimizer = OPTIMIZERS[tuned.method](model, LR, **tuned.options)
    x, y = data().train_images.double() / 255, data().train_labels
    if recipe is TINY:
        x = x.flatten(1)
    for step in range(steps):
        rows = slice(M * step, M * (step + 1))
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    F.cross_entropy(before(x[:M]), y[:M]).backward()
    return before, model, optimizer


# T of the first step where r is 0: every weight goes s / sqrt(eps) times as far as by SGD.
@pytest.mark.parametrize(
    ("reading", "weights", "biases"),
    [
        ("released", S / math.sqrt(EPS), 1),
        ("per-sample", S / math.sqrt(EPS), 1),
        ("shared-positions", S / math.sqrt(EPS), 1),
        ("per-sample-as-printed", M * S / math.sqrt(EPS), 1),
        ("every-linear-op", S / math.sqrt(EPS), S / math.sqrt(EPS)),
    ],
)
def test_the_first_step_by_the_r_of_before(reading, weights, biases):
    before, after, _ = trained(reading)
    for (name, p), q in zip(before.named_parameters(), after.parameters(), strict=True):
        factor = biases if name.endswith("bias") else weights
        torch.testing.assert_close((p - q).detach(), LR * factor * p.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("reading", "unit", "biases"), [("updated-first", 1, False), ("algorithm-1", M, True)]
)
def test_the_first_step_by_an_updated_r(reading, unit, biases):
    """For the last layer: g_tau = (softmax - one-hot) / m, and r = (1 - rho) mean (unit g)^2."""
    before, after, _ = trained(reading)
    data = tiny_colours()
    x, y = data.train_images[:M].double() / 255, data.train_labels[:M]
    *first, _ = before
    hidden = torch.nn.Sequential(*first)(x).detach()
    g = (F.softmax(before(x), 1).detach() - F.one_hot(y, 10)) / M
    r = (1 - RHO) * (unit * g).square().mean(0)
    t = unit * S * g / torch.sqrt(r + EPS)
    went = [
        (p - q).detach() / LR
        for p, q in zip(before[-1].parameters(), after[-1].parameters(), strict=True)
    ]
    torch.testing.assert_close(went[0], t.T @ hidden, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(went[1], (t if biases else g).sum(0), rtol=1e-9, atol=1e-12)


def distance(reading, steps=10, **how):
    """Relative distance to the parameters that the released reading ends at."""
    vectors = [
        torch.nn.utils.parameters_to_vector(trained(name, steps=steps, **how)[1].parameters())
        for name in ("released", reading)
    ]
    return ((vectors[1] - vectors[0]).norm() / vectors[0].norm()).item()


def test_per_sample_in_matching_units_is_the_released_method():
    assert distance("per-sample") < 1e-12


@pytest.mark.parametrize("reading", [n for n in READINGS if n not in ("released", "per-sample")])
def test_the_other_readings_are_other_methods(reading):
    assert distance(reading) > 1e-3


def test_without_positions_there_is_nothing_to_share():
    """Why the MLP's table leaves that reading out."""
    assert distance("shared-positions", recipe=TINY, data=tiny_data) == 0
    assert not any(isinstance(layer, torch.nn.Conv2d) for layer in MLP().modules())


@pytest.mark.parametrize(
    ("reading", "numbers"),
    [("released", 4 * 6 * 6 + 10), ("shared-positions", 4 + 10), ("per-sample", 4 * 6 * 6 + 10)],
)
def test_size_of_r(reading, numbers):
    *_, optimizer = trained(reading)
    assert state_bytes(optimizer) == 8 * numbers  # in float64


def test_the_released_reading_is_the_column_of_the_table_bit_for_bit():
    ends = []
    for recipe, optimizer in ((TINY, "svgd"), (with_readings(TINY), "released")):
        run = Run(recipe, optimizer, 0, tiny_data(), Setup(torch.device("cpu")))
        run.batches.seek(0)
        for _ in range(5):
            run.train_step()
        ends.append([parameter.detach() for parameter in run.model.parameters()])
    assert all(map(torch.equal, *ends))


def test_a_record_tells_every_choice():
    record = Run(
        with_readings(TINY), "algorithm-1", 3, tiny_data(), Setup(torch.device("cpu"))
    ).record
    assert record.file_name == "tiny-algorithm-1-seed3.json"
    assert [record.settings[key] for key in KEYS] == [
        0.8, 1e-6, True, False, False, "every_linear_site"
    ]  # fmt: skip
