"""Real models of transformers, tiny and with random weights: found, transformed, trained.

Three oracles, each for what the others share with the code under test:

* ``Architecture.uncovered``, a list made by reading the models' code, for what ``explain`` finds;
* ``virtual_grad`` for the pull-backs: it walks the recorded graph and knows no model. It shares T
  and the reading of sigma's axes with the optimizer, so neither is tested by it;
* one sample at a time for the sample axis: of a batch of one sample there is nothing to confuse.
"""

from __future__ import annotations

import json

import pytest
import torch
from architectures import PAGE, RECORD, measure, page
from torch import Tensor
from zoo import ARCHITECTURES, BATCH, Architecture

from virtualgrad import SVGD, explain, operators, virtual_grad

LR, SCALE = 0.05, 0.1
# What the issue of these promises names; each has to stay.
NAMED = """GPT-2|Llama|Qwen2|Qwen3|Mistral|BERT|RoBERTa|DistilBERT|T5|BART|ViT|Swin|ConvNext|ResNet
Whisper|wav2vec 2.0|CLIP|Mamba|Mixtral|DeiT|SegFormer""".replace("\n", "|").split("|")


def assert_close(
    found: Tensor, expected: Tensor, tolerance: float, name: str, rounding: float = 0.0
) -> None:
    """Relative to the whole tensor, and to a size of what is rounded; a NaN fails."""
    error = (found - expected).norm().item()
    assert error <= tolerance * expected.norm().item() + rounding, (name, error)


def test_the_named_architectures_are_there() -> None:
    assert set(NAMED) <= ARCHITECTURES.keys()
    assert len({architecture.model_class for architecture in ARCHITECTURES.values()}) >= 20
    for name in ("Llama", "Qwen2", "Mistral", "Mixtral"):
        config = ARCHITECTURES[name].model().config  # grouped attention
        assert 1 < config.num_key_value_heads < config.num_attention_heads


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_parameter_is_accounted_for(name: str) -> None:
    architecture = ARCHITECTURES[name]
    inputs, _ = architecture.batch()
    model = architecture.model()
    found = explain(model, **inputs)
    parameters = [name for name, _ in model.named_parameters()]
    expected = {p for p in parameters if p.endswith(architecture.uncovered)}
    assert set(found.uncovered) == expected
    assert all(found.uncovered.values())  # each with a reason
    assert list(found.parameters) == parameters
    assert {p for s in found.transformed for p in s.parameters} == set(parameters) - expected


@pytest.mark.parametrize("share_positions", [False, True], ids=["by position", "shared"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_two_encapsulations_agree(name: str, share_positions: bool) -> None:
    architecture = ARCHITECTURES[name]
    by_ops, by_topology, plain = (architecture.model() for _ in range(3))
    with SVGD(by_ops, LR, share_positions=share_positions):
        loss = architecture.loss(by_ops, *architecture.batch())
        loss.backward()
    expected_loss = architecture.loss(by_topology, *architecture.batch())
    assert torch.equal(loss, expected_loss)  # attaching changes no bit of the forward
    trainable = [(p_name, p) for p_name, p in by_topology.named_parameters() if p.requires_grad]
    rms = operators.RMS(share_positions=share_positions)
    expected = virtual_grad(expected_loss, trainable, rms, batch_size=BATCH)
    architecture.loss(plain, *architecture.batch()).backward()
    tolerance = 1e-10 if architecture.dtype == torch.float64 else 1e-5
    # The bias of keys has no gradient, as softmax forgets it: what is left of it is rounding.
    rounding = 1e-4 * tolerance * sum(gradient.norm().item() for gradient in expected)
    for (p_name, _), gradient in zip(trainable, expected, strict=True):
        found = by_ops.get_parameter(p_name).grad
        assert_close(found, gradient, tolerance, p_name, rounding)
        # T acts just where it should: the two could agree by doing nothing.
        untouched = torch.equal(found, plain.get_parameter(p_name).grad)
        assert untouched == p_name.endswith(architecture.uncovered), p_name


def statistics(
    architecture: Architecture, inputs: dict[str, Tensor], labels: Tensor
) -> dict[str, Tensor]:
    """R of every site after one step on a batch: (1 - rho) times the mean of g^2."""
    model = architecture.model()
    with SVGD(model, LR, share_positions=architecture.picks_rows) as optimizer:
        architecture.loss(model, inputs, labels).backward()
        optimizer.step()
    return {key: state["r"] for key, state in optimizer.operator.state.items()}


@pytest.mark.parametrize("name", [n for n, a in ARCHITECTURES.items() if not a.mixes_samples])
def test_r_of_a_batch_is_the_mean_of_its_samples(name: str) -> None:
    """Also where samples and positions are folded into one axis: GPT-2, OPT, windows of Swin."""
    architecture = ARCHITECTURES[name]
    inputs, labels = architecture.batch()
    together = statistics(architecture, inputs, labels)
    samples = [slice(i, i + 1) for i in range(BATCH)]
    alone = [
        statistics(architecture, {key: x[one] for key, x in inputs.items()}, labels[one])
        for one in samples
    ]
    compared = 0
    for site in explain(architecture.model(), **inputs).transformed:
        layout = site.layout
        if layout.sample_axis is None or ".experts:" in site.key:
            continue  # a value of the whole batch, or picked rows: no sample's own
        mean = sum(r[site.key] for r in alone) / BATCH
        assert mean.shape == together[site.key].shape, site.key
        # Many norms of transformers compute in float32, in a float64 model as well.
        assert_close(together[site.key], mean, 1e-5, site.key)
        compared += 1
    assert compared > 10


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ten_steps_lower_the_loss(name: str) -> None:
    architecture = ARCHITECTURES[name]
    batch, model = architecture.batch(), architecture.model()
    optimizer = SVGD(model, LR, scale=SCALE, share_positions=architecture.picks_rows)
    losses = []
    for _ in range(11):
        optimizer.zero_grad()
        loss = architecture.loss(model, *batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[10] < 0.95 * losses[0]


def test_the_published_table_is_of_this_code() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert record["architectures"] == {n: measure(a) for n, a in ARCHITECTURES.items()}
    assert PAGE.read_text(encoding="utf-8") == page(record)
