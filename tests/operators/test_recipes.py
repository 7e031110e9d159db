"""What a pass has launched is written down as C++ takes it: rooms, steps, and what is returned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from virtualgrad.operators.launches import AddedUp, Launched, added_up, recorded
from virtualgrad.operators.recipes import recipe_of

LIBRARY = SimpleNamespace(Recipe=lambda rooms, steps, views, stream_on: (rooms, steps, views))
KERNEL = object()


def launched(*tensors: Any, kernel: Any = KERNEL) -> Launched:
    return Launched(kernel, tensors, (7, 0.5))


def test_rooms_are_those_of_given_tensors_and_then_new_ones() -> None:
    g, r = torch.ones(4, 6)[1:], torch.ones(6)  # g begins anywhere: it is its own room
    out, norm = torch.empty(3, 6), torch.empty(6)
    steps = [launched(g, out, norm, None, r)]
    rooms, made, views = recipe_of(LIBRARY, steps, [g, r], [out, norm, None])
    assert rooms == [((3, 6), (6, 1), torch.float32), ((6,), (1,), torch.float32)]
    assert made == [(KERNEL, [(0, 0), (2, 0), (3, 0), None, (1, 0)], (7, 0.5))]
    assert views == [(2, (3, 6), (6, 1), 0), (3, (6,), (1,), 0), None]


def test_a_view_lies_in_the_room_of_what_it_is_a_view_of() -> None:
    g = torch.ones(3, 5, dtype=torch.bfloat16)
    padded = torch.empty(3, 8, dtype=torch.bfloat16)
    out, second = padded[:, :5], padded[1]
    steps = [launched(g, out), launched(second)]
    rooms, made, views = recipe_of(LIBRARY, steps, [g], [out, padded])
    assert rooms == [((24,), (1,), torch.bfloat16)]  # all of it, as only views of it are known
    assert [pointers for _, pointers, _ in made] == [[(0, 0), (1, 0)], [(1, 16)]]
    assert views == [(1, (3, 5), (8, 1), 0), (1, (3, 8), (8, 1), 0)]


def test_strides_are_kept() -> None:
    g = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    out = torch.empty_like(g)
    (room,), _, (view,) = recipe_of(LIBRARY, [launched(g, out)], [g], [out])
    assert room == ((2, 3, 4, 4), out.stride(), torch.float32)
    assert view == (1, (2, 3, 4, 4), out.stride(), 0)


def test_a_sum_of_what_kernels_have_left_is_a_step() -> None:
    g, parts, norm = torch.ones(2), torch.ones(2, 3, 4), torch.ones(4)
    with recorded() as steps:
        total = added_up(parts.view(6, 4), 0)
    assert torch.equal(total, torch.full((4,), 6.0))
    assert [type(step) for step in steps] == [AddedUp]
    steps = [launched(g, parts), *steps, launched(total, norm)]
    rooms, made, views = recipe_of(LIBRARY, steps, [g], [total, norm])
    assert rooms == [((2, 3, 4), (12, 4, 1), torch.float32), None, ((4,), (1,), torch.float32)]
    assert made[1] == ((1, (6, 4), (4, 1), 0), 0, 2)
    assert made[2][1] == [(2, 0), (3, 0)]
    assert views == [(2, (4,), (1,), 0), (3, (4,), (1,), 0)]


def test_what_is_not_all_launches_is_left_to_python() -> None:
    g, out, other = torch.ones(3), torch.ones(3), torch.ones(3)
    by_triton = [launched(g, out, kernel=None)]
    assert recipe_of(LIBRARY, by_triton, [g], [out]) is None
    assert recipe_of(LIBRARY, [launched(g, out)], [g], [other]) is None  # made by nobody knows what
    of_others = [AddedUp(other, 0, other.sum(0))]
    assert recipe_of(LIBRARY, of_others, [g], [None]) is None
    assert recipe_of(LIBRARY, [launched(g, out)], [g, g.view(3)], [out]) is None  # which is which


def test_only_the_thread_that_asks_is_written_down() -> None:
    import threading

    with recorded() as steps:
        other = threading.Thread(target=added_up, args=(torch.ones(2), 0))
        other.start()
        other.join()
        assert steps == []
        with recorded() as inner:
            added_up(torch.ones(2), 0)
        assert len(inner) == 1 and steps == []
    added_up(torch.ones(2), 0)
    assert steps == []
