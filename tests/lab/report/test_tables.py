"""The tables: the paper's layout, in Markdown and on the terminal."""

import io
from dataclasses import replace

from rich.console import Console

from virtualgrad.lab.report import print_table
from virtualgrad.lab.report.markdown import markdown
from virtualgrad.lab.report.sections import gather
from virtualgrad.lab.report.tables import table_of


def rows_of(records):
    (section,) = gather(records)
    return {row.label: [str(entry) for entry in row.entries] for row in table_of(section).rows}


def printed(records, width=80):
    stream = io.StringIO()
    print_table(records, Console(file=stream, width=width))
    return stream.getvalue()


def test_markdown_of_a_table(make):
    runs = [
        make("mlp", optimizer, seed, lowest=mean + (-0.1, 0.1)[seed], last=mean + 0.2)
        for optimizer, mean in (("sgd", 1.8), ("svgd", 1.6))
        for seed in (0, 1)
    ]
    # Two values 0.2 apart have the sample deviation 0.2 / sqrt(2) = 0.14.
    assert "\n".join(markdown(gather(runs)).splitlines()[:13]) == (
        "### MLP on MNIST\n"
        "\n"
        "|  | RMSProp | Adam | SGD | SVGD |\n"
        "| --- | ---: | ---: | ---: | ---: |\n"
        "| α from step 0 | – | – | 0.1 | 0.01 |\n"
        "| α from step 1,600 | – | – | 0.05 | 0.005 |\n"
        "| α from step 3,600 | – | – | 0.01 | 0.001 |\n"
        "| s | – | – | – | 0.1 |\n"
        "| lowest error, % | – | – | 1.80 ± 0.14 | **1.60 ± 0.14** |\n"
        "| last error, % | – | – | 2.00 ± 0.00 | **1.80 ± 0.00** |\n"
        "| seeds | – | – | 2 | 2 |\n"
        "| paper's lowest, % | 1.80 | 1.94 | 1.76 | 1.60 |\n"
        "| difference, points | – | – | +0.04 | +0.00 |"
    )


def test_settings_are_written_without_exponent(make):
    assert rows_of([make(optimizer="adam")])["α from step 3,600"][1] == "0.00005"


def test_one_seed_has_a_dash_for_the_deviation(make):
    assert rows_of([make(lowest=1.6)])["lowest error, %"] == ["–", "–", "–", "1.60 ± –"]


def test_best_is_the_least_number_and_ties_share_it(make):
    runs = [
        make("resnet20", "svgd", lowest=9.13),
        make("resnet20", "sgd", lowest=11.25),
        make("resnet20", "adam", lowest=9.1301),
    ]
    (section,) = gather(runs)
    lowest = next(row for row in table_of(section).rows if row.label == "lowest error, %")
    assert [entry.best for entry in lowest.entries] == [False, True, False, True]


def test_difference_is_signed_and_left_out_where_it_means_nothing(make, digits):
    label = "difference, points"
    assert rows_of([make(lowest=1.5)])[label][3] == "−0.10"
    assert rows_of([make(lowest=1.5, data=digits)])[label][3] == "–"


def test_names_are_not_read_as_markdown(make):
    text = markdown(gather([replace(make(), optimizer="a|b<i>$x$")]))
    assert "a\\|b&lt;i>\\$x\\$" in text


def test_markdown_warns_of_digits_and_names_open_runs(make, digits):
    text = markdown(gather([make(data=digits)]))
    assert text.startswith("> **Warning:** These results are on the small embedded digits set")
    assert "Not finished: RMSProp, seed 0: missing; Adam" in text


def test_terminal_table_fits_eighty_columns(paper_runs):
    text = printed(paper_runs)
    assert max(map(len, text.splitlines())) <= 80
    assert "17.07 ± 0.14" in text
    assert "✓ SVGD has the lowest mean error, 8.62 %: 2.07 points below SGD" in text


def test_terminal_tells_of_open_runs_and_digits(make, digits):
    text = printed([make(data=digits)], width=200)
    assert "Adam, seed 0: missing" in text
    assert "They are NOT comparable with the paper." in text


def test_terminal_prints_markup_in_names_as_it_is(make):
    assert "[bold]mine" in printed([replace(make(), optimizer="[bold]mine")], width=200)


def test_print_table_goes_to_standard_output(make, capsys):
    print_table([make()])
    assert "MLP on MNIST" in capsys.readouterr().out
