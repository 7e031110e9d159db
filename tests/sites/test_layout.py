"""Which axis of sigma counts samples."""

from __future__ import annotations

import pytest

from virtualgrad.sites import Layout, Site, every_linear_site, read_layout, weights_only

CASES = [
    # shape, parameter axes, m, batch_dim, foldable -> view, sample axis, samples
    ("linear", (8, 5), {1}, 8, 0, True, (8, 5), 0, 8),
    ("sequence", (8, 3, 5), {2}, 8, 0, True, (8, 3, 5), 0, 8),
    ("time first", (3, 8, 5), {2}, 8, 1, True, (3, 8, 5), 1, 8),
    ("image", (8, 5, 4, 4), {1}, 8, 0, True, (8, 5, 4, 4), 0, 8),
    ("folded", (24, 5), {1}, 8, 0, True, (8, 3, 5), 0, 8),
    ("folded, time first", (24, 5), {1}, 8, 1, True, (3, 8, 5), 1, 8),
    ("rows of experts", (13, 5), {1}, 8, 0, True, (13, 5), 0, 8),
    ("time first inside", (3, 8, 5), {2}, 8, 0, True, (3, 8, 5), 1, 8),
    ("no samples at all", (3, 5), {1}, 0, 0, True, (3, 5), None, 1),
    ("batch of products", (2, 24, 5), {0, 2}, 8, 0, True, (2, 8, 3, 5), 1, 8),
    ("positions", (3, 5), {1}, 8, 0, False, (3, 5), None, 1),
    ("many positions", (24, 5), {1}, 8, 0, False, (24, 5), None, 1),
    ("constant", (1, 3, 5), {2}, 8, 0, True, (3, 5), None, 1),
    ("weights only", (8, 8), {0, 1}, 8, 0, True, (8, 8), None, 1),
    ("channels first, no batch", (8, 4, 4), {0}, 8, 0, True, (8, 4, 4), None, 1),
    ("no rows", (0, 5), {1}, 8, 0, True, (0, 5), None, 1),
    ("scalar", (), set(), 8, 0, True, (), None, 1),
    ("unknown batch", (8, 5), {1}, None, 0, True, (8, 5), 0, 8),
    ("unknown batch, weights", (8, 5), {0, 1}, None, 0, True, (8, 5), None, 1),
]


@pytest.mark.parametrize(
    ("name", "shape", "axes", "batch", "dim", "foldable", "view", "sample", "samples"), CASES
)
def test_sample_axis(  # noqa: PLR0917
    name: str,
    shape: tuple[int, ...],
    axes: set[int],
    batch: int | None,
    dim: int,
    foldable: bool,
    view: tuple[int, ...],
    sample: int | None,
    samples: int,
) -> None:
    layout = read_layout(shape, frozenset(axes), batch_size=batch, batch_dim=dim, foldable=foldable)
    assert (layout.view, layout.sample_axis, layout.samples) == (view, sample, samples), name


def test_state_shapes() -> None:
    layout = Layout((8, 5, 4, 3), frozenset({1}), 0, 8)
    assert layout.state_shape() == (5, 4, 3)
    assert layout.state_shape(share_positions=True) == (5,)
    constant = Layout((4, 5), frozenset({1}), None, 1)
    assert constant.state_shape() == (4, 5)
    assert constant.state_shape(share_positions=True) == (5,)


def test_a_site_seen_by_one_of_its_parameters() -> None:
    layout = Layout((8, 5), frozenset({1}), 0, 8)
    names, roles = ("fc.weight", "fc.bias"), ("weight", "bias")
    site = Site("fc:linear(weight, bias)", "linear", names, roles, True, (8, 5), layout)
    assert site.has_sample_axis
    assert site.state_elements() == 5
    assert site.only("fc.bias").roles == ("bias",)
    assert site.only("fc.weight").parameters == ("fc.weight",)
    assert weights_only(site.only("fc.weight"))
    assert not weights_only(site.only("fc.bias"))
    assert every_linear_site(site)
