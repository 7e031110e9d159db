"""The recipes against the paper's tables, written out here a second time from its text."""

from dataclasses import replace

import pytest

from virtualgrad.errors import HyperparameterError
from virtualgrad.lab.networks import MLP, VGG, ResNet20
from virtualgrad.lab.recipes import RECIPES

# Columns as in the paper: RMSProp, Adam, SGD, SVGD; one row of alpha per phase.
TABLES = {
    "mlp": """
        0.001     0.001     0.1   0.01
        0.0005    0.00005   0.05  0.005
        0.00005   0.00005   0.01  0.001
        1.80      1.94      1.76  1.60
    """,
    "vgg": """
        0.02      0.02      2.0   2.0
        0.01      0.01      0.5   0.5
        0.002     0.005     0.005 0.005
        17.78     18.02     17.32 17.07
    """,
    "resnet20": """
        0.001     0.001     0.1   0.5
        0.0001    0.0001    0.01  0.02
        0.0001    0.00005   0.001 0.01
        11.18     11.12     10.69 8.62
    """,
}
# s, batch size, steps, steps at which alpha changes, l1, steps between evaluations, test batch
REST = {
    "mlp": (0.1, 32, 6_000, (1_600, 3_600), 0.0001, 100, 10_000),
    "vgg": (0.001, 128, 35_000, (12_000, 24_000), 0.00001, 1_000, 1_000),
    "resnet20": (0.01, 128, 50_000, (32_000, 42_000), 0.0001, 1_000, 1_000),
}


@pytest.mark.parametrize("name", TABLES)
def test_rates_and_errors_are_the_papers(name):
    *rates, errors = [
        [float(cell) for cell in row.split()] for row in TABLES[name].split("\n")[1:-1]
    ]
    tuned = [RECIPES[name].optimizers[column] for column in ("rmsprop", "adam", "sgd", "svgd")]
    assert [one.lr for one in tuned] == list(zip(*rates, strict=True))
    assert [one.paper_error for one in tuned] == errors


@pytest.mark.parametrize("name", REST)
def test_the_rest_is_the_papers_and_the_released_codes(name):
    recipe = RECIPES[name]
    assert REST[name] == (
        recipe.optimizers["svgd"].options["scale"],
        recipe.batch_size,
        recipe.steps,
        recipe.milestones,
        recipe.l1,
        recipe.evaluate_every,
        recipe.test_batch,
    )
    assert [dict(recipe.optimizers[other].options) for other in ("rmsprop", "adam", "sgd")] == [
        {}
    ] * 3


def test_networks_and_data():
    assert {name: (recipe.network, recipe.data) for name, recipe in RECIPES.items()} == {
        "mlp": (MLP, "mnist"),
        "vgg": (VGG, "cifar10"),
        "resnet20": (ResNet20, "cifar10"),
    }


def test_phases_begin_at_their_milestone():
    phase = RECIPES["mlp"].phase
    assert [phase(step) for step in (0, 1_599, 1_600, 3_599, 3_600, 5_999)] == [0, 0, 1, 1, 2, 2]


def test_a_learning_rate_per_phase_is_asked_for():
    with pytest.raises(HyperparameterError, match=r"3 learning rates for rmsprop.*2 here"):
        replace(RECIPES["mlp"], milestones=(10,))
