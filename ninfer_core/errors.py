"""Every public error. Each message names the limit, the value found and what the caller can change.

`code` is a stable machine-readable word (the OpenAI error code where one exists); `param` names the request field;
`retryable` says whether the same call can succeed later without a change.
"""

from __future__ import annotations


class NinferError(Exception):
    """Base of all errors of this project."""

    code = "server_error"
    retryable = False

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequestError(NinferError, ValueError):
    """The request itself is wrong; `param` says where."""

    code = "invalid_value"


class ContextOverflowError(InvalidRequestError):
    """The prompt is longer than the served context window."""

    code = "context_length_exceeded"

    def __init__(self, n_prompt_tokens: int, n_ctx: int) -> None:
        super().__init__(
            f"This model's maximum context length is {n_ctx} tokens, but the prompt is too long: "
            f"{n_prompt_tokens} tokens > {n_ctx} maximum. Please reduce the length of the messages.",
            param="messages",
        )
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx


class UnsupportedError(InvalidRequestError):
    """A well-formed request for something this model or build cannot do."""

    code = "unsupported_parameter"


class MediaError(InvalidRequestError):
    """An image or video that cannot be read, or is outside the limits."""

    code = "invalid_image"


class SchemaError(InvalidRequestError):
    """A JSON schema, regex or grammar that cannot be enforced; `path` points at the keyword."""

    code = "invalid_schema"

    def __init__(self, message: str, *, path: str = "", param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.path = path


class ModelNotFoundError(NinferError, LookupError):
    """No model of that name is known or installed."""

    code = "model_not_found"


class ArtifactError(NinferError, ValueError):
    """A model artifact that cannot be used. Operating-system errors are not wrapped."""

    code = "invalid_artifact"


class FramingError(ArtifactError):
    """Not a readable `.ninfer` frame."""


class DirectoryError(ArtifactError):
    """The JSON text of the directory or manifest, or its schema, is wrong."""


class UnknownIdentityError(ArtifactError):
    """A format, layout, encoding, version or model id that is not registered."""


class GeometryError(ArtifactError):
    """Shapes, sizes, offsets or spans do not fit together or into the file."""


class InventoryError(ArtifactError):
    """A well-formed file with the wrong set of objects for its model."""


class ContentError(ArtifactError):
    """Stored values violate the format, or a digest does not match."""


class ConvertError(NinferError, ValueError):
    """The source checkpoint cannot be converted."""

    code = "invalid_checkpoint"


class DiskSpaceError(NinferError, OSError):
    """Not enough free disk space; checked before the first byte is written."""

    code = "insufficient_disk_space"

    def __init__(self, path: str, needed: int, free: int) -> None:
        NinferError.__init__(
            self,
            f"not enough disk space at {path}: {needed:,} bytes are needed, {free:,} are free. "
            "Free some space or choose another folder.",
        )
        self.path, self.needed, self.free = path, needed, free


class DownloadError(NinferError, OSError):
    """A download failed or its digest does not match."""

    code = "download_failed"
    retryable = True

    def __init__(self, message: str) -> None:
        NinferError.__init__(self, message)


class MissingDependencyError(NinferError, ImportError):
    """An optional dependency is absent; the message holds the install command."""

    code = "missing_dependency"

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        NinferError.__init__(self, f'{purpose} needs the package {package}: pip install "ninfer[{extra}]"')


class EngineError(NinferError, RuntimeError):
    """The engine cannot serve the request."""


class EngineBusyError(EngineError):
    """The queue is full; `retry_after` is a hint in seconds."""

    code = "service_unavailable"
    retryable = True

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineClosedError(EngineError):
    """The engine was closed."""

    code = "engine_closed"


class EngineFailedError(EngineError):
    """A fault inside the engine ended this request."""


class NotFiniteError(EngineFailedError):
    """The logits of this request held NaN or infinities; nothing that was computed for it is used again."""

    code = "not_finite"


class DeviceFaultError(EngineFailedError):
    """The device failed, or stopped answering, while this request ran or waited; the engine restarts itself."""

    code = "device_fault"
    retryable = True


class EngineConflictError(EngineError):
    """The registry already holds this name with other options, or another engine is loaded in this process."""

    code = "engine_conflict"


class EngineForkError(EngineError):
    """The engine was loaded in a parent process; a forked child cannot use it."""

    code = "engine_forked"


class MemoryPlanError(EngineError):
    """The model and the promised context do not fit; the message is a table of what needs how much."""

    code = "insufficient_memory"


class DeviceError(EngineError):
    """No usable device, or one that lacks what was asked for."""

    code = "no_device"


class RequestCancelledError(EngineError):
    """The request was cancelled by its owner."""

    code = "cancelled"


class RequestTimeoutError(EngineError):
    """The request's own deadline passed."""

    code = "timeout"
    retryable = True


class AuthenticationError(NinferError):
    """A server wants an API key, or refused the one it got."""

    code = "invalid_api_key"


class PermissionDeniedError(NinferError):
    """A server refuses this client, whatever its key."""

    code = "permission_denied"


class ServerUnreachableError(EngineError, ConnectionError):
    """No server answers at the address, or the connection broke before the answer was complete."""

    code = "server_unreachable"
    retryable = True
