"""boto3 as we use it: where a request may go, and what each of its failures means in our words."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from gpu_skills.errors import (
    AuthRejected,
    BucketMissing,
    DestinationRefused,
    GpuError,
    MissingCredential,
    MissingProgram,
    NetworkDenied,
    RateLimited,
    StoreIgnoresConditions,
    StoreSilent,
    Unavailable,
    UnexpectedReply,
    UsageError,
    one_line,
)

ENDPOINT = "AWS_ENDPOINT_URL_S3"
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60
ATTEMPTS = 4
_REFUSED = {
    "AccessDenied", "AllAccessDisabled", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken",
    "TokenRefreshRequired", "RequestTimeTooSkewed", "AuthorizationHeaderMalformed", "Unauthorized", "403", "401",
}  # fmt: skip
_TOO_MANY = {"SlowDown", "TooManyRequests", "Throttling", "ThrottlingException", "RequestLimitExceeded", "429"}
_GONE = {"NoSuchKey", "NotFound", "404", "NoSuchVersion"}
# A conditional write that did not take place: 412; 409 while another is under way; 404 when what was read is gone.
_LOST = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409", *_GONE}


class Lost(Exception):
    """The condition of a write does not hold."""


class Gone(Exception):
    """There is no such object."""


class NoUpload(Exception):
    """There is no such upload in parts: it ended, or was aborted."""


def connect(store: str, *, attempts: int | None = None) -> Any:
    """A client with what environment, profile and instance offer it. attempts 1: for what must not be sent twice.

    MissingProgram without boto3; DestinationRefused for an endpoint in the clear that is not this computer.
    """
    try:
        import boto3.session
        from botocore.config import Config
    except ImportError as exc:
        raise MissingProgram(
            f"{store} needs the Python package boto3, which is not installed here",
            next_step="install gpu-skills with its extra s3: pip install 'gpu-skills[s3]'",
        ) from exc
    settings = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": attempts or ATTEMPTS},
        signature_version="s3v4",
        # Checksums in trailers are not known to every store; each body of ours carries its MD5 instead.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    with translated(store):
        try:
            # A session of its own: the default one is shared and not made for several threads.
            client = boto3.session.Session().client("s3", config=settings)
        except ValueError as exc:  # what botocore says of an address that is none
            raise UsageError(f"{ENDPOINT}: {one_line(str(exc))}", next_step=f"unset {ENDPOINT}") from exc
    require_safe(store, client.meta.endpoint_url)
    return client


def require_safe(store: str, endpoint: str) -> None:
    """Keys and outputs go over TLS, or stay on this computer."""
    parts = urlsplit(endpoint)
    if parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(parts.hostname or "")):
        return
    raise DestinationRefused(
        provider=store,
        base_url=f"{parts.scheme}://{parts.hostname}",
        reason="it is not encrypted, and not on this computer",
        variable=ENDPOINT,
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def translated(store: str, *, conditional: str | None = None) -> Iterator[None]:
    """What boto3 raises as one of our errors, or as Lost, Gone, NoUpload.

    conditional: the key of a write that must not be sent twice; where nobody knows whether it arrived: StoreSilent.
    """
    import botocore.exceptions as theirs
    import urllib3.exceptions

    try:
        yield
    except theirs.ClientError as exc:
        raise _of_answer(store, exc, conditional) from exc
    except (theirs.NoCredentialsError, theirs.PartialCredentialsError, theirs.CredentialRetrievalError) as exc:
        raise _no_key(store, exc) from exc
    except (theirs.TokenRetrievalError, theirs.SSOError, theirs.ProfileNotFound, theirs.LoginError) as exc:
        raise _no_key(store, exc) from exc
    except (theirs.ParamValidationError, theirs.InvalidRegionError, theirs.ConfigParseError) as exc:
        raise UsageError(f"{store}: {_said(exc)}", next_step="gpu job artifacts --help") from exc
    except (theirs.BotoCoreError, urllib3.exceptions.HTTPError, OSError) as exc:
        raise _of_connection(store, exc, conditional) from exc


def _of_answer(store: str, exc: Any, conditional: str | None) -> GpuError | Lost | Gone | NoUpload:
    """An answer that is an error, by its code, else by its status: HEAD has no body that could name a code."""
    error = exc.response.get("Error", {})
    code = str(error.get("Code", ""))
    status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    reason = one_line(f"{code}: {error.get('Message', '')}".strip(": "), limit=200)
    if code == "NoSuchBucket":
        return BucketMissing(store=store, reason=reason)
    if code == "NoSuchUpload":
        return NoUpload()
    if conditional is not None and (code in _LOST or status in (404, 409, 412)):
        return Lost()
    if code in _GONE or status == 404:
        return Gone()
    if code in _REFUSED or status in (401, 403):
        return AuthRejected(
            provider=store, source="boto3", reason=reason, next_step="aws sts get-caller-identity, or set the keys anew"
        )
    if code in _TOO_MANY or status == 429:
        return RateLimited(provider=store, what="requests", reason=reason, retry_after_s=5)
    if conditional is not None and (status == 501 or code == "NotImplemented"):
        return StoreIgnoresConditions(store=store, reason=reason)
    if conditional is not None and status != 503 and status >= 500:
        return StoreSilent(store=store, key=conditional, reason=reason)
    if status >= 500:
        return Unavailable(f"{store} is not available: {reason}", next_step="run the same command again")
    return UnexpectedReply(provider=store, what="a request", reason=reason)


def _no_key(store: str, exc: Exception) -> MissingCredential:
    return MissingCredential(
        f"no credential for {store}: {_said(exc)}",
        provider="s3",
        next_step="export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    )


def _of_connection(store: str, exc: Exception, conditional: str | None) -> GpuError:
    import botocore.exceptions as theirs

    if _numbers(exc) & {errno.EPERM, errno.EACCES}:
        return NetworkDenied(reason=_said(exc))
    before_sending = (theirs.EndpointConnectionError, theirs.ConnectTimeoutError, theirs.ProxyConnectionError)
    if conditional is not None and not isinstance(exc, before_sending):
        return StoreSilent(store=store, key=conditional, reason=_said(exc))
    return Unavailable(f"{store} cannot be reached: {_said(exc)}", next_step="run the same command again")


def _numbers(exc: BaseException) -> set[int]:
    """The system's error numbers of an exception and of all it was made from."""
    found: set[int] = set()
    waiting: list[Any] = [exc]
    seen: set[int] = set()
    while waiting:
        current = waiting.pop()
        if not isinstance(current, BaseException) or id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, OSError) and current.errno is not None:
            found.add(current.errno)
        named = getattr(current, "kwargs", None)
        waiting += [current.__cause__, current.__context__, getattr(current, "reason", None), *current.args]
        waiting += [named.get("error")] if isinstance(named, dict) else []
    return found


def _said(exc: Exception) -> str:
    """Without the query of an address, where a signature would stand."""
    return one_line(re.sub(r"\?[^\s\"']*", "", str(exc)), limit=200) or type(exc).__name__
