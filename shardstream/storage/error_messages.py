"""Translate errors of clients: what failed, where, one action, and whether a retry can help."""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from shardstream.errors import (
    AccessDeniedError,
    NotFoundError,
    OptionError,
    ShardStreamError,
    StorageError,
    redact,
)
from shardstream.storage.response import (
    CHANGED,
    NOT_FOUND,
    PAST_END,
    REFUSED,
    THROTTLED,
    UNSUPPORTED,
    ErrorMeaning,
    meaning_of_status,
)

# Packages of clients, which have their own exception types (botocore's derive from Exception). Only these are translated.
_CLIENTS = (
    "botocore",
    "aiobotocore",
    "s3fs",
    "aiohttp",
    "gcsfs",
    "adlfs",
    "azure",
    "google",
    "httpx",
    "httpx2",
    "httpcore",
    "httpcore2",
    "huggingface_hub",
    "ftplib",
    "paramiko",
    "fsspec",
)
# Secrets of a signed request in messages of servers and clients; `redact` removes those in URLs.
_SIGNED = re.compile(
    r"(?is)(<(AWSAccessKeyId|StringToSign|StringToSignBytes|SignatureProvided|CanonicalRequest|CanonicalRequestBytes)>).*?(?=</\2>|$)"
    r"|(\b(?:X-Amz-(?:Signature|Credential|Security-Token)|AWSAccessKeyId|Signature|Credential|sig|Authorization)['\"]?\s*[=:]\s*(?:(?:Bearer|Basic|Token) )?)[^\s&<>]+"
)
_LONGEST_CHAIN = 10
_CODE = re.compile(r"<Code>([^<]*)</Code>(?:<Message>([^<]*)</Message>)?")


class ErrorClassification(NamedTuple):
    """The classification of a failed request: the error for the user, and its meaning."""

    error: StorageError
    meaning: ErrorMeaning


def _final(advice: str, kind: type[StorageError] = StorageError) -> ErrorMeaning:
    return ErrorMeaning(advice, kind)


def _temporary(advice: str, *, is_silent: bool = False) -> ErrorMeaning:
    return ErrorMeaning(advice, is_retryable=True, is_silent=is_silent)


_TIMED_OUT = _temporary(
    "the server did not answer in time; check it and the network, or raise read_timeout_s in storage_options",
    is_silent=True,
)
# Codes of servers, and types of errors, that say more than the status of a response. The first that is found decides.
_CODES: tuple[tuple[tuple[str, ...], ErrorMeaning], ...] = (
    (("OfflineModeIsEnabled",), _final("offline mode of Hugging Face is enabled; unset HF_HUB_OFFLINE")),
    (("TooManyRedirects",), _final("the server redirects in a circle; check the URL")),
    (("TooLongError",), _final("the response is too long for a listing or a look-up; check the URL and the server")),
    (("CancelledReadError",), _final("the request was cancelled")),
    (("SocketTimeoutError",), _TIMED_OUT),  # of aiohttp; it is a ConnectionError, too
    (("TruncatedResponseError", "ClientPayloadError", "IncompleteRead", "IncompleteReadError", "ConnectionResetError",
      "ServerDisconnectedError", "RemoteProtocolError", "SSLEOFError"),
     _temporary("the connection broke off; check the server and the network")),
    (("SSLCertVerificationError", "ClientConnectorCertificateError"),
     _final("the server's certificate is not trusted; set AWS_CA_BUNDLE to the certificate that signed it, "
            "and use a server name that is in the certificate")),
    (("ConnectionError", "ClientConnectionError", "ConnectTimeout", "ConnectTimeoutError", "ConnectError", "gaierror"),
     _temporary("the server cannot be reached; check AWS_ENDPOINT_URL and the network", is_silent=True)),
    (("SlowDown", "TooManyRequests", "TooManyRequestsException", "Throttling", "ThrottlingException", "ThrottledException",
      "RequestThrottled", "RequestThrottledException", "RequestLimitExceeded", "ServiceUnavailable", "ServerBusy"), THROTTLED),
    (("InvalidRange",), PAST_END),
    (("NoCredentialsError", "CredentialRetrievalError", "PartialCredentialsError", "ProfileNotFound"),
     _final("no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, or pass storage_options",
            AccessDeniedError)),
    (("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"),
     _final("access refused; AWS_SESSION_TOKEN is wrong or has expired, get new credentials", AccessDeniedError)),
    (("RequestTimeTooSkewed",),
     _final("access refused because the clock of this machine is wrong; set the clock", AccessDeniedError)),
    (("InvalidObjectState", "BlobArchived"), _final("the file is in an archive (Glacier); restore it in the store, or name a copy")),
    (("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"), REFUSED),
    (("RequestTimeout",), _TIMED_OUT._replace(is_silent=False)),
    (("BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody"),
     _temporary("the bytes were damaged on the way; check the network")),
    (("OperationAborted", "ConditionalRequestConflict"), _temporary("another request changes the file; try again later")),
    (("NoSuchBucket", "ContainerNotFound"),
     _final("the bucket {bucket!r} does not exist; create it, or check the URL", NotFoundError)),
    (("GatedRepoError", "DisabledRepoError"),
     _final("access refused; accept the dataset's conditions on its page, and set HF_TOKEN", AccessDeniedError)),
    (("RepositoryNotFoundError", "RevisionNotFoundError"),
     _final("the repository or its revision is not found; check the URL, and set HF_TOKEN if the repository is private",
            NotFoundError)),
    (("NoSuchUpload",),
     _final("another writer of this file has dropped its upload; wait until it ends, then run this again, or write elsewhere", NotFoundError)),
    (("NoSuchKey", "BlobNotFound", "EntryNotFoundError"), NOT_FOUND),
    (("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"),
     _final("the bucket is in another region; set AWS_REGION")),
    (("PreconditionFailed", "BlobAlreadyExists"), CHANGED),
    (("NotImplemented",), UNSUPPORTED),
)  # fmt: skip
# Types and numbers of errors without a status.
_TYPES: tuple[tuple[tuple[str, ...], ErrorMeaning], ...] = (
    (("PermissionError",), REFUSED),
    (("TimeoutError", "TimeoutException", "ReadTimeout", "ReadTimeoutError", "ServiceResponseTimeoutError"), _TIMED_OUT),
    (("FileNotFoundError",), NOT_FOUND),
    (("IsADirectoryError",), _final("a folder is there, not a file; name a file")),
    (("NotADirectoryError", "ENAMETOOLONG", "NUL"), _final("no file can have this name; correct it")),
    (("EROFS",), _final("the disk is read-only; write elsewhere")),
    (("ELOOP",), _final("the link leads back to itself; correct it")),
    (("ENOSPC", "EDQUOT", "EFBIG"), _final("the disk is full; free some space, or write elsewhere")),
)  # fmt: skip
_REFUSED = REFUSED.advice
_HTTP_REMEDIES = {
    "AWS_CA_BUNDLE": "SSL_CERT_FILE",
    "AWS_ENDPOINT_URL and": "the URL and",
    _REFUSED: "access refused; check the URL: its signature may have expired",
}
_OTHER_REMEDIES = {
    "AWS_ENDPOINT_URL and": "the URL and",
    _REFUSED: "access refused; check the credentials in storage_options, or those of the protocol's own tools",
}
_LOCAL_REMEDIES = {
    _REFUSED: "access refused; check the permissions of the file and of its folders",
    "check the URL": "check the path",
}
# Unknown errors of these types may be temporary.
_RETRYABLE_TYPES = (OSError, RuntimeError)
_NOT_RETRYABLE = {
    "IsADirectoryError",
    "NotADirectoryError",
    "NotImplementedError",
    "InvalidBucketName",
}


def broken_link(url: str) -> str | None:
    """Return problem and action for a path of this machine in which a link has no target; None for any other."""
    if "://" in url and not url.startswith("file://"):
        return None
    path = os.path.abspath(url.removeprefix("file://"))
    places = (path[:end] for end in range(1, len(path) + 1) if path[end : end + 1] in ("", os.sep))
    link = next((one for one in places if os.path.islink(one) and not os.path.exists(one)), None)
    if link is None:
        return None
    return f"{link} is a link to {os.readlink(link)!r}, which does not exist; correct the link"


def classify_error(
    error: Exception, url: str, secrets: tuple[str, ...] = ()
) -> ErrorClassification:
    """Classify an error by the known codes and types in its chain of causes, else by its HTTP status, else by type and number.

    Raises:
        Exception: The error itself if it is not one of a client: a bug keeps its type.
        OptionError: If the file system does not know a storage option.
    """
    if isinstance(error, StorageError):
        return ErrorClassification(error, ErrorMeaning(error.what, type(error)))
    if isinstance(error, ShardStreamError):
        raise error
    if isinstance(error, TypeError) and "keyword argument" in str(error):
        raise OptionError(
            f"the file system does not know one of the storage options: {remove_secrets(str(error), secrets)}",
            shard=url,
        ) from safe_cause(error, secrets)
    is_client_error = type(error).__module__.split(".")[0] in _CLIENTS
    if not is_client_error and not isinstance(
        error, OSError | ValueError | RuntimeError | TimeoutError
    ):
        raise error
    facts = _facts(error, url)
    status = http_status(error)
    detail = remove_secrets(f"{type(error).__name__}: {_first_line(error)}", secrets)
    if status is not None and str(status) not in detail:  # fsspec's http hides it in the cause
        detail = f"HTTP status {status}, {detail}"
    meaning = _find(facts, _CODES)
    if meaning is None:
        meaning = _find(facts, _TYPES) if status is None else meaning_of_status(status)
    if isinstance(error, FileNotFoundError | FileExistsError) and (link := broken_link(url)):
        meaning = _final(link, NotFoundError)
    if meaning is not None:
        what, remedy = _problem_and_remedy(meaning.advice, url)
        if remedy:
            error_shown = meaning.kind(what, remedy=f"{remedy} ({detail})", shard=url)
        else:
            error_shown = meaning.kind(f"{what} ({detail})", shard=url)
        return ErrorClassification(error_shown, meaning)
    may_be_temporary = is_client_error or isinstance(error, _RETRYABLE_TYPES)
    is_retryable = may_be_temporary and _NOT_RETRYABLE.isdisjoint(facts)
    return ErrorClassification(
        StorageError(detail, shard=url), ErrorMeaning(detail, is_retryable=is_retryable)
    )


def _facts(error: Exception, url: str) -> set[str]:
    """Return what an error and its causes say in fields: types, codes of servers, numbers of the system; not their messages."""
    facts = {"NUL"} if "\0" in url else set()
    for one in _causes(error):
        facts.update(kind.__name__ for kind in type(one).__mro__)
        if code := error_code(one):
            facts.add(code)
        if isinstance(one, OSError) and one.errno is not None:
            facts.add(errno.errorcode.get(one.errno, ""))
    return facts


def error_code(error: BaseException) -> str | None:
    """Return the code of the server in an error of a client, such as "NoSuchKey"; None if it has none."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore
        found = response.get("Error", {}).get("Code")
    else:  # of ours; of azure, as an enumeration
        found = getattr(error, "s3_code", None) or getattr(error, "error_code", None)
    code = getattr(found, "value", found)
    return code if isinstance(code, str) else None


def _find(
    facts: set[str], table: tuple[tuple[tuple[str, ...], ErrorMeaning], ...]
) -> ErrorMeaning | None:
    return next((meaning for names, meaning in table if not facts.isdisjoint(names)), None)


def _problem_and_remedy(advice: str, url: str) -> tuple[str, str]:
    """Return the problem and the action, which may be empty."""
    others = {}
    if url.startswith("http"):
        others = _HTTP_REMEDIES
    elif "://" not in url or url.startswith("file:"):
        others = _LOCAL_REMEDIES
    elif not url.startswith(("s3:", "s3a:")):
        others = _OTHER_REMEDIES
    for words, replacement in others.items():
        advice = advice.replace(words, replacement)
    bucket = url.partition("://")[2].partition("/")[0]
    what, _, remedy = advice.replace("{bucket!r}", repr(bucket)).partition("; ")
    return what, remedy


def safe_cause(error: BaseException, secrets: tuple[str, ...] = ()) -> BaseException | None:
    """Return an error as a cause to show, or None if anything in its traceback shows a secret."""
    text = "\n".join(
        f"{' '.join(kind.__name__ for kind in type(one).__mro__)}\n{one}"
        for one in _causes(error, with_context=True)
    )
    return error if remove_secrets(text, secrets) == text else None


@contextmanager
def translate_errors(
    url: str, find_secrets: Callable[[], tuple[str, ...]] = tuple
) -> Iterator[None]:
    """Turn errors of a file system into a `StorageError` with an action; secrets are looked up only then."""
    try:
        yield
    except Exception as error:
        secrets = find_secrets()
        classification = classify_error(error, url, secrets)
        if classification.error is error:
            raise
        raise classification.error from safe_cause(error, secrets)


def remove_secrets(text: str, secrets: tuple[str, ...]) -> str:
    """Return a text without these secrets and without signatures of requests."""
    for secret in secrets:
        text = text.replace(secret, "…")
    return _SIGNED.sub(lambda found: (found[1] or found[3]) + "…", redact(text))


def _causes(error: BaseException, *, with_context: bool = False) -> list[BaseException]:
    """Return an error and its causes, ten at most.

    Args:
        error: The last of them.
        with_context: Include each ``__context__``, which a traceback shows, too. It is no cause: any error that is being handled
            where a request is sent, such as that of another file.
    """
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while isinstance(cause, BaseException) and len(chain) < _LONGEST_CHAIN:
        chain.append(cause)
        kept = getattr(cause, "kwargs", None)  # botocore keeps the error that it wraps
        wrapped = kept.get("error") if isinstance(kept, dict) else None
        cause = cause.__cause__ or wrapped or (cause.__context__ if with_context else None)
    return chain


def _first_line(error: Exception) -> str:
    """Return the message of an error, without the dumps of structures that some clients append."""
    text = str(error)
    code = _CODE.search(text)
    if code is not None:
        return ", ".join(part for part in code.groups() if part)
    line = text.strip().partition("\n")[0]
    # s3fs turns errors of the server into errors of Python; the cause has the code, which the message often lacks.
    sent = next(filter(None, map(error_code, _causes(error))), None)
    if sent is None or sent in line:
        return line
    return sent if line in ("", "None") else f"{sent}, {line}"


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status that an error of a client reports; None without a response."""
    return next((found for one in _causes(error) if (found := _status(one)) is not None), None)


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    response = getattr(response, "status_code", response)  # httpx, requests
    names = ("status", "status_code", "code")  # aiohttp and http.client; azure; gcsfs
    # only the first: aiohttp warns of the last
    found = (getattr(error, name) for name in names if hasattr(error, name))
    statuses = itertools.chain([response], itertools.islice(found, 1))
    return next((one for one in statuses if isinstance(one, int) and 300 <= one < 600), None)
