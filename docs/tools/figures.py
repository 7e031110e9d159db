"""Makes every picture of the site that is not a record: ``python docs/tools/figures.py [NAME]``.

Pictures are committed, so that building the site needs neither Graphviz nor minutes. Same seeds,
same pictures.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.colors import LogNorm
from PIL import Image
from torch import Tensor, nn

from virtualgrad import SVGD, explain, operators, virtual_grad
from virtualgrad.explain.dot import EDGE_COLOUR, STYLES, T_COLOUR
from virtualgrad.explain.graphviz import save as save_graph
from virtualgrad.lab.figures.crossing import measure_success, pick_paths
from virtualgrad.lab.figures.style import BLUE, GREEN, ORANGE, WIDTH, name_panels, paper
from virtualgrad.lab.figures.valleys import (
    GRADIENT,
    RMSPROP,
    STEEPNESS,
    VIRTUAL,
    height,
    random_starts,
)
from virtualgrad.sites.graph import find_graph_sites

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
COLOURS = {GRADIENT: BLUE, RMSPROP: GREEN, VIRTUAL: ORANGE}
LABELS = {GRADIENT: "gradient descent", RMSPROP: "RMSProp: T on θ", VIRTUAL: "virtual: T on σ"}

T_EDGE = f'color="{T_COLOUR}", penwidth=2'
T_CIRCLE = f"shape=circle, width=0.32, fixedsize=true, {T_EDGE}"


def main() -> None:
    """Make all of them."""
    torch.set_num_threads(1)
    IMAGES.mkdir(exist_ok=True)
    made = {"commands": from_commands, "layer": draw_layer, "valleys": draw_valleys}
    made["graphs"] = draw_graphs
    for name in sys.argv[1:] or made:
        made[name]()


def from_commands() -> None:
    """The pictures of the command line: lemma, theorem, paths, and the runs of the paper."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("virtualgrad"))]
        for name in ("lemma", "theorem", "paths"):
            subprocess.run([*command, name, "--out", folder], check=True)
        report = [*command, "report", str(ROOT / "results" / "paper"), "--out", folder]
        subprocess.run(report, check=True)
        for name in ("lemma", "theorem", "paths", "error-mlp", "error-vgg"):
            with Image.open(Path(folder) / f"{name}.png") as picture:
                few = picture.convert("RGB").quantize(96)  # a third of the size, no visible loss
                few.save(IMAGES / f"{name}.png", optimize=True)


# ------------------------------------------------------------------ what T changes in a layer


def draw_layer() -> None:
    """The weight gradient of one linear layer: plain, by RMSProp, virtual."""
    torch.manual_seed(0)
    inputs, units, samples = 10, 8, 64
    x_scales = torch.logspace(-1.5, 0, inputs)
    g_scales = torch.logspace(-0.75, 0, units)[torch.randperm(units)]
    teacher = torch.randn(inputs, units)
    layer, operator, by_weight = nn.Linear(inputs, units, bias=False), operators.RMS(), {}
    for _ in range(30):  # the weights stay; the running means settle
        x = torch.randn(samples, inputs) * x_scales
        target = torch.randn(samples, units) + x @ teacher
        loss = ((layer(x) - target) * g_scales).square().sum(1).mean()
        (gradient,) = torch.autograd.grad(loss, layer.weight, retain_graph=True)
        direction, by_weight = operators.rmsprop(gradient, by_weight)
        (virtual,) = virtual_grad(loss, [layer.weight], operator)
    with paper(WIDTH, 2.75) as figure:
        panels = figure.subplots(1, 3)
        shown = (
            (gradient, "gradient"),
            (direction, "RMSProp: T on θ"),
            (virtual, "virtual: T on σ"),
        )
        for panel, (values, _) in zip(panels, shown, strict=True):
            _heat(panel, values)
        panels[0].set_ylabel("output unit (row of W)")
        name_panels(list(panels), [title for _, title in shown])
        bar = figure.colorbar(panels[0].images[0], ax=list(panels), shrink=0.85)
        bar.set_label("size, relative to the largest")
        figure.savefig(IMAGES / "layer.svg", metadata={"Date": None})


def _heat(panel: Any, values: Tensor) -> None:
    size = values.abs() / values.abs().max()
    panel.imshow(size, norm=LogNorm(1e-3, 1), cmap="viridis", aspect="auto")
    panel.set_xlabel("input (column of W)")
    panel.set_xticks([])
    panel.set_yticks([])


# ------------------------------------------------------------------ the paper's first figure, short


def draw_valleys() -> None:
    """One start and three methods; and how often each finds the deepest valley."""
    start = random_starts(100, 0)
    rates = [10 ** (k / 6) for k in range(-18, 4)]
    success = [measure_success(method, start, rates, (STEEPNESS,))[0] for method in COLOURS]
    lines = pick_paths(start, {result.method: result.good_and_small for result in success})
    with paper(WIDTH, 3.3) as figure:
        plane, often = figure.subplots(1, 2)
        axes = torch.linspace(-2.4, 1.9, 300).double(), torch.linspace(-2.8, 1.2, 300).double()
        x, y = torch.meshgrid(*axes, indexing="xy")
        z = torch.log1p(height(x, y))
        plane.contourf(x, y, z, 20, cmap="Greys_r", alpha=0.45)
        for method, path in lines.items():
            line = path.image[:, 0]
            plane.plot(*line.T.numpy(), "-o", color=COLOURS[method], linewidth=0.8, markersize=2)
            plane.plot(*line[-1].tolist(), "*", color=COLOURS[method], markersize=12, mec="black")
        plane.plot(*lines[VIRTUAL].image[0, 0].tolist(), "o", color="black", markersize=5)
        where = lines[VIRTUAL].image[0, 0].tolist()
        plane.annotate("start", where, (6, -4), textcoords="offset points")
        plane.set_xlabel(r"$\sigma_1$")
        plane.set_ylabel(r"$\sigma_2$")
        for result in success:
            percent = [100 * part for part in result.reached]
            label = LABELS[result.method]
            often.plot(result.alphas, percent, "-o", color=COLOURS[result.method], label=label)
        often.set_xscale("log")
        often.set_xlabel(r"learning rate $\alpha$")
        often.set_ylabel("% of 100 starts")
        often.legend(loc="upper left")
        name_panels([plane, often], ["One start", "How many find the deepest valley"])
        figure.savefig(IMAGES / "valleys.png", dpi=150)
    with Image.open(IMAGES / "valleys.png") as picture:
        picture.convert("RGB").quantize(96).save(IMAGES / "valleys.png", optimize=True)


# ------------------------------------------------------------------ the two encapsulations


class Net(nn.Module):
    """The network of the pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 3)
        self.out = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, 4) -> (samples, 2)."""
        return self.out(torch.relu(self.hidden(x)))


def draw_graphs() -> None:
    """The graph of a forward pass, and its backward graph in both encapsulations."""
    torch.manual_seed(0)
    model, x, y = Net(), torch.randn(8, 4), torch.randint(0, 2, (8,))
    explain(model, x).save(IMAGES / "graph.svg")
    loss = F.cross_entropy(model(x), y)
    save_graph(_backward(model, loss, rerouted=True), IMAGES / "topology.svg")
    with SVGD(model, lr=0.1):
        loss = F.cross_entropy(model(x), y)
        save_graph(_backward(model, loss, rerouted=False), IMAGES / "extended.svg")


def _backward(model: nn.Module, loss: Tensor, *, rerouted: bool) -> str:
    """The autograd graph of a loss as it was recorded, with T where it acts."""
    parameters = dict(model.named_parameters())
    names = {id(p): name for name, p in parameters.items()}
    sites = set()
    if rerouted:
        sites = {s.node for s in find_graph_sites([loss.grad_fn], parameters, batch_size=8)}
    ids: dict[Any, str] = {}
    unused: set[Any] = set()  # sites that pass nothing on but to parameters
    lines = [
        "digraph backward {",
        '  graph [rankdir=TB, nodesep=0.25, ranksep=0.3, bgcolor="transparent"]',
        '  node [fontname="Helvetica", fontsize=10, height=0.3, margin="0.1,0.05"]',
        f'  edge [fontname="Helvetica", fontsize=10, arrowsize=0.6, color="{EDGE_COLOUR}"]',
        f'  loss [label="J", {_look("output")}]',
    ]

    def name_of(node: Any) -> str:
        if node in ids:
            return ids[node]
        mine = ids[node] = f"n{len(ids)}"
        if hasattr(node, "variable"):
            title = names[id(node.variable)] + ("" if rerouted else ".grad")
            lines.append(f'  {mine} [label="{title}", {_look("parameter")}]')
            return mine
        extended = getattr(type(node), "_forward_cls", None) is not None
        edges = [after for after, _ in node.next_functions if after is not None]
        note = "\\ng to x, T(g) to θ" if extended else ""
        again = mine
        if node in sites:
            again = f"{mine}_again"
            lines.append(f'  {mine}_t [label="T", fontcolor="{T_COLOUR}", {T_CIRCLE}]')
            lines.append(f'  {again} [label="{node.name()}(T g)", {_look("sigma")}]')
            lines.append(f"  {mine}_t -> {again} [{T_EDGE}]")
        if node not in sites or not all(map(_leads_to_parameter, edges)):
            kind = "sigma" if node in sites or extended else "value"
            lines.append(f'  {mine} [label="{node.name()}{note}", {_look(kind)}]')
        else:
            unused.add(node)
        for after in edges:
            to_parameter = _leads_to_parameter(after)
            look = f" [{T_EDGE}]" if to_parameter and (extended or node in sites) else ""
            target = name_of(after)
            if to_parameter or after not in unused:
                lines.append(f"  {again if to_parameter else mine} -> {target}{look}")
        return mine

    lines.append(f"  loss -> {name_of(loss.grad_fn)}")
    for node, mine in list(ids.items()):  # T is fed by what feeds the site
        for before, source in ids.items():
            if node in sites and node in {after for after, _ in before.next_functions}:
                lines.append(f'  {source} -> {mine}_t [label=" g"]')
    return "\n".join([*lines, "}"]) + "\n"


def _look(kind: str) -> str:
    shape, fill, line = STYLES[kind]
    style = "filled" if shape == "ellipse" else "rounded,filled"
    return f'shape={shape}, style="{style}", fillcolor="{fill}", color="{line}"'


def _leads_to_parameter(node: Any) -> bool:
    return hasattr(node, "variable") or node.name() == "TBackward0"


if __name__ == "__main__":
    main()
