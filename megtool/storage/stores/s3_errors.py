"""What S3 and its clients say when they refuse, as errors of one sentence with a way out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from megtool.errors import StorageError
from megtool.storage.stores.protocol import BucketMissingError, ConditionError, ObjectMissingError

CONDITION_CODES = {"PreconditionFailed", "412", "ConditionalRequestConflict", "409"}
MISSING_CODES = {"NoSuchKey", "NoSuchUpload", "NoSuchBucket", "404", "NotFound"}
THROTTLE_CODES = {
    *("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"),
    *("ServiceUnavailable", "RequestThrottled", "BandwidthLimitExceeded", "503", "429"),
}
"""The server did not carry the request out, and asks to come back later."""

_CREDENTIALS_HINT = (
    "megtool uses the credentials of the AWS CLI: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "AWS_PROFILE, `aws sso login`, or the role of the machine"
)
_ENDPOINT_HINT = "a store that is not Amazon's needs AWS_ENDPOINT_URL, and often AWS_REGION"

_REFUSALS: dict[str, tuple[str, str, str]] = {
    "NoSuchBucket": (
        "there is no bucket of this name",
        f"check the name; {_ENDPOINT_HINT}",
        "object-missing",
    ),
    "AccessDenied": (
        "the store denies access with these credentials",
        "reading needs s3:GetObject and s3:ListBucket, writing s3:PutObject and "
        "s3:AbortMultipartUpload; without s3:ListBucket a missing object looks forbidden",
        "permission-denied",
    ),
    "ExpiredToken": (
        "the credentials have expired",
        "renew them (`aws sso login`, or a new session token) and run the command again",
        "no-credentials",
    ),
    "InvalidAccessKeyId": (
        "the store does not know the access key",
        f"check that the key belongs to this store; {_ENDPOINT_HINT}",
        "no-credentials",
    ),
    "SignatureDoesNotMatch": (
        "the store does not accept the signature: the secret key is wrong",
        "check AWS_SECRET_ACCESS_KEY or the profile; a proxy that changes requests does this too",
        "no-credentials",
    ),
    "InvalidToken": (
        "the store does not accept the session token",
        "AWS_SESSION_TOKEN must belong to the access key; unset it for a permanent key",
        "no-credentials",
    ),
    "RequestTimeTooSkewed": (
        "the clock of this machine differs too much from that of the store",
        "set the clock (`timedatectl`, chrony or NTP) and run the command again",
        "storage",
    ),
    "InvalidObjectState": (
        "the object is archived and cannot be read",
        "restore it first: `aws s3api restore-object`",
        "storage",
    ),
}
for _code, _same in {
    "403": "AccessDenied",
    "Forbidden": "AccessDenied",
    "AllAccessDisabled": "AccessDenied",
    "AccountProblem": "AccessDenied",
    "TokenRefreshRequired": "ExpiredToken",
    "ExpiredTokenException": "ExpiredToken",
    "RequestExpired": "RequestTimeTooSkewed",
    "UnrecognizedClientException": "InvalidAccessKeyId",
    "InvalidAccessKey": "InvalidAccessKeyId",
}.items():
    _REFUSALS[_code] = _REFUSALS[_same]
_UNKNOWN_CODES = {"NotImplemented", "MethodNotAllowed", "501", "405"}
_REGION_CODES = {
    *("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"),
    *("301", "307"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Reply:
    """An error as S3 replied it. `region` is the one that the bucket is in, if the reply says."""

    code: str
    message: str = ""
    status: int = 0
    region: str = ""

    @property
    def is_throttle(self) -> bool:
        """Whether the server asks to come back later."""
        return self.code in THROTTLE_CODES


def reply_of(error: Any) -> S3Reply:
    """The reply behind a `ClientError` of botocore."""
    response = error.response
    meta = response.get("ResponseMetadata", {})
    body = response.get("Error", {})
    headers = meta.get("HTTPHeaders", {})
    return S3Reply(
        code=str(body.get("Code", "")),
        message=str(body.get("Message", "")),
        status=int(meta.get("HTTPStatusCode", 0)),
        region=str(headers.get("x-amz-bucket-region") or body.get("Region") or ""),
    )


def reply_in(text: str) -> S3Reply | None:
    """The reply in the text of an error of obstore, which quotes the server's; None if none is."""
    fields = {
        name: match[1]
        for name in ("Code", "Message", "Region")
        if (match := re.search(rf"<{name}>([^<]*)</{name}>", text))
    }
    status = re.search(r"\b(?:status code|HTTP status [a-z ]*error)[: (]+(\d{3})\b", text)
    if "Code" not in fields and status is None:
        return None
    number = int(status[1]) if status else 0
    return S3Reply(
        code=fields.get("Code", str(number)),
        message=fields.get("Message", ""),
        status=number,
        region=fields.get("Region", ""),
    )


def error_of(reply: S3Reply, place: str, *, attempts: int) -> StorageError:
    """The error to raise for what S3 replied about the object or bucket at a URL."""
    code = reply.code
    if code in CONDITION_CODES or reply.status == 412:
        return ConditionError("the object exists already, or has another version", file=place)
    if code in _REFUSALS:
        message, hint, error_id = _REFUSALS[code]
        kind = BucketMissingError if code == "NoSuchBucket" else StorageError
        return kind(message, file=place, hint=hint, error_id=error_id)
    if code in _UNKNOWN_CODES:
        return StorageError(
            "the store does not implement the request",
            file=place,
            hint="see What a store must be able to do in the guide on object stores",
            error_id="not-implemented",
        )
    if code in MISSING_CODES or reply.status == 404:
        what = "upload in parts" if code == "NoSuchUpload" else "object"
        return ObjectMissingError(f"there is no such {what}", file=place)
    if code in _REGION_CODES or reply.status in (301, 307):
        return StorageError(
            f"the bucket is in the region {reply.region}"
            if reply.region
            else "the bucket is in another region or at another endpoint",
            file=place,
            hint=f"AWS_REGION={reply.region}"
            if reply.region
            else "set AWS_REGION, and AWS_ENDPOINT_URL if the store is not Amazon's",
            error_id="wrong-region",
        )
    if reply.is_throttle:
        return StorageError(
            f"the store was overloaded: {code} after {attempts} attempts",
            file=place,
            hint="run the command again later: it resumes; AWS_MAX_ATTEMPTS raises the attempts",
            error_id="throttled",
        )
    what = f"{code}: {_clean(reply.message)}" if reply.message else code
    return StorageError(f"the store answered {what} (HTTP {reply.status})", file=place)


def _clean(text: str) -> str:
    text = re.sub(r"://[^/\s]*@", "://", text)  # an endpoint or a proxy may have a password in it
    return re.sub(r"\s+", " ", text).strip().rstrip(".")[:200]


def client_error(error: Exception, place: str) -> StorageError:
    """The error to raise for a `BotoCoreError`: the client failed before the store replied."""
    name = type(error).__name__
    if name in ("NoCredentialsError", "PartialCredentialsError"):
        return no_credentials(place)
    if name == "ProfileNotFound":
        return StorageError(
            f"{_clean(str(error))}",
            file=place,
            hint="AWS_PROFILE must name a profile of ~/.aws/config",
            error_id="no-credentials",
        )
    if "SSO" in name or "Token" in name or "Login" in name or "CredentialRetrieval" in name:
        return StorageError(
            f"the credentials of the profile cannot be renewed ({name})",
            file=place,
            hint="`aws sso login`, or check the credential process of the profile",
            error_id="no-credentials",
        )
    if is_disconnected(error) or name == "SSLError":
        return StorageError(
            f"the store cannot be reached: {_clean(str(error))}",
            file=place,
            hint=f"check the network and the proxy; {_ENDPOINT_HINT}",
        )
    if name == "ParamValidationError" and "bucket name" in str(error):
        return StorageError(
            "this is no name that a bucket can have",
            file=place,
            hint="s3://BUCKET/PREFIX, with a bucket of small letters, digits, dots and hyphens",
        )
    return StorageError(
        f"the client of the store failed ({name}): {_clean(str(error))}", file=place
    )


def is_lost(error: StorageError) -> bool:
    """Whether it is unknown what became of the request: no reply came, or the server failed."""
    cause = error.__cause__
    if isinstance(getattr(cause, "response", None), dict):
        reply = reply_of(cause)
        return reply.status >= 500 and not reply.is_throttle
    return is_disconnected(cause)


def is_disconnected(error: BaseException | None) -> bool:
    """Whether a client of S3 had no connection, or lost it."""
    name = type(error).__name__
    return "Timeout" in name or "Connection" in name or name == "HTTPClientError"


def no_credentials(place: str) -> StorageError:
    """The error of a machine that has no credentials for S3."""
    return StorageError(
        "there are no credentials for S3 (the environment, the profiles and the role of the "
        "machine were asked)",
        file=place,
        hint=f"{_CREDENTIALS_HINT}; AWS_SKIP_SIGNATURE=true reads a public bucket without any",
        error_id="no-credentials",
    )
