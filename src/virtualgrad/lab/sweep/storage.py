"""Where trials are kept: an SQLite file, or a PostgreSQL server that many machines share.

Taking a trial is "look how many there are, and begin one more"; a lock makes that one act among all
workers. It is the server's (an advisory lock) or the operating system's (of a file beside the
SQLite file), so that it falls with the process that holds it, however that ends.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import optuna
import sqlalchemy
from filelock import FileLock
from optuna.exceptions import ExperimentalWarning, OptunaError, StorageInternalError
from optuna.storages import RDBStorage
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from virtualgrad.lab.sweep.search import SweepError
from virtualgrad.lab.sweep.studies import queue_again

POSTGRESQL = "postgresql+psycopg"
LOST = (SQLAlchemyError, StorageInternalError)
SECONDS_TO_CONNECT = 10
SECONDS_TO_WRITE = 60  # that one SQLite writer waits for the others
# A machine that vanishes must not hold the lock for the two hours that TCP would wait for it.
KEEPALIVE = "-c tcp_keepalives_idle=30 -c tcp_keepalives_interval=10 -c tcp_keepalives_count=3"


@dataclass(frozen=True)
class Store:
    """A database of trials, by its URL.

    Attributes:
        url: ``sqlite:///FILE`` or ``postgresql://USER:PASSWORD@HOST/DATABASE``.
        heartbeat: seconds between two signs of life of a running trial.
        grace: seconds without any after which the trial is given to another worker.
    """

    url: str
    heartbeat: int = 10
    grace: int = 60

    @property
    def shown(self) -> str:
        """The URL without its password."""
        return self._parsed().render_as_string(hide_password=True)

    @contextmanager
    def opened(self) -> Iterator[RDBStorage]:
        """A connection; tables are made if there are none.

        Raises:
            SweepError: The database cannot be reached or is of another kind or version.
        """
        storage = self._open()
        try:
            with self.reachable():
                yield storage
        finally:
            storage.remove_session()
            storage.engine.dispose()

    def _open(self) -> RDBStorage:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        try:
            with self.lock("tables"), warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)  # heartbeats are, since 2021
                return RDBStorage(
                    self._parsed().render_as_string(hide_password=False),
                    engine_kwargs=self._engine_options(),
                    heartbeat_interval=self.heartbeat,
                    grace_period=self.grace,
                    heartbeat_stale_trial_callback=queue_again,
                )
        except SweepError:
            raise
        except (SQLAlchemyError, OptunaError, RuntimeError, AssertionError) as error:
            raise self._unusable(error) from error  # a foreign schema is one of the latter two

    def lock(self, name: str) -> AbstractContextManager[object]:
        """One holder among all processes that use the database."""
        url = self._parsed()
        if url.drivername == POSTGRESQL:
            return _advisory_lock(url, self._engine_options(), name)
        path = Path(str(url.database))
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(f"{path}.lock")

    @contextmanager
    def reachable(self) -> Iterator[None]:
        """Turn what goes wrong with the database into an error that says what to do."""
        try:
            yield
        except LOST as error:
            raise self._unusable(error) from error
        except AssertionError as error:  # Optuna's own, about the trial whose end it could not tell
            if not isinstance(error.__context__, LOST):
                raise
            raise self._unusable(error.__context__) from error

    def _unusable(self, error: Exception) -> SweepError:
        cause = error.__cause__ if isinstance(error, StorageInternalError) else error
        reason = str(getattr(cause, "orig", None) or cause).strip().partition("\n")[0]
        return SweepError.of(
            given=f"the database {self.shown}, which cannot be used ({reason})",
            allowed="a PostgreSQL server that answers, or an SQLite file, with trials of this "
            "version of Optuna or none",
            todo="check the address, the server and the file; finished trials are still there",
        )

    def _parsed(self) -> sqlalchemy.URL:
        try:
            url = sqlalchemy.make_url(self.url)
        except ArgumentError:
            url = sqlalchemy.URL.create("none")
        kind = url.drivername.partition("+")[0]
        if kind in {"postgresql", "postgres"}:
            return url.set(drivername=POSTGRESQL)
        if kind != "sqlite" or not url.database or url.database == ":memory:":
            given = f"a storage of the kind {kind!r}" if kind != "none" else "no URL"
            raise SweepError.of(
                given=given if kind != "sqlite" else "an SQLite storage without a file",
                allowed="sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE",
                todo="give such a URL with --storage, or leave it out for a file in --out",
            )
        return url

    def _engine_options(self) -> dict[str, object]:
        url = self._parsed()
        if url.drivername != POSTGRESQL:
            return {"connect_args": {"timeout": SECONDS_TO_WRITE}}
        own = {"connect_timeout": SECONDS_TO_CONNECT, "options": KEEPALIVE}
        return {"connect_args": {key: own[key] for key in own if key not in url.query}}


@contextmanager
def _advisory_lock(url: sqlalchemy.URL, options: dict[str, object], name: str) -> Iterator[None]:
    """Held by a connection of its own: the server lets go when that ends, for whatever reason."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool, **options)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sqlalchemy.text("SELECT pg_advisory_lock(:number)"), {"number": number})
        yield
