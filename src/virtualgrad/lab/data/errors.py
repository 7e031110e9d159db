"""What can go wrong with data: a name nobody knows, a set nobody delivers, a source that fails."""

from virtualgrad.errors import VirtualGradError

__all__ = ["AbsentError", "DataUnavailableError", "SourceError", "UnknownDataError"]


class UnknownDataError(VirtualGradError, ValueError):
    """A data set was asked for by a name that is not one of ours."""


class DataUnavailableError(VirtualGradError, OSError):
    """A data set is neither in the data folder nor to be had from any source."""


class SourceError(VirtualGradError, OSError):
    """One source cannot deliver; the next one is asked."""


class AbsentError(SourceError):
    """A place that may hold a file does not: nothing is wrong, so nobody is warned."""
