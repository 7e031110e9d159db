"""The kernels of T fit on a GPU, whatever the batch: compiled for one, without having it."""

from __future__ import annotations

import pytest
from interpreted import needs_triton

from virtualgrad.operators.tiles import choose_tile

LEAST = 99 * 1024  # bytes that a program can have on the smallest GPUs of the day; an H200 has 227


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("dtype", "bytes_each"), [("bf16", 2), ("fp32", 4)])
@pytest.mark.parametrize("m", [128, 1024, 2048])
def test_tiles_on_their_way_fit_into_shared_memory(
    m: int, dtype: str, bytes_each: int, known: bool, summed: bool
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from virtualgrad.operators.rms_kernel import transform

    tile = choose_tile(m, 4096, bytes_each, 132, known=known, summed=summed)
    types = dict.fromkeys(("g", "out"), f"*{dtype}") | dict.fromkeys(("norm", "given"), "*fp32")
    types |= dict.fromkeys(("m", "n", "stride", "width", "blocks"), "i32")
    types |= dict.fromkeys(("rho", "weight", "scale", "eps"), "fp32")
    constants = {"earlier": None, "KNOWN": known, "OF_PRODUCT": False, "CHANNELS": 1, "PITCH": 1}
    constants |= {"WHOLE": tile.whole, "ROWS": tile.rows, "COLUMNS": tile.columns}
    if summed:
        types["sums"] = "*fp32"
    else:
        constants["sums"] = None
    names = transform.arg_names
    aligned = [name for name in types if types[name][0] == "*" or name in ("n", "stride", "width")]
    source = ASTSource(
        transform,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target, options = GPUTarget("cuda", 90, 32), {"num_warps": tile.warps, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=target, options=options)
    assert compiled.metadata.shared <= LEAST
