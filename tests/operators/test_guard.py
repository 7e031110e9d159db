"""What a GPU writes unless a number is not finite, against torch's own functions.

As in ``test_kernels.py``, the functions ``check_*`` run in Triton's interpreter.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from interpreted import needs_triton, run_checks
from torch import Tensor

from virtualgrad.operators.addresses import MOST_KEPT
from virtualgrad.operators.guard import MOST_STEPS, Guard
from virtualgrad.operators.walks import NUMBERS
from virtualgrad.optim.unwaited import Unwaited

SHAPES = [(1,), (3, 5), (0,), (NUMBERS,), (2 * NUMBERS + 1,), (8, 4, 3, 3), (1, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
LR, MOMENTUM, DECAY, RHO = 0.3, 0.7, 0.1, 0.9
FACTORS = [None, (1.0, 1e-6), (0.3, 1e-2)]


def made(device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    found = [torch.randn(s, device=device, generator=generator).to(dtype) for s in SHAPES]
    found[5] = found[5].contiguous(memory_format=torch.channels_last)
    return found


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    """To the bit; the interpreter rounds a product before it adds, and cuts bfloat16 off."""
    for one, other in zip(found, expected, strict=True):
        if one.is_cuda:
            assert torch.equal(one, other)
        else:
            rtol = 1e-6 if one.dtype == torch.float32 else 4 * torch.finfo(one.dtype).eps
            torch.testing.assert_close(one, other, rtol=rtol, atol=rtol)


def begin(guard: Guard, *, is_up: bool) -> None:
    """Look, behind all that was announced; at a NaN or not."""
    number = torch.full((4,), torch.nan if is_up else 1.0, device=guard.device)
    looked_at = guard.will_look([number])
    assert guard.send()
    guard.look(looked_at)
    if guard.device.type == "cuda":
        torch.cuda.synchronize()


def descend(guard: Guard, lists: list[list[Tensor]], *, is_up: bool, **numbers: float) -> None:
    guard.begin()
    params, grads, *buffers = lists
    descent = guard.will_descend(params, grads, buffers[0] if buffers else [])
    begin(guard, is_up=is_up)
    assert guard.takes(descent.table)
    guard.descend(descent, lr=LR, **numbers)


def compare_descent(device: str, dtype: torch.dtype, momentum: float, weight_decay: float) -> None:
    params, grads, buffers = made(device, dtype), made(device, dtype, 1), made(device, dtype, 2)
    before = [tensor.clone() for tensor in (*params, *buffers)]
    guard = Guard(params[0].device)
    lists = [params, grads, *([buffers] if momentum else [])]
    numbers = {"momentum": momentum, "weight_decay": weight_decay}
    descend(guard, lists, is_up=True, **numbers)
    assert all(map(torch.equal, (*params, *buffers), before))

    expected, b = before[: len(params)], before[len(params) :]
    versions = [tensor._version for tensor in params]
    descend(guard, lists, is_up=False, **numbers)
    if weight_decay:
        torch._foreach_mul_(expected, 1 - LR * weight_decay)
    step = grads
    if momentum:
        torch._foreach_mul_(b, momentum)
        torch._foreach_add_(b, grads)
        step = b
    torch._foreach_add_(expected, step, alpha=-LR)
    same([*params, *buffers], [*expected, *b])
    assert all(t._version > old for t, old in zip(params, versions, strict=True))


def compare_look(device: str, dtype: torch.dtype) -> None:
    tensors = [*made(device, dtype), *made(device, torch.float32)]
    largest = torch.finfo(dtype).max
    tensors[1].fill_(largest)  # finite, though a sum of them is not
    guard = Guard(tensors[1].device)

    def met(some: list[Tensor]) -> list[int]:
        guard.begin()
        looked_at = guard.will_look(some)
        assert guard.send()
        guard.look(looked_at)
        if device == "cuda":
            torch.cuda.synchronize()
        is_up = guard.flag[0] == guard.step
        found = [looked_at.order[number] for number in guard.met()]
        assert bool(found) == is_up
        return found

    for number in (torch.nan, torch.inf, -torch.inf):
        for place in (0, 4, 5, 7, 11):
            spoilt = [tensor.clone() for tensor in tensors]
            spoilt[place].view(-1)[-1:].fill_(number) if place != 5 else spoilt[5][
                -1, -1, -1, -1
            ].fill_(number)
            assert met(spoilt) == [place]
    assert met(tensors) == []
    guard.step = 0.0
    assert met([tensors[1] * torch.nan]) == [0]  # the first step of all
    guard.step = float(MOST_STEPS)
    assert met([tensors[1]]) == []  # and the first one again


def compare_means(device: str, factor_of: tuple[float, float] | None) -> None:
    means, norms = made(device), made(device, seed=1)
    means = [r.abs() for r in means]
    factors = [torch.rsqrt(r + 1) for r in means] if factor_of else []
    weights = [0.1 * (place + 1) for place in range(len(means))]
    before = [r.clone() for r in (*means, *factors)]
    guard = Guard(means[0].device)

    def update(*, is_up: bool) -> None:
        guard.begin()
        table = guard.will_update(means, norms, weights, factors)
        assert table is not None
        begin(guard, is_up=is_up)
        guard.update_means(table, RHO, factor_of)

    update(is_up=True)
    assert all(map(torch.equal, [*means, *factors], before))
    update(is_up=False)
    expected = before[: len(means)]
    torch._foreach_mul_(expected, RHO)
    torch._foreach_addcmul_(expected, norms, norms, weights)
    same(means, expected)
    if factor_of is not None:
        scale, eps = factor_of
        torch._foreach_add_(expected, eps)
        torch._foreach_rsqrt_(expected)
        torch._foreach_mul_(expected, scale)
        same(factors, expected)


def compare_exchange(device: str) -> None:
    means, candidates = made(device), made(device, seed=1)
    first, second = [r.clone() for r in means], [c.clone() for c in candidates]
    guard = Guard(means[0].device)

    def exchange(*, is_up: bool) -> None:
        guard.begin()
        table = guard.will_exchange(means, candidates)
        begin(guard, is_up=is_up)
        assert guard.takes(table)
        guard.exchange(table)

    exchange(is_up=False)
    assert all(map(torch.equal, means, second))
    assert all(map(torch.equal, candidates, second))
    for r, old in zip(means, first, strict=True):
        r.copy_(old)
    exchange(is_up=True)
    assert all(map(torch.equal, means, first))
    assert all(map(torch.equal, candidates, first))


def compare_unaligned(device: str) -> None:
    """Tensors that begin anywhere, as the two halves of what one kernel has written."""
    one, other = torch.randn(2, 4099, device=device), torch.randn(2, 4099, device=device)
    expected, guard = one.clone(), Guard(one.device)
    lists = [list(one), list(other)]
    descend(guard, lists, is_up=False, momentum=0.0, weight_decay=0.0)
    table = guard._addresses.tables[0]
    assert table is not None
    assert not table.walk.is_aligned
    same([one], [expected.add_(other, alpha=-LR)])


def compare_refusals(device: str) -> None:
    """What would be read wrongly is not taken; the same address is not the same tensor."""
    guard = Guard(torch.ones(1, device=device).device)
    whole = torch.randn(8, 16, device=device)
    parameter = torch.randn(8, 16, device=device)

    def takes(one: Tensor, other: Tensor) -> bool:
        guard.begin()
        descent = guard.will_descend([one], [other], [])
        return guard.send() and guard.takes(descent.table)

    assert takes(parameter, whole)
    assert not takes(parameter, torch.randn(16, 8, device=device).t())
    assert not takes(parameter[:, :8], whole[:, :8])
    assert takes(parameter.view(-1)[1:9], whole.view(-1)[1:9])  # not aligned
    assert not takes(parameter, whole.to(torch.bfloat16))
    assert not takes(parameter.double(), whole.double())
    assert not takes(parameter, whole[0].expand(8, 16))
    assert takes(parameter[:4], whole[:4])
    before = parameter.clone()
    descend(guard, [[parameter[:4]], [whole[:4]]], is_up=False, momentum=0.0, weight_decay=0.0)
    assert torch.equal(parameter[4:], before[4:])
    assert not torch.equal(parameter[:4], before[:4])
    guard.begin()
    for rows in range(1, MOST_KEPT + 3):  # however many there come to be, each is as it should be
        some, other = torch.randn(rows, 100, device=device), torch.randn(rows, 100, device=device)
        expected = [some.add(other, alpha=-LR)]
        descend(guard, [[some], [other]], is_up=False, momentum=0.0, weight_decay=0.0)
        same([some], expected)
    many = [torch.randn(3, device=device) for _ in range(300)]  # more than there is room for
    expected = [tensor.clone() for tensor in many]
    descend(guard, [many, many], is_up=False, momentum=0.0, weight_decay=0.0)
    torch._foreach_add_(expected, expected, alpha=-LR)
    same(many, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("momentum", [0.0, MOMENTUM])
@pytest.mark.parametrize("weight_decay", [0.0, DECAY])
def check_descent(dtype, momentum, weight_decay):
    compare_descent("cpu", dtype, momentum, weight_decay)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def check_look(dtype):
    compare_look("cpu", dtype)


def check_means_and_exchange():
    for factor_of in FACTORS:
        compare_means("cpu", factor_of)
    compare_exchange("cpu")


def check_learning():
    """C++ learns a step from the launches for which it was asked in vain, and from no others."""
    guard, learned = Guard(torch.ones(1).device), []
    guard._in_cpp = SimpleNamespace(learn=lambda *told: learned.append(told))
    guard.learn()
    assert not learned
    for _ in range(2):
        guard.is_new = True
        guard.learn()
        guard.learn()
    assert len(learned) == 2
    unwaited = Unwaited()
    unwaited._guard, guard.is_new = guard, True
    assert not unwaited.step_again([], SimpleNamespace(plain_sites=lambda: None))
    assert not guard.is_new


def check_refusals():
    compare_refusals("cpu")
    compare_unaligned("cpu")


@needs_triton
def test_in_the_interpreter() -> None:
    run_checks(__file__)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("momentum", [0.0, MOMENTUM])
@pytest.mark.parametrize("weight_decay", [0.0, DECAY])
def test_descent_on_a_gpu(dtype: torch.dtype, momentum: float, weight_decay: float) -> None:
    compare_descent("cuda", dtype, momentum, weight_decay)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_look_on_a_gpu(dtype: torch.dtype) -> None:
    compare_look("cuda", dtype)


@pytest.mark.gpu
@on_gpu
def test_means_exchange_and_refusals_on_a_gpu() -> None:
    for factor_of in FACTORS:
        compare_means("cuda", factor_of)
    compare_exchange("cuda")
    compare_refusals("cuda")
    compare_unaligned("cuda")
