"""One table for all networks: what a README has room for."""

import pytest

from virtualgrad.lab.report.markdown import (
    PLACE,
    READINGS,
    SHORT,
    markdown,
    readme_blocks,
    short_markdown,
)
from virtualgrad.lab.report.readme import marks
from virtualgrad.lab.report.sections import gather
from virtualgrad.lab.report.short import short_table


def pair(make, recipe, optimizer, mean, **changes):
    """Two seeds 0.2 apart: sample deviation 0.2 / sqrt(2) = 0.14, standard error 0.1."""
    return [
        make(recipe, optimizer, seed, lowest=mean + (-0.1, 0.1)[seed], last=mean + 0.5, **changes)
        for seed in (0, 1)
    ]


def test_in_closed_form(make):
    runs = [
        *pair(make, "mlp", "svgd", 1.6),
        *pair(make, "mlp", "sgd", 1.8),
        *pair(make, "resnet20", "svgd", 9.0),
        *pair(make, "resnet20", "adam", 11.0),
    ]
    text = short_markdown(gather(runs))
    assert "\n".join(text.splitlines()[:8]) == (
        "| Test error, % | SVGD | SGD | Adam | RMSProp |\n"
        "| --- | ---: | ---: | ---: | ---: |\n"
        "| MLP on MNIST: lowest | 1.60 ± 0.14 | 1.80 ± 0.14 | – | – |\n"
        "| last | **2.10 ± 0.00** | 2.30 ± 0.00 | – | – |\n"
        "| paper's lowest | 1.60 | 1.76 | 1.94 | 1.80 |\n"
        "| ResNet-20 on CIFAR-10: lowest | **9.00 ± 0.14** | – | 11.00 ± 0.14 | – |\n"
        "| last | **9.50 ± 0.00** | – | 11.50 ± 0.00 | – |\n"
        "| paper's lowest | 8.62 | 10.69 | 11.12 | 11.18 |"
    )
    assert "over 2 seeds." in text and "not comparable" not in text
    assert "Not finished: RMSProp, seeds 0, 1: missing" in text


# The standard error of a difference of two such means is sqrt(0.1² + 0.1²) = 0.141.
@pytest.mark.parametrize(("second", "told"), [(1.88, False), (1.89, True)])
def test_an_error_stands_out_beyond_twice_the_standard_error(make, second, told):
    runs = [*pair(make, "mlp", "svgd", 1.6), *pair(make, "mlp", "sgd", second)]
    runs += pair(make, "mlp", "adam", 5.0)  # far behind the best: no help
    lowest, *_ = short_table(gather(runs)).rows
    assert [entry.best for entry in lowest.entries] == [told, False, False, False]


def test_nothing_stands_out_alone_or_with_one_seed(make):
    alone = short_table(gather(pair(make, "mlp", "svgd", 1.6)))
    one = short_table(gather([make("mlp", "svgd", lowest=1.0), make("mlp", "sgd", lowest=9.0)]))
    assert not any(
        entry.best for table in (alone, one) for row in table.rows for entry in row.entries
    )


def test_seeds_are_counted_where_all_have_as_many(make):
    runs = [*pair(make, "mlp", "svgd", 1.6), make("mlp", "sgd", lowest=1.8)]
    assert "deviation over seeds." in short_markdown(gather(runs))


def test_other_data_is_not_set_beside_the_paper(make, digits):
    text = short_markdown(gather(pair(make, "mlp", "svgd", 1.6, data=digits)))
    assert text.startswith("> **Warning:** ")
    assert "| paper's lowest | – | – | – | – |" in text
    assert "instead: not comparable with the paper, as the data is" in text


def test_a_file_with_a_place_for_it_gets_it_in_place_of_the_long_tables(make):
    paper, own = pair(make, "mlp", "svgd", 1.6), [make("mlp", "released")]
    sections = gather([*paper, *own])
    assert list(readme_blocks(sections, marks(PLACE)[0])) == [PLACE, READINGS]
    blocks = readme_blocks(sections, f"{marks(SHORT)[0]}\n{marks(SHORT)[1]}")
    assert blocks == {
        SHORT: short_markdown(gather(paper)),
        READINGS: markdown(gather(own)),
    }
