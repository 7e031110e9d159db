"""What tests of the optimizers share."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
