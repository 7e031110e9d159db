"""Where a test runs: here, and again where there is a GPU."""

from __future__ import annotations

import pytest
import torch

ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_A_GPU)]
