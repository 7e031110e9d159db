"""What only a GPU can do: graphs that make the same steps, and memory that is counted."""

from dataclasses import replace

import pytest
import torch

from virtualgrad.lab.bench.measure import Case, measure
from virtualgrad.lab.bench.memory import side_stream
from virtualgrad.lab.bench.methods import METHODS
from virtualgrad.lab.bench.modes import MODES, PRECISIONS, numbers_in
from virtualgrad.lab.bench.networks import NETWORKS, tiny
from virtualgrad.lab.bench.work import Workshop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def gpu(setup):
    return replace(setup, device=torch.device("cuda"), compiler="aot_eager")


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["mlp", "vgg", "gpt2"])
def test_every_mode(gpu, name, mode, precision):
    torch.compiler.reset()
    network = tiny(NETWORKS[name])
    case = Case(network, PRECISIONS[precision], MODES[mode], tuple(METHODS.values()))
    with numbers_in(case.precision), side_stream(gpu.device):
        rows = measure(case, Workshop(network, case.precision, gpu))
    assert [row.error for row in rows] == [None] * len(rows)
    assert all(row.ratio_to_sgd > 0 for row in rows)
    counted = [row.peak_bytes for row in rows]
    assert all(counted) if mode == "eager" else not any(counted)


@pytest.mark.parametrize("name", ["sgd", "adam", "svgd", "svgd-released"])
def test_a_graph_makes_the_steps_that_eager_makes(gpu, name):
    network, method = tiny(NETWORKS["mlp"]), METHODS[name]
    ends = []
    for mode in ("eager", "graphed"):
        with numbers_in(PRECISIONS["fp32"]), side_stream(gpu.device):
            work = Workshop(network, PRECISIONS["fp32"], gpu).make(method, MODES[mode])
            for _ in range(3):
                work.step()
            step = work.step
            if mode == "graphed":
                pool = torch.cuda.graph_pool_handle()
                step = work.captured(pool, torch.cuda.current_stream())
            for _ in range(2):
                step()
        torch.cuda.synchronize()
        # Weights only: the gradient of a bias before a batch norm is rounding, which Adam enlarges.
        weights = [p for p in work.forward.parameters() if p.dim() > 1]
        ends.append([weight.detach().clone() for weight in weights])
    for eager, graphed in zip(*ends, strict=True):
        torch.testing.assert_close(eager, graphed, rtol=1e-6, atol=1e-8)
