"""The table: aligned text, and escaped HTML."""

import pytest
import torch
from torch import nn

import virtualgrad
from virtualgrad.explain import explain
from virtualgrad.lab.networks import MLP, ResNet20


class Named(nn.Module):
    """One parameter under any name."""

    def __init__(self, *names):
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(3)))

    def forward(self, x):
        for parameter in self.parameters():
            x = x * parameter
        return x


def test_the_table_of_a_small_model():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))
    text = str(explain(model, torch.randn(8, 3), where=virtualgrad.weights_only))
    assert text.splitlines() == [
        "sigma                 op          parameters       linear  T       shape"
        "  sample axis  state",
        "--------------------  ----------  ---------------  ------  ------  -----"
        "  -----------  -----",
        "0:linear(weight)      linear      0.{weight,bias}  yes     weight  8x4  "
        "  0                4",
        "1:batch_norm(weight)  batch_norm  1.{weight,bias}  yes     -       8x4  "
        "  0                -",
        "2:linear(weight)      linear      2.weight         yes     yes     8x2  "
        "  0                2",
        "",
        "Sequential: 5 parameters with 32 numbers; T acts at 2 of 3 sigmas.",
        "r holds 6 numbers: 18.8 % of RMSProp's state (32), 9.38 % of Adam's (64).",
        "",
        "No T on 3 parameters: left out by where",
        "  0.bias, 1.{weight,bias}",
    ]


def test_in_a_console_the_table_shows_without_print():
    found = explain(nn.Linear(3, 4), torch.randn(8, 3))
    assert repr(found) == str(found)


@pytest.mark.parametrize(("network", "shape"), [(MLP, (4, 784)), (ResNet20, (2, 3, 8, 8))])
def test_rows_are_as_wide_as_the_header(network, shape):
    lines = str(explain(network(), torch.randn(shape))).splitlines()
    rows = lines[: lines.index("")]
    assert {len(row) for row in rows} == {len(rows[0])}
    assert len(rows[0]) < 140


def test_long_names_are_shortened_in_the_table_but_not_in_the_reasons():
    found = explain(nn.LSTM(3, 5, num_layers=4, bidirectional=True), torch.randn(6, 4, 3))
    text = str(found)
    assert "..." in text
    assert all(name in text for name in found.uncovered)
    assert max(len(line) for line in text.splitlines()) < 160


def test_samples_and_positions_in_one_axis():
    model = nn.Sequential(nn.Flatten(0, 1), nn.Linear(3, 2))
    assert "0 of 4x5x2" in str(explain(model, torch.randn(4, 5, 3)))


def test_a_scalar_sigma():
    class Sum(Named):
        def forward(self, x):
            return x + self.a.sum()

    assert "  scalar  " in str(explain(Sum("a"), torch.randn(4, 3)))


def test_html_holds_the_same_cells_and_escapes_them(monkeypatch):
    monkeypatch.setenv("PATH", "")
    html = explain(Named("a<b>&\"c'"), torch.randn(4, 3))._repr_html_()
    assert "<b>" not in html
    assert "a&lt;b&gt;&amp;&quot;c&#x27;" in html
    assert html.count("<th>") == 8
    assert html.count("<td>") == 8
    assert "No T on" not in html


def test_html_says_what_is_left_out(monkeypatch):
    monkeypatch.setenv("PATH", "")
    html = explain(Named("a", "b"), torch.randn(4, 3), where=lambda site: False)._repr_html_()
    assert "left out by where: <code>a, b</code>" in html
