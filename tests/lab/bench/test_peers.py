"""Other libraries: said to be missing where they are, called as they want to be where not."""

import sys
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from torch import nn

from virtualgrad.lab.bench.methods import METHODS
from virtualgrad.lab.bench.modes import MODES, PRECISIONS
from virtualgrad.lab.bench.networks import tiny
from virtualgrad.lab.bench.peers import PEER_NETWORKS, PEERS, NotInstalledError
from virtualgrad.lab.bench.work import Workshop

NETWORK = tiny(PEER_NETWORKS["mlp-no-norm"])


@pytest.fixture
def make(setup):
    workshop = Workshop(NETWORK, PRECISIONS["fp32"], setup)
    return lambda name: workshop.make((METHODS | PEERS)[name], MODES["eager"])


@pytest.fixture
def module(monkeypatch):
    def put(name, **content):
        made = ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)

    return put


def test_no_batch_norm_is_left():
    for network in PEER_NETWORKS.values():
        layers = list(network.build().modules())
        assert not any(isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) for layer in layers)
        assert sum(isinstance(layer, nn.Linear | nn.Conv2d) for layer in layers) >= 5


@pytest.mark.parametrize("name", PEERS)
def test_missing_libraries_are_named(make, monkeypatch, name):
    for known in ("backpack", "opacus", "singd", "singd.optim.optimizer"):
        monkeypatch.setitem(sys.modules, known, None)
    with pytest.raises(NotInstalledError, match=r"^not installed.*; pip install"):
        make(name)


def test_a_missing_dependency_is_named_too(make, monkeypatch):
    def fail(name):
        raise ModuleNotFoundError("no einops", name="einops")

    monkeypatch.setattr("virtualgrad.lab.bench.peers.importlib.import_module", fail)
    with pytest.raises(NotInstalledError, match=r"einops is missing\); pip install backpack"):
        make("backpack")


def test_backpack_is_called_around_backward(make, module):
    calls = []

    @contextmanager
    def backpack(extension):
        calls.append(("begin", extension))
        yield
        calls.append("end")

    module("backpack", extend=lambda model: calls.append("extended") or model, backpack=backpack)
    module("backpack.extensions", SumGradSquared=lambda: "squares")
    make("backpack").step()
    assert calls == ["extended", ("begin", "squares"), "end"]


def test_opacus_forgets_the_samples(make, module):
    module("opacus", GradSampleModule=lambda model: model)
    work = make("opacus")
    parameters = list(work.forward.parameters())
    for parameter in parameters:
        parameter.grad_sample = torch.ones(1)
    work.step()
    assert all(p.grad_sample is None and p.grad is not None for p in parameters)


def test_singd_takes_the_model(make, module):
    def singd(model, *, lr, structures, T):
        assert structures == ("diagonal", "diagonal") and T == 1
        return torch.optim.SGD(model.parameters(), lr)

    module("singd")
    module("singd.optim")
    module("singd.optim.optimizer", SINGD=singd)
    make("singd").step()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PEERS)
def test_the_libraries_themselves(make, name):
    pytest.importorskip(name)
    work = make(name)
    for _ in range(2):
        work.step()
