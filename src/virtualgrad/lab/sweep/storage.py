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
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from virtualgrad.lab.sweep.search import DIVERGED, End, Search, SweepError, Trial

FORMAT = 1
IDENTITY = "virtualgrad"
"""Attribute of a study with what its trials have in common."""

ERRORS = "errors"
"""Attribute of a trial: the last error of every seed."""

TAKEN_OVER = "takes over"
"""Attribute of a trial: the number of the one whose worker was lost."""

POSTGRESQL = "postgresql+psycopg"
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
        except (SQLAlchemyError, StorageInternalError) as error:
            raise self._unusable(error) from error

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


def queue_again(study: optuna.Study, lost: FrozenTrial) -> None:
    """Let another worker try the settings of a trial that did not come to its end."""
    study.enqueue_trial(lost.params, user_attrs={TAKEN_OVER: lost.number})


def open_study(search: Search, store: Store, storage: RDBStorage) -> optuna.Study:
    """The study of a search: made, or found with the same identity.

    Raises:
        SweepError: The study there is of another version or searches something else.
    """
    from virtualgrad import __version__  # noqa: PLC0415 - the package imports the lab nowhere

    ranges = {name: [of.low, of.high] for name, of in search.ranges.items()}
    expected = {"format": FORMAT, "version": __version__, "ranges": ranges, **search.identity}
    with store.reachable(), store.lock(search.name):
        study = optuna.create_study(storage=storage, study_name=search.name, load_if_exists=True)
        found = study.user_attrs.get(IDENTITY)
        if found is None and not study.get_trials(deepcopy=False):
            study.set_user_attr(IDENTITY, expected)
            return study
    if found != expected:
        raise SweepError.of(
            given=f"the study {search.name!r} in {store.shown}, {_difference(found, expected)}",
            allowed="trials of the same version, recipe, settings and ranges in one study",
            todo="search under another --name or in another --out; the study there stays as it is",
        )
    return study


def _difference(found: object, expected: dict[str, object]) -> str:
    if not isinstance(found, dict):
        return "which virtualgrad did not make"
    keys = [key for key in {**expected, **found} if found.get(key) != expected.get(key)]
    told = (f"{key} {found.get(key)} there, {expected.get(key)} here" for key in keys)
    return f"which differs: {'; '.join(told)}"


def finished_trials(study: optuna.Study) -> list[Trial]:
    """The finished trials of a study, in the order of their numbers."""
    states = (TrialState.COMPLETE, TrialState.PRUNED)
    return [_trial(trial) for trial in study.get_trials(deepcopy=False, states=states)]


def _trial(trial: FrozenTrial) -> Trial:
    errors = tuple(trial.user_attrs.get(ERRORS, ()))
    if trial.state is TrialState.PRUNED:
        at = max(trial.intermediate_values)
        end, errors = End.PRUNED, (trial.intermediate_values[at],)
    else:
        end = End.COMPLETE if errors else End.DIVERGED
    return Trial(trial.number, dict(trial.params), end, errors or (DIVERGED,))
