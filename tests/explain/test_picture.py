"""The picture: the paper's computational graph in Graphviz's language, and as files."""

import os
import re
import stat

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import virtualgrad
from virtualgrad.errors import GraphvizError
from virtualgrad.explain import explain
from virtualgrad.lab.networks import MLP, VGG, ResNet20

T_EDGE = 'label=" T "'


class Block(nn.Module):
    """Attention over tied embeddings, with a parameter under an op that is not linear."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, tokens):
        x = self.embed(tokens)
        y, weights = self.attend(x, x, x)
        return y @ self.embed.weight.T * self.temperature.exp(), weights


MODELS = [
    (MLP, torch.randn(4, 784)),
    (VGG, torch.randn(2, 3, 32, 32)),
    (ResNet20, torch.randn(2, 3, 8, 8)),
    (Block, torch.randint(11, (4, 5))),
    (lambda: nn.LSTM(3, 5), torch.randn(6, 4, 3)),
]


def edges_of(dot):
    """(label of source, label of target, whether T sits on it) of every edge."""
    labels = dict(re.findall(r'^  (\w+) \[label="([^\\"]*)', dot, flags=re.M))
    found = re.findall(r"^  (\w+) -> (\w+)(.*)$", dot, flags=re.M)
    return [(labels[a], labels[b], T_EDGE in look) for a, b, look in found]


@pytest.mark.parametrize("where", [None, virtualgrad.weights_only, lambda site: False])
@pytest.mark.parametrize(("network", "inputs"), MODELS)
def test_parameters_and_t_edges(network, inputs, where):
    found = explain(network(), inputs, where=where)
    dot = found.to_dot()
    assert all(f'[label="{name}\\n' in dot for name in found.parameters)
    pairs = sum(len(site.parameters) for site in found.transformed)
    assert dot.count(T_EDGE) == pairs
    assert sum(t for _, _, t in edges_of(dot)) == pairs


def test_the_graph_of_a_small_model():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))
    dot = explain(model, torch.randn(8, 3), where=virtualgrad.weights_only).to_dot()
    assert edges_of(dot) == [
        ("0.weight", "linear", True),
        ("0.bias", "linear", False),
        ("linear", "relu", False),
        ("2.weight", "linear", True),
        ("relu", "linear", False),
        ("linear", "output", False),
    ]


def test_views_are_left_out_and_an_op_of_many_nodes_is_one_value():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(3, 12)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 4)).unbind(-2)
            return F.scaled_dot_product_attention(q, k, v).mT

    dot = explain(Attention(), torch.randn(2, 5, 3)).to_dot()
    assert [edge[:2] for edge in edges_of(dot)] == [
        ("qkv.weight", "linear"),
        ("qkv.bias", "linear"),
        ("linear", "scaled_dot_product_attention"),
        ("scaled_dot_product_attention", "output"),
    ]


def test_a_tied_weight_is_one_node_with_an_edge_per_use():
    edges = edges_of(explain(Block(), torch.randint(11, (4, 5))).to_dot())
    assert [(b, t) for a, b, t in edges if a == "embed.weight"] == [
        ("embedding", True),
        ("matmul", True),
    ]
    assert ("temperature", "exp", False) in edges
    assert {b for _, b, _ in edges if b.startswith("output")} == {"output 0", "output 1"}


def test_inputs_that_require_grad_and_ops_outside_the_model_are_shown():
    model = nn.Linear(3, 4)
    model.register_forward_pre_hook(lambda module, args: (args[0].sin(),))
    x = torch.randn(2, 3, requires_grad=True)
    assert edges_of(explain(model, x).to_dot()) == [
        ("input", "sin", False),
        ("weight", "linear", True),
        ("bias", "linear", True),
        ("sin", "linear", False),
        ("linear", "output", False),
    ]


def test_two_inputs_are_two_nodes_and_views_of_them_none():
    model = nn.Bilinear(3, 4, 2)
    x, y = torch.randn(5, 3, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    dot = explain(model, x, y.T).to_dot()
    assert sum(a == "input" for a, _, _ in edges_of(dot)) == 2


def test_a_parameter_that_is_returned_leads_to_the_output():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(2, 3))

        def forward(self, x):
            return self.a.T

    assert edges_of(explain(Table(), torch.ones(1)).to_dot()) == [("a", "output", False)]


def test_names_are_quoted():
    model = nn.Module()
    model.register_parameter('a "b" \\c', nn.Parameter(torch.ones(3)))
    model.forward = lambda x: x * next(model.parameters())
    dot = explain(model, torch.randn(4, 3)).to_dot()
    assert 'label="a \\"b\\" \\\\c\\n3"' in dot


def test_the_legend_names_the_three_kinds_of_values_and_t():
    dot = explain(nn.Linear(3, 4), torch.randn(2, 3)).to_dot()
    legend = dot.split("label=<", 1)[1].split("</TABLE>", 1)[0]
    for meaning in ("parameter", "σ", "other value", "output", "pull-back of T(g)"):
        assert meaning in legend


# -------------------------------------------------------------------- files


@pytest.fixture
def found():
    return explain(nn.Linear(3, 4), torch.randn(2, 3))


@pytest.fixture
def fake_dot(tmp_path, monkeypatch):
    """A program ``dot`` that answers with its arguments and what it was given."""

    def install(script='printf "<?xml?><svg>%s " "$@"; cat; printf "</svg>"'):
        folder = tmp_path / "bin"
        folder.mkdir()
        program = folder / "dot"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    return install


@pytest.mark.parametrize("name", ["graph.dot", "graph.gv", "GRAPH.DOT"])
def test_text_is_saved_without_graphviz(found, tmp_path, monkeypatch, name):
    monkeypatch.setenv("PATH", "")
    path = found.save(tmp_path / name)
    assert path.read_text(encoding="utf-8") == found.to_dot()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_pictures_are_drawn_by_dot(found, tmp_path, fake_dot, suffix):
    fake_dot()
    path = found.save(str(tmp_path / f"graph{suffix}"))
    text = path.read_text(encoding="utf-8")
    assert text == f"<?xml?><svg>-T{suffix[1:]} {found.to_dot()}</svg>"


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_without_graphviz_the_error_says_what_to_do(found, tmp_path, monkeypatch, suffix):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(GraphvizError, match=r"no program 'dot'.*install Graphviz.*\.dot"):
        found.save(tmp_path / f"graph{suffix}")
    assert not list(tmp_path.iterdir())


def test_a_failure_of_dot_is_told_and_leaves_the_old_file(found, tmp_path, fake_dot):
    fake_dot("cat > /dev/null; echo half; echo 'no such format' >&2; exit 3")
    path = tmp_path / "graph.svg"
    path.write_text("old")
    with pytest.raises(GraphvizError, match="code 3: no such format"):
        found.save(path)
    assert path.read_text() == "old"


def test_a_failure_to_write_leaves_no_half_file(found, tmp_path):
    taken = tmp_path / "graph.dot"
    taken.mkdir()
    with pytest.raises(OSError, match=r"graph\.dot"):
        found.save(taken)
    assert list(tmp_path.iterdir()) == [taken]


@pytest.mark.parametrize("name", ["graph", "graph.jpeg2000"])
def test_an_unknown_suffix(found, tmp_path, name):
    with pytest.raises(GraphvizError, match=r"allowed: \.dot, \.gv, \.svg, \.png, \.pdf"):
        found.save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_notebooks_show_the_picture(found, fake_dot):
    fake_dot()
    html = found._repr_html_()
    assert html.startswith("<table>")
    assert "<svg>-Tsvg digraph" in html
    assert "<?xml" not in html


def test_notebooks_without_graphviz_say_how_to_get_it(found, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "install Graphviz" in found._repr_html_()
