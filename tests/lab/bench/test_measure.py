"""Cases on the CPU: rows with everything in them, and rows with errors."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

from virtualgrad.lab.bench import work as work_module
from virtualgrad.lab.bench.measure import Case, measure
from virtualgrad.lab.bench.methods import METHODS, Method
from virtualgrad.lab.bench.modes import MODES, PRECISIONS, numbers_in
from virtualgrad.lab.bench.networks import NETWORKS, Network, cross_entropy, tiny
from virtualgrad.lab.bench.work import Workshop

FP32 = PRECISIONS["fp32"]
MLP = tiny(NETWORKS["mlp"])


def rows_of(setup, methods, network=MLP, mode="eager", on_block=lambda name: None):
    case = Case(network, FP32, MODES[mode], tuple(methods))
    return {row.optimizer: row for row in measure(case, Workshop(network, FP32, setup), on_block)}


def test_a_row_for_every_optimizer(setup):
    told = []
    rows = rows_of(setup, METHODS.values(), on_block=told.append)
    assert list(rows) == list(METHODS)
    assert len(told) == Case(MLP, FP32, MODES["eager"], tuple(METHODS.values())).blocks(2)
    for row in rows.values():
        assert row.error is None and row.ms > 0 and row.ms_spread >= 0 and row.steps_per_block > 0
        assert row.ratio_quartiles[0] <= row.ratio_to_sgd <= row.ratio_quartiles[1]
        assert row.peak_bytes is None and row.peak_ratio_to_sgd is None  # nobody counts on a CPU
        assert row.parameters == 245_482 and row.batch_size == 4 and row.flops > 0
        assert row.state_per_parameter == row.state_bytes / row.parameters
        seconds = rows["sgd"].ms / 1e3
        assert row.floor_ratio == pytest.approx(1 + row.extra_bytes / 1e9 / seconds)
    assert rows["sgd"].ratio_to_sgd == 1 and rows["sgd"].ratio_spread == 0
    assert rows["sgd"].state_bytes == 0 and rows["sgd"].floor_ratio == 1
    assert rows["adam"].state_per_parameter == rows["adam-fused"].state_per_parameter == 8
    assert rows["momentum"].state_per_parameter == rows["rmsprop"].state_per_parameter == 4
    assert rows["svgd-released"].state_bytes == 4 * 490  # the r of the README


def failing(name, where):
    def make(model, capturable):
        if where == "make":
            raise torch.OutOfMemoryError("no room\nfor this")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if where == "step":
            optimizer.step = lambda: 1 / 0
        return optimizer

    return Method(name, name, make)


def test_failures_become_rows_and_stop_nobody(setup):
    methods = [METHODS["sgd"], failing("a", "make"), failing("b", "step"), METHODS["momentum"]]
    rows = rows_of(setup, methods)
    assert rows["a"].error == "OutOfMemoryError: no room"
    assert rows["b"].error == "ZeroDivisionError: division by zero"
    assert rows["a"].ms is None and rows["a"].floor_ratio is None
    assert rows["momentum"].ratio_to_sgd > 0 and rows["momentum"].error is None


def test_without_sgd_there_are_times_but_no_ratios(setup):
    broken = replace(METHODS["sgd"], make=failing("sgd", "make").make)
    rows = rows_of(setup, [broken, METHODS["momentum"]])
    assert rows["momentum"].ms > 0
    assert rows["momentum"].ratio_to_sgd is None and rows["momentum"].floor_ratio is None


def test_compiled_models_are_shared_by_plain_optimizers(setup, monkeypatch):
    compiled = []

    def compile_model(model, *, fullgraph, backend):
        assert fullgraph and backend == "inductor"
        compiled.append(model)
        return model

    monkeypatch.setattr(work_module.torch, "compile", compile_model)
    workshop = Workshop(MLP, FP32, setup)
    for mode in ("compiled", "compiled+graphed"):
        works = {
            name: workshop.make(method, replace(MODES[mode], graphed=False))
            for name, method in METHODS.items()
            if not method.eager_only
        }
        assert works["adam"].forward is works["sgd"].forward is works["momentum"].forward
        assert works["svgd"].forward is not works["sgd"].forward
        assert works["adam"].optimizer is not works["momentum"].optimizer
        for made in works.values():
            made.step()
    assert len(compiled) == 4  # the plain ones together, and three of SVGD


@pytest.mark.slow  # it compiles
def test_really_compiled(setup):
    torch.compiler.reset()
    network = Network("one", "One", OneLayer, MLP.inputs, 4, cross_entropy)
    quick = replace(setup, compiler="aot_eager")
    rows = rows_of(quick, [METHODS["sgd"], METHODS["adam"]], network, mode="compiled")
    assert all(row.error is None and row.ratio_to_sgd > 0 for row in rows.values())


class OneLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(784, 10)

    def forward(self, x):
        return self.linear(x.flatten(1))


class FakeGraph:
    """What a CUDA graph is to the code: made around one step, and replayed."""

    replays = 0

    def replay(self):
        FakeGraph.replays += 1


@contextmanager
def fake_capture(graph, *, pool, stream):
    assert isinstance(graph, FakeGraph) and (pool, stream) == ("pool", "stream")
    yield


def test_a_graphed_step_is_captured_once_and_replayed(setup, monkeypatch):
    for name, fake in {
        "CUDAGraph": FakeGraph,
        "graph": fake_capture,
        "graph_pool_handle": lambda: "pool",
        "current_stream": lambda device: "stream",
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    rows = rows_of(setup, [METHODS["sgd"], METHODS["svgd"]], mode="graphed")
    assert all(row.error is None and row.ratio_to_sgd > 0 for row in rows.values())
    assert FakeGraph.replays >= 2 * sum(row.steps_per_block for row in rows.values())


def test_a_failed_compilation_is_not_tried_again(setup, monkeypatch):
    tried = []

    def compile_model(model, *, fullgraph, backend):
        tried.append(model)
        return lambda x: 1 / 0

    monkeypatch.setattr(work_module.torch, "compile", compile_model)
    rows = rows_of(setup, [METHODS["sgd"], METHODS["adam"], METHODS["svgd"]], mode="compiled")
    assert {row.error for row in rows.values()} == {"ZeroDivisionError: division by zero"}
    assert len(tried) == 2


def test_numbers_are_switched_for_a_while():
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    for name, tf32 in (("fp32", False), ("tf32", True), ("bf16", True)):
        with numbers_in(PRECISIONS[name]):
            assert matmul.allow_tf32 is tf32 and torch.backends.cudnn.allow_tf32 is tf32
    after = matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    assert before == after
