"""Promise 6: a truncated or altered checkpoint is refused by name, the one before it is used."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from data_parallel import Network
from processes import run_ranks
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from virtualgrad import Checkpoints, errors


def state_at(step: int) -> dict[str, Tensor]:
    return {"weights": torch.full((50,), float(step)), "rng": torch.get_rng_state()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints, of steps 9 and 10: as texts the other way round."""
    checkpoints = Checkpoints(tmp_path / "run")
    for step in (9, 10):
        checkpoints.save(step, state_at(step))
    return tmp_path / "run"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_loads(folder: Path, step: int) -> None:
    latest = Checkpoints(folder).load()
    assert latest is not None
    assert (latest.step, latest.path.name) == (step, f"step-{step}.pt")
    torch.testing.assert_close(latest.state, state_at(step), rtol=0, atol=0)


def flipped(content: bytes, place: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 1
    return bytes(changed)


def test_the_newest_is_loaded_and_the_rest_go(folder: Path) -> None:
    assert_loads(folder, 10)
    assert torch.load(folder / "step-10.pt", weights_only=True)["step"] == 10  # a file as any other
    Checkpoints(folder).save(100, state_at(100))
    assert names(folder) == ["step-10.pt", "step-100.pt"]
    assert_loads(folder, 100)
    Checkpoints(folder, keep=1).save(100, state_at(100))  # the same step again
    assert names(folder) == ["step-100.pt"]


@pytest.mark.parametrize("missing", [True, False])
def test_nothing_was_saved(tmp_path: Path, missing: bool) -> None:
    assert Checkpoints(tmp_path / "run" if missing else tmp_path).load() is None
    assert names(tmp_path) == []


def test_every_truncation_is_passed_over(folder: Path) -> None:
    """Nothing, less than a digest, the first and last byte of anything, all but the last."""
    newest = folder / "step-10.pt"
    whole = newest.read_bytes()
    places = {0, 1, 31, 32, 33, len(whole) - 33, len(whole) - 32, len(whole) - 1}
    for length in sorted(places | set(range(0, len(whole), len(whole) // 40))):
        newest.write_bytes(whole[:length])
        with pytest.warns(errors.DamagedCheckpointWarning, match=r"step-10\.pt: truncated"):
            assert_loads(folder, 9)


def test_a_flipped_bit_or_more_bytes_are_passed_over(folder: Path) -> None:
    newest = folder / "step-10.pt"
    whole = newest.read_bytes()
    weights = whole.index(state_at(10)["weights"].numpy().tobytes())  # torch would read it
    altered = [flipped(whole, place) for place in (0, weights + 2, len(whole) - 40, -1)]
    for content in (*altered, whole + b"\0", bytes(len(whole)), b"", whole[32:]):
        newest.write_bytes(content)
        with pytest.warns(errors.DamagedCheckpointWarning, match=r"step-10\.pt: .*altered"):
            assert_loads(folder, 9)


def test_what_is_not_whole_does_not_count_as_kept(folder: Path) -> None:
    """After going back, two whole ones are kept again, and nothing of what was passed over."""
    (folder / "step-10.pt").write_bytes(b"")
    checkpoints = Checkpoints(folder)
    with pytest.warns(errors.DamagedCheckpointWarning, match=r"step-10\.pt"):
        assert checkpoints.load().step == 9  # type: ignore[union-attr]
    checkpoints.save(9, state_at(9))  # earlier than the damaged one, and written again
    checkpoints.save(10, state_at(10))
    checkpoints.save(11, state_at(11))
    assert names(folder) == ["step-10.pt", "step-11.pt"]
    (folder / "step-11.pt").write_bytes(b"")
    with pytest.warns(errors.DamagedCheckpointWarning, match=r"step-11\.pt"):
        assert_loads(folder, 10)


def test_none_is_whole(folder: Path) -> None:
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    with (
        pytest.warns(errors.DamagedCheckpointWarning) as warned,
        pytest.raises(errors.CheckpointError, match=r"none of them whole: step-10\.pt, step-9\.pt"),
    ):
        Checkpoints(folder).load()
    assert [str(warning.message)[7:17] for warning in warned] == ["step-10.pt", "step-9.pt:"]
    assert names(folder) == ["step-10.pt", "step-9.pt"]  # nothing is thrown away


def test_what_a_kill_left_is_not_read_and_goes(folder: Path) -> None:
    half = (folder / "step-10.pt").read_bytes()[:100]
    (folder / ".step-11.pt.0a1b2c3d").write_bytes(half)
    for other in ("step-11.pt.bak", "step-x.pt", "notes.txt"):
        (folder / other).write_bytes(half)
    assert_loads(folder, 10)
    Checkpoints(folder).save(11, state_at(11))
    assert names(folder) == ["notes.txt", "step-10.pt", "step-11.pt", "step-11.pt.bak", "step-x.pt"]


def test_another_run_in_the_same_folder_is_refused(folder: Path) -> None:
    with pytest.raises(errors.CheckpointError, match=r"step 3, where 'run' holds step-10\.pt"):
        Checkpoints(folder).save(3, state_at(3))
    assert_loads(folder, 10)


@pytest.mark.parametrize(
    ("state", "said"),
    [({"path": Path("x")}, r"pathlib\.\w*Path"), ({"x": torch.nn.ReLU()}, "ReLU")],
)
def test_what_could_not_be_loaded_is_not_saved(folder: Path, state: Any, said: str) -> None:
    with pytest.raises(errors.CheckpointError, match=said):
        Checkpoints(folder).save(11, state)
    assert names(folder) == ["step-10.pt", "step-9.pt"]
    assert_loads(folder, 10)


def test_settings(tmp_path: Path) -> None:
    with pytest.raises(errors.HyperparameterError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(errors.CheckpointError, match="step -1"):
        Checkpoints(tmp_path).save(-1, {})


# ------------------------------------------------------------------ several processes


def on_a_rank(rank: int, ranks: int, folder: str) -> list[Any]:
    """What this rank loads when all is well, when it alone cannot read one, and never."""
    shared = Checkpoints(folder)
    shared.save(3, {"by": rank})
    shared.save(4, {"by": rank})
    own = Checkpoints(folder if rank == 0 else f"{folder}-of-another-machine")
    found: list[Any] = [shared.load().state["by"]]  # type: ignore[union-attr]
    if rank == 1:
        own.folder.mkdir()
        (own.folder / "step-3.pt").write_bytes((shared.folder / "step-3.pt").read_bytes())
    distributed.barrier()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found += [own.load().step, str(said[0].message)]  # type: ignore[union-attr]
    model = Network()
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    try:
        shared.save(5, {"model": model.state_dict()})
    except errors.CheckpointError as error:
        found.append(str(error))
    return [*found, names(shared.folder)]


def test_rank_0_writes_and_all_ranks_load_the_same(tmp_path: Path) -> None:
    for by, step, said, refused, there in run_ranks(2, on_a_rank, str(tmp_path / "run")):
        assert (by, step) == (0, 3)
        assert "step-4.pt: No such file or directory, on rank 1" in said
        assert "a shard of a tensor, at model.place" in refused
        assert there == ["step-3.pt", "step-4.pt"]
