"""The two encapsulations agree in every number format that people train in, and on a GPU too.

Forward passes are the same to the bit (`test_agreement.py`), so all that can differ is T and the
pull-backs: there the optimizer's way has kernels of its own, and scales rows after the product.
Each format allows a few of its own roundings.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES, Case, loss_of
from devices import ON_A_GPU
from torch import Tensor, nn

from virtualgrad import operators, virtual_grad
from virtualgrad.operators import RMS, Operator, StatefulOperator
from virtualgrad.virtual import Attachment, Intercept, named_parameters

OPERATORS: dict[str, Callable[[], Operator]] = {
    "identity": lambda: operators.identity,
    "rms": RMS,
    "rms, stale": lambda: RMS(stale=True),
    "rms, shared": lambda: RMS(share_positions=True),
}

ALLOWED = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 3e-3,
}
"""Number format -> relative error of a gradient, by norm."""

HERE = [
    pytest.param("cpu", torch.bfloat16, "rms", id="cpu-bfloat16-rms"),
    pytest.param("cpu", torch.float16, "rms, stale", id="cpu-float16-rms, stale"),
]
ON_THE_GPU = [
    pytest.param(dtype, operator, marks=ON_A_GPU, id=f"cuda-{str(dtype)[6:]}-{operator}")
    for dtype in ALLOWED
    for operator in OPERATORS
]
# Where there is no GPU, one skipped test stands for all cases of a format.
CASES_ON_THE_GPU = list(CASES) if torch.cuda.is_available() else [f"all {len(CASES)} cases"]


@pytest.fixture(autouse=True)
def full_precision() -> Any:
    """TF32 would round factors of products that the two ways cut differently.

    oneDNN is off, as not every CPU that promises bfloat16 instructions has them.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, torch._C._get_mkldnn_enabled()
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    torch._C._set_mkldnn_enabled(False)
    torch.manual_seed(0)
    yield
    matmul.allow_tf32, cudnn.allow_tf32, onednn = before
    torch._C._set_mkldnn_enabled(onednn)


def trainable(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def placed(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Inputs on a device, in a number format where they are no indices."""
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.is_floating_point() else None)
    if isinstance(value, tuple | list):
        return type(value)(placed(item, device, dtype) for item in value)
    return value


def loss_on(device: str, output: Any) -> Tensor:
    """The loss, whose constants are made where the output is."""
    with torch.device(device):
        return loss_of(output)


def require_this_format(case: Case, device: str, dtype: torch.dtype) -> None:
    """Skip what torch itself cannot train in a number format."""
    try:
        model = case.model().to(device, dtype)
        loss_on(device, model(*placed(case.inputs(), device, dtype))).backward()
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"torch cannot train it in {dtype}: {error}")


@pytest.mark.parametrize(("device", "dtype", "operator"), HERE)
@pytest.mark.parametrize("name", CASES)
def test_encapsulations_agree(name: str, device: str, dtype: torch.dtype, operator: str) -> None:
    assert_agreement(CASES[name], device, dtype, operator)


@pytest.mark.parametrize(("dtype", "operator"), ON_THE_GPU)
@pytest.mark.parametrize("name", CASES_ON_THE_GPU)
def test_encapsulations_agree_on_a_gpu(name: str, dtype: torch.dtype, operator: str) -> None:
    assert_agreement(CASES[name], "cuda", dtype, operator)


def assert_agreement(case: Case, device: str, dtype: torch.dtype, operator: str) -> None:
    require_this_format(case, device, dtype)
    by_ops = case.model().to(device, dtype)
    by_topology = copy.deepcopy(by_ops)
    first, second = OPERATORS[operator](), OPERATORS[operator]()
    intercept = Intercept(named_parameters(by_ops), first, batch_dim=case.batch_dim)
    with Attachment(by_ops, intercept):
        for _ in range(2):
            inputs = placed(case.inputs(), device, dtype)
            by_ops.zero_grad()
            loss_on(device, by_ops(*inputs)).backward()
            if isinstance(first, StatefulOperator):
                first.commit()
            expected = virtual_grad(
                loss_on(device, by_topology(*inputs)),
                trainable(by_topology),
                second,
                batch_size=case.batch_size,
                batch_dim=case.batch_dim,
            )
            # A bias before a batch norm has a gradient of zero, and what is left is rounding.
            rounding = 8 * torch.finfo(dtype).eps * sum(g.double().norm() for g in expected)
            for (of, parameter), gradient in zip(trainable(by_ops), expected, strict=True):
                error = (parameter.grad.double() - gradient.double()).norm()
                assert error < ALLOWED[dtype] * gradient.double().norm() + rounding, (of, error)
