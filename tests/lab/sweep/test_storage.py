"""Databases and studies that cannot be used are refused in words, and stay as they are."""

import socket
import sqlite3

import optuna
import pytest
import sqlalchemy
from sweep_fakes import a_search

import virtualgrad
from virtualgrad.lab.sweep.pool import run_searches
from virtualgrad.lab.sweep.search import SweepError
from virtualgrad.lab.sweep.spaces import Range
from virtualgrad.lab.sweep.storage import Store


def refused(store, search, console, words):
    with pytest.raises(SweepError, match=words) as caught:
        run_searches([search], store, 1, console)
    message = str(caught.value)
    assert all(part in message for part in ("given: ", "allowed: ", "next step: "))
    return message


def made(tmp_path, console, **how):
    store = Store(f"sqlite:///{tmp_path / 'sweep.db'}")
    run_searches([a_search(tmp_path / "notes", trials=2, **how)], store, 1, console)
    return store


def content(tmp_path):
    with sqlite3.connect(tmp_path / "sweep.db") as database:
        return list(database.iterdump())


def test_a_server_lost_at_the_end_of_a_trial(tmp_path):
    """Optuna then finds its trial in a state that it holds for impossible, and asserts."""
    store = Store(f"sqlite:///{tmp_path / 'sweep.db'}")
    with pytest.raises(SweepError, match="it went away"), store.reachable():
        try:
            raise sqlalchemy.exc.SQLAlchemyError("it went away")
        finally:
            raise AssertionError("Should not reach.")
    with pytest.raises(AssertionError, match="another matter"), store.reachable():
        raise AssertionError("another matter")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "no URL"),
        ("runs/sweep.db", "no URL"),
        ("mysql://host/trials", "a storage of the kind 'mysql'"),
        ("sqlite://", "SQLite storage without a file"),
        ("sqlite:///:memory:", "SQLite storage without a file"),
    ],
)
def test_other_databases(url, words, tmp_path, console):
    message = refused(Store(url), a_search(tmp_path), console, words)
    assert "sqlite:///FILE or postgresql://" in message


def test_a_server_that_does_not_answer(tmp_path, console):
    with socket.socket() as free:  # bound, but nobody listens
        free.bind(("127.0.0.1", 0))
        url = f"postgres://me:secret@127.0.0.1:{free.getsockname()[1]}/trials"
        message = refused(Store(url), a_search(tmp_path), console, "refused")
    assert "secret" not in message and "me:***@127.0.0.1" in message


def test_a_server_that_goes_away(tmp_path, console, postgresql):
    """In the middle of a trial: what is finished is still there when it comes back."""
    store = Store(postgresql)
    cut = []

    def disconnect(settings):
        cut.append(settings)
        if len(cut) == 3:
            end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            whose = "pid != pg_backend_pid() AND backend_type = 'client backend'"
            url = sqlalchemy.make_url(postgresql).set(drivername="postgresql+psycopg")
            engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
            with engine.connect() as connection:
                connection.execute(sqlalchemy.text(f"{end} WHERE {whose}"))

    search = a_search(tmp_path, name="cut", trials=4, hook=disconnect)
    refused(store, search, console, "which cannot be used")
    quick = Store(postgresql, heartbeat=1, grace=1)
    (found,) = run_searches([a_search(tmp_path, name="cut", trials=4)], quick, 1, console)
    assert len(found) == 4 and len({trial.settings["lr"] for trial in found}) == 4


def test_a_file_that_is_no_database(tmp_path, console):
    (tmp_path / "sweep.db").write_text("these are my notes, not a database")
    store = Store(f"sqlite:///{tmp_path / 'sweep.db'}")
    refused(store, a_search(tmp_path), console, "file is not a database")
    assert (tmp_path / "sweep.db").read_text() == "these are my notes, not a database"


def test_trials_of_another_optuna(tmp_path, console):
    store = made(tmp_path, console)
    with sqlite3.connect(tmp_path / "sweep.db") as database:
        database.execute("UPDATE alembic_version SET version_num = 'v99.0.0'")
    before = content(tmp_path)
    refused(store, a_search(tmp_path), console, "no longer compatible")
    assert content(tmp_path) == before


def test_other_ranges(tmp_path, console):
    store = made(tmp_path, console)
    before = content(tmp_path)
    other = a_search(tmp_path, ranges={"lr": Range(1e-4, 10)})
    message = refused(store, other, console, r"ranges {'lr': \[0.0001, 1\]} there")
    assert (
        "{'lr': [0.0001, 10]} here" in message and "another --name or in another --out" in message
    )
    assert content(tmp_path) == before


def test_other_settings_or_version(tmp_path, console, monkeypatch):
    store = made(tmp_path, console, identity={"steps": 10})
    refused(store, a_search(tmp_path, identity={"steps": 20}), console, "steps 10 there, 20 here")
    monkeypatch.setattr(virtualgrad, "__version__", "99.0")
    same = a_search(tmp_path, identity={"steps": 10})
    refused(store, same, console, r"version 0\S+ there, 99.0 here")


def test_a_study_of_someone_else(tmp_path, console):
    store = Store(f"sqlite:///{tmp_path / 'sweep.db'}")
    study = optuna.create_study(study_name="fake", storage=store.url)
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    refused(store, a_search(tmp_path), console, "which virtualgrad did not make")
    assert len(study.trials) == 2
