"""Exit codes, and the one place where an error becomes a code and one line on stderr."""

from __future__ import annotations

import errno
from collections.abc import Mapping

from ninfer_core import errors

OK, INTERNAL, USAGE, UNKNOWN_MODEL, SERVER, DEVICE, ARTIFACT, DISK, PORT = range(9)
INTERRUPTED, TERMINATED = 130, 143

TABLE = {
    OK: "done",
    INTERNAL: "internal error, or a fault inside the engine",
    USAGE: "wrong usage, request or setting",
    UNKNOWN_MODEL: "model unknown or not installed",
    SERVER: "the engine or server refused or failed the request, or does not answer",
    DEVICE: "no usable device, or the model does not fit",
    ARTIFACT: "a download failed, or an artifact or checkpoint is damaged, foreign or fails its digest",
    DISK: "not enough disk space",
    PORT: "port in use, or the address cannot be bound",
    INTERRUPTED: "interrupted (SIGINT)",
    TERMINATED: "terminated (SIGTERM)",
}

# First match counts, so special classes come before their bases.
_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (errors.ModelNotFoundError, UNKNOWN_MODEL),
    (errors.DiskSpaceError, DISK),
    (errors.DownloadError, ARTIFACT),
    (errors.ArtifactError, ARTIFACT),
    (errors.ConvertError, ARTIFACT),
    (errors.PermissionDeniedError, ARTIFACT),
    (errors.AuthenticationError, SERVER),
    (errors.MemoryPlanError, DEVICE),
    (errors.DeviceError, DEVICE),
    (errors.InvalidRequestError, USAGE),
    (errors.MissingDependencyError, USAGE),
    (errors.EngineFailedError, INTERNAL),
    (errors.EngineError, SERVER),
)


def code_of(error: BaseException) -> int:
    """The exit code of an error class; 1 for everything that is not an expected error."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DISK
    # A path the user named that cannot be opened is the user's to fix; another OSError is not.
    if isinstance(error, FileExistsError) or (isinstance(error, OSError) and error.filename is not None):
        return USAGE
    return INTERNAL


def text_of(error: BaseException) -> str:
    """The error as the user sees it, without a traceback."""
    if isinstance(error, errors.NinferError):
        return error.message
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return "file too large: the file system or a limit of the shell (ulimit -f) ends it; choose another folder"
    if isinstance(error, OSError) and code_of(error) != INTERNAL:
        where = f": {error.filename}" if error.filename is not None else ""
        return f"{error.strerror.lower()}{where}" if error.strerror else str(error)
    return (
        f"internal error: {type(error).__name__}: {error} "
        "(this is a bug: please report it in the issue tracker of the project, with what NINFER_DEBUG=1 prints)"
    )


def flag(environ: Mapping[str, str], name: str) -> bool:
    """A yes/no environment variable.

    Raises:
        InvalidRequestError: the value is neither.
    """
    value = environ.get(name, "").strip().casefold()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("", "0", "false", "no", "off"):
        return False
    raise errors.InvalidRequestError(f"{name}={environ[name]!r} is not a yes/no value; use 1 or 0", param=name)
