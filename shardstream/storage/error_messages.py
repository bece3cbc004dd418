"""Translate errors of clients: what failed, where, one action, and whether a retry can help."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from shardstream.errors import (
    AccessDeniedError,
    ChangedError,
    NotFoundError,
    OptionError,
    ShardStreamError,
    StorageError,
    redact,
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
    "obstore",
    "httpx",
    "httpx2",
    "httpcore",
    "httpcore2",
    "huggingface_hub",
    "ftplib",
    "paramiko",
    "pyo3_runtime",
    "fsspec",
)
# Secrets of a signed request in messages of servers and clients; `redact` removes those in URLs.
_SIGNED = re.compile(
    r"(?is)(<(AWSAccessKeyId|StringToSign|StringToSignBytes|SignatureProvided|CanonicalRequest|CanonicalRequestBytes)>).*?(?=</\2>|$)"
    r"|(\b(?:X-Amz-(?:Signature|Credential|Security-Token)|AWSAccessKeyId|Signature|Credential|sig|Authorization)['\"]?\s*[=:]\s*(?:(?:Bearer|Basic|Token) )?)[^\s&<>]+"
)
_STATUS = re.compile(r"status code: (\d{3})\b")
_LONGEST_CHAIN = 10
_BOTOCORE_CODE = re.compile(r"An error occurred \(([A-Za-z]\w+)\) when calling")
_CERTIFICATE = re.compile(r"InvalidCertificate\((?:\s|Other\(|OtherError\()*(\w+)")
_CODE = re.compile(r"<Code>([^<]*)</Code>(?:<Message>([^<]*)</Message>)?")


class ErrorClassification(NamedTuple):
    """The classification of a failed request."""

    error: StorageError
    """The error for the user."""
    is_retryable: bool
    """Whether the same request may work later."""
    is_throttled: bool = False
    """Whether the server throttles."""
    is_past_end: bool = False
    """Whether the range begins after the end of the file."""


class _ErrorPattern(NamedTuple):
    names: tuple[str, ...]
    advice: str
    """The problem and, after "; ", the action."""
    kind: type[StorageError] = StorageError
    is_retryable: bool = False
    is_throttled: bool = False
    is_past_end: bool = False


_REFUSED = "access refused; check the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) and the bucket's policy"
_TIMED_OUT = "the server did not answer in time; check it and the network, or raise read_timeout_s in storage_options"
_ERROR_PATTERNS = (
    _ErrorPattern(("OfflineModeIsEnabled",), "offline mode of Hugging Face is enabled; unset HF_HUB_OFFLINE"),
    _ErrorPattern(("SocketTimeoutError",), _TIMED_OUT, is_retryable=True),  # of aiohttp; it is a ConnectionError, too
    _ErrorPattern(("TruncatedResponseError", "ClientPayloadError", "IncompleteRead", "response body error", "ConnectionReset",
           "ServerDisconnected", "IncompleteMessage"),
          "the connection broke off; check the server and the network", is_retryable=True),
    _ErrorPattern(("CaUsedAsEndEntity",),
          "the server's certificate is self-signed, which obstore refuses; read with s3fs (s3_client='s3fs'), "
          "or create a certificate with basicConstraints=CA:FALSE"),
    _ErrorPattern(("InvalidCertificate", "CERTIFICATE_VERIFY_FAILED", "CertificateError"),
          "the server's certificate is not trusted; set AWS_CA_BUNDLE to the certificate that signed it, "
          "and use a server name that is in the certificate"),
    _ErrorPattern(("EndpointConnectionError", "ConnectionError", "ConnectorError", "ConnectTimeout", "ConnectError", "NameResolution", "gaierror",
           "kind: Connect"),
          "the server cannot be reached; check AWS_ENDPOINT_URL and the network", is_retryable=True),
    _ErrorPattern(("SlowDown", "reduce your request rate", "TooManyRequests", "Too Many Requests", "Throttl", "RequestLimitExceeded",
           "503 Service Unavailable", "ServiceUnavailable", "503, message", "429, message", "(503)", "(429)"),
          "the server throttles requests; use fewer workers", is_retryable=True, is_throttled=True),
    _ErrorPattern(("InvalidRange", "Range Not Satisfiable", "RangeNotSatisfiable"),
          "the file is shorter than its index says", is_past_end=True),
    _ErrorPattern(("NoCredentials", "CredentialRetrieval", "PartialCredentials", "ProfileNotFound"),
          "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, or pass storage_options",
          AccessDeniedError),
    _ErrorPattern(("MissingAccount",),
          "no storage account is named; set AZURE_STORAGE_ACCOUNT_NAME, or pass account_name in storage_options"),
    _ErrorPattern(("ExpiredToken", "TokenRefreshRequired", "InvalidToken"),
          "access refused; AWS_SESSION_TOKEN is wrong or has expired, get new credentials", AccessDeniedError),
    _ErrorPattern(("RequestTimeTooSkewed",), "access refused because the clock of this machine is wrong; set the clock", AccessDeniedError),
    _ErrorPattern(("PermissionError", "PermissionDenied", "Unauthenticated", "Forbidden", "AccessDenied", "InvalidAccessKeyId",
           "SignatureDoesNotMatch"),
          _REFUSED, AccessDeniedError),
    # fsspec's http reports any error of a look-up as "not found"
    _ErrorPattern(("500, message", "502, message", "504, message"),
          "the server failed; see its log, or try again later", is_retryable=True),
    _ErrorPattern(("Timeout", "TimedOut"), _TIMED_OUT, is_retryable=True),
    _ErrorPattern(("NoSuchBucket", "ContainerNotFound"),
          "the bucket {bucket!r} does not exist; create it, or check the URL", NotFoundError),
    _ErrorPattern(("GatedRepoError", "DisabledRepoError"),
          "access refused; accept the dataset's conditions on its page, and set HF_TOKEN", AccessDeniedError),
    _ErrorPattern(("RepositoryNotFoundError", "RevisionNotFoundError"),
          "the repository or its revision is not found; check the URL, and set HF_TOKEN if the repository is private", NotFoundError),
    _ErrorPattern(("FileNotFoundError", "NoSuchKey", "EntryNotFoundError"),
          "not found; check the URL", NotFoundError),
    _ErrorPattern(("PermanentRedirect", "BareRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraint"),
          "the bucket is in another region; set AWS_REGION"),
    _ErrorPattern(("Read-only file system",), "the disk is read-only; write elsewhere"),
    _ErrorPattern(("No space left", "Disk quota exceeded", "File too large"),
          "the disk is full; free some space, or write elsewhere"),
    _ErrorPattern(("PreconditionFailed",), "the file was changed meanwhile", ChangedError),
    _ErrorPattern(("(NotImplemented)",), "NotImplemented: the server does not support this request"),
)  # fmt: skip
_HTTP_REMEDIES = {
    "AWS_CA_BUNDLE": "SSL_CERT_FILE",
    "AWS_ENDPOINT_URL and": "the URL and",
    _REFUSED: "access refused; check the URL: its signature may have expired",
}
_OTHER_REMEDIES = {
    "AWS_ENDPOINT_URL and": "the URL and",
    _REFUSED: "access refused; check the credentials in storage_options, or those of the protocol's own tools",
}
_LOCAL_REMEDIES = {_REFUSED: "access refused; check the permissions of the file and of its folders"}
_RETRYABLE_TYPES = (
    OSError,
    RuntimeError,
)  # unknown errors of these types may be temporary
_NOT_RETRYABLE = (
    "IsADirectoryError",
    "NotADirectoryError",
    "NotImplementedError",
    "InvalidBucketName",
    "InvalidRequest",
    "InvalidArgument",
    "MethodNotAllowed",
    "(400)",
    "400 Bad Request",
    "501 Not Implemented",
    "builder error",
    "UnknownConfigurationKeyError",
    "InvalidPathError",
)


def classify_error(
    error: Exception, url: str, secrets: tuple[str, ...] = ()
) -> ErrorClassification:
    """Classify an error by the first known pattern in its chain.

    Raises:
        Exception: The error itself if it is not one of a client: a bug keeps its type.
        OptionError: If the file system does not know a storage option.
    """
    if isinstance(error, StorageError):
        return ErrorClassification(error, is_retryable=False)
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
    text = _causes_text(error)
    for name in (url.partition("://")[2] or url, url.rpartition("/")[2]):
        if len(name) > 6:  # a file may be called "Timeout.tar"
            text = text.replace(name, "")
    detail = remove_secrets(f"{type(error).__name__}: {_first_line(error)}", secrets)
    for pattern in _ERROR_PATTERNS:
        if any(name in text for name in pattern.names):
            what, remedy = _problem_and_remedy(pattern, url)
            if remedy:
                error_shown = pattern.kind(what, remedy=f"{remedy} ({detail})", shard=url)
            else:
                error_shown = pattern.kind(f"{what} ({detail})", shard=url)
            return ErrorClassification(
                error_shown, pattern.is_retryable, pattern.is_throttled, pattern.is_past_end
            )
    is_retryable = (is_client_error or isinstance(error, _RETRYABLE_TYPES)) and not any(
        name in text for name in _NOT_RETRYABLE
    )
    return ErrorClassification(StorageError(detail, shard=url), is_retryable)


def _problem_and_remedy(pattern: _ErrorPattern, url: str) -> tuple[str, str]:
    """Return the problem and the action, which may be empty."""
    advice, others = pattern.advice, {}
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
    """Return an error as a cause to show, or None if anything in its chain shows a secret."""
    text = _causes_text(error)
    return error if remove_secrets(text, secrets) == text else None


def ranges_ignored_error(url: str, offset: int) -> StorageError:
    """Return the error of a response that is longer than the requested range."""
    return StorageError(
        "the server ignored the requested range and sent more bytes; "
        "serve the files with one that supports ranges, such as nginx, Caddy or an S3 server (Python's http.server does not)",
        shard=url,
        offset=offset,
    )


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


def _causes_text(error: BaseException) -> str:
    parts: list[str] = []
    for one in _causes(error):
        parts += (" ".join(kind.__name__ for kind in type(one).__mro__), str(one))
    return "\n".join(parts)


def _causes(error: BaseException) -> list[BaseException]:
    """Return an error and its causes, ten at most."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < _LONGEST_CHAIN:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    return chain


def _first_line(error: Exception) -> str:
    """Return the message of an error, without the dumps of structures that some clients append."""
    text = str(error)
    certificate = _CERTIFICATE.search(text)
    if certificate is not None:
        return f"InvalidCertificate: {certificate[1]}"
    code = _CODE.search(text)
    if code is not None:
        return ", ".join(part for part in code.groups() if part)
    line = text.strip().partition("\n")[0]
    # s3fs turns errors of the server into errors of Python; the cause has the code, which the message often lacks.
    code = _BOTOCORE_CODE.search(_causes_text(error))
    if code is None or code[1] in line:
        return line
    return code[1] if line in ("", "None") else f"{code[1]}, {line}"


def has_http_status(error: BaseException) -> bool:
    """Return whether a server sent an HTTP status, so that it can be reached."""
    return any(_status(one) is not None for one in _causes(error))


def _status(error: BaseException) -> int | None:
    """Return the HTTP status in an error of a client; None without a response."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    response = getattr(response, "status_code", response)  # httpx, requests
    found = _STATUS.search(str(error))  # obstore has it in the message only
    statuses = (response, getattr(error, "status", None), getattr(error, "status_code", None))
    return next((one for one in statuses if isinstance(one, int)), int(found[1]) if found else None)
