"""The networks have the sizes that their names promise, and train with every optimizer."""

import pytest
import torch

from virtualgrad.lab.bench.methods import METHODS
from virtualgrad.lab.bench.modes import MODES, PRECISIONS
from virtualgrad.lab.bench.networks import NETWORKS, tiny
from virtualgrad.lab.bench.peers import PEER_NETWORKS
from virtualgrad.lab.bench.scaling import AXES, COMPARED, place_of, scaling_cases
from virtualgrad.lab.bench.work import Workshop

PARAMETERS = {
    "mlp": 245_482,
    "vgg": 46_126,
    "resnet20": 269_722,
    "resnet50": 25_557_032,  # torchvision's number
    "vit": 22_049_896,  # timm's 22,050,664 without the class token and its position
    "gpt2": 124_439_808,  # GPT-2's own
}


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_sizes(network):
    with torch.device("meta"):
        model, (x, y) = network.build(), network.inputs(network.batch_size)
        logits = model(x)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[network.name]
    assert logits.shape[:-1] == y.shape and len(y) == network.batch_size
    assert network.loss(logits, y).dim() == 0


@pytest.mark.parametrize("network", (NETWORKS | PEER_NETWORKS).values(), ids=lambda n: n.name)
def test_tiny_versions_train_from_the_same_start(network, setup):
    workshop = Workshop(tiny(network), PRECISIONS["fp32"], setup)
    works = [workshop.make(METHODS[name], MODES["eager"]) for name in ("sgd", "svgd-released")]
    weights = [[p.detach().clone() for p in work.forward.parameters()] for work in works]
    assert all(map(torch.equal, *weights))
    for work, before in zip(works, weights, strict=True):
        work.step()
        after = list(work.forward.parameters())
        assert not all(map(torch.equal, before, after)) and all(p.isfinite().all() for p in after)


def test_the_axes_of_scaling_change_one_size_each():
    cases = list(scaling_cases(PRECISIONS["fp32"], MODES["eager"]))
    assert [place_of(case.network.name) for case in cases] == [
        (axis, value) for axis, values in AXES.items() for value in values
    ]
    assert all(case.methods == COMPARED for case in cases)
    assert place_of("mlp") is None and place_of("lr=3") is None
    with torch.device("meta"):
        for case in cases:
            network = case.network
            x, y = network.inputs(network.batch_size)
            assert network.build()(x).shape == (len(y), 10)
            axis, value = place_of(network.name)
            assert {"batch": len(x), "image": x.shape[-1]}.get(axis, value) == value
