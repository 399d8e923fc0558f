"""What a repository of the model hub holds: its files with sizes and digests, at one commit.

`huggingface_hub` answers for metadata, token, endpoint and where its cache lies; the bytes are fetched by `download`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from .errors import DownloadError, ModelNotFoundError, PermissionDeniedError
from .remote import RemoteFile, Transfer

_HEX = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository at one commit: file name -> what is known of it. `headers` go with every request for a file."""

    name: str
    commit: str
    files: Mapping[str, RemoteFile]
    headers: dict[str, str]


def offline(environ: Mapping[str, str] | None = None) -> str:
    """The name of the environment variable that forbids connections; empty if none does."""
    env = os.environ if environ is None else environ
    return next((name for name in _OFFLINE if env.get(name, "").strip().upper() in ("1", "TRUE", "YES", "ON")), "")


def repository(
    name: str, revision: str = "main", environ: Mapping[str, str] | None = None, transfer: Transfer | None = None
) -> Repository:
    """Ask the hub what `name` (owner/repository) holds at `revision`: a branch, a tag or a commit.

    Raises:
        ModelNotFoundError: there is no such repository or revision, or it is private.
        PermissionDeniedError: its terms have to be accepted first.
        DownloadError: offline mode, or the hub does not answer.
    """
    env = os.environ if environ is None else environ
    variable = offline(env)
    if variable:
        raise DownloadError(f"{variable} is set, so nothing is asked of the hub about {name}; unset it to download")
    # The library would otherwise tell its makers about the program it runs in, with one more request.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import huggingface_hub

    endpoint = env.get("HF_ENDPOINT", "").rstrip("/") or None
    token = env.get("HF_TOKEN") or huggingface_hub.get_token()
    api = huggingface_hub.HfApi(endpoint=endpoint, token=token or False)
    info = _model_info(api, name, revision, transfer or Transfer())
    _check_hex(str(info.sha), f"the commit of {name}")
    files = {}
    for item in info.siblings or ():
        lfs: Any = item.lfs or {}
        url = huggingface_hub.hf_hub_url(name, item.rfilename, revision=info.sha, endpoint=endpoint)
        sha256 = (lfs.get("sha256") if isinstance(lfs, dict) else lfs.sha256) or ""
        git_id = "" if sha256 else item.blob_id or ""
        _check_hex(sha256 or git_id, f"the digest of {item.rfilename} in {name}")
        files[item.rfilename] = RemoteFile(url, item.rfilename, item.size or 0, sha256=sha256, git_id=git_id)
    return Repository(name, str(info.sha), files, {"Authorization": f"Bearer {token}"} if token else {})


def _check_hex(value: str, what: str) -> None:
    """Digests and commits become file names here, so they must be what they claim to be."""
    if value and not _HEX.fullmatch(value):
        raise DownloadError(f"{what} is {value[:80]!r}, not a hexadecimal digest")


def _model_info(api: Any, name: str, revision: str, transfer: Transfer) -> Any:
    """The metadata, with patience for a hub that is busy."""
    from huggingface_hub import errors

    problem: BaseException | None = None
    for attempt in range(transfer.retries):
        if attempt:
            time.sleep(transfer.backoff * min(2.0 ** (attempt - 1), 8.0))
        try:
            return api.model_info(name, revision=revision, files_metadata=True, timeout=transfer.stall)
        except errors.GatedRepoError:
            raise PermissionDeniedError(
                f"{name} wants its terms to be accepted first, on its page at {api.endpoint}/{name}, and a token of "
                "that account: set HF_TOKEN or run `hf auth login`"
            ) from None
        except errors.RepositoryNotFoundError:
            raise ModelNotFoundError(
                f"the hub {api.endpoint} has no model repository {name!r} (or it is private: set HF_TOKEN)"
            ) from None
        except errors.RevisionNotFoundError:
            raise ModelNotFoundError(f"the repository {name} has no revision {revision!r}") from None
        except errors.HFValidationError as error:
            raise ModelNotFoundError(f"{name!r} is not the name of a repository: {error}") from None
        except errors.OfflineModeIsEnabled:
            raise DownloadError(
                "offline mode was on when this program started; start it without HF_HUB_OFFLINE"
            ) from None
        except (httpx.HTTPError, OSError) as error:
            problem = error
            status = getattr(getattr(error, "response", None), "status_code", None)
            if status is not None and status != 429 and status < 500:
                break
    raise DownloadError(f"the hub {api.endpoint} does not tell what {name} holds: {_first_line(problem)}") from problem


def _first_line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
