"""Every error that Trueline raises on purpose, in one tree.

    TruelineError                 code, message, hint; crosses processes as these three strings
    ├── UsageError                a flag, argument or path that the caller has to correct
    ├── RecipeError               a blank of the recipe is missing, misspelt or of the wrong kind
    ├── DataError                 records that cannot be listed or read
    │   ├── MissingValues         columns without a value in some records: a matter of the schema, not of a record
    │   └── UnequalLengths        columns of lists or bytes, longer in some records; of the schema, too
    ├── StorageError              a disk that is full, read-only or torn; nothing half-written stays behind
    │   └── DiskFull              no room left, or over the quota: it can be written once there is room
    ├── MissingPackage            a package of an extra that is not installed; also an ImportError
    ├── PortInUse                 another process listens where a server was to listen
    ├── EngineAway                a cluster's scheduler that does not answer; a later call may succeed
    ├── TrainError                a job that cannot continue
    │   ├── StateLost             no process holds the job's state and no checkpoint does
    │   ├── JobStopped            the job was stopped by request; resuming continues it
    │   └── RecordsMiscounted     the ledger and the plan disagree: the job stops rather than lie
    ├── CheckpointError           a checkpoint that is torn, tampered with or of another recipe
    │   └── OtherSchema           a whole one that another version wrote: no older one stands in for it
    ├── CaptureError              a model that cannot be called, named or emitted
    │   └── NotProven             a format asked for has no program, or one that disagrees with the eager model
    ├── BudgetMissed              no compressed candidate keeps the budget; the message has the table of all
    ├── BundleError               a bundle that is torn, tampered with, or of an unknown schema
    ├── RegistryError             a model, version or alias that is not in the registry
    └── RequestError              one request is refused; the server continues
        ├── NotFound              404: no such model, version or path
        ├── MethodNotAllowed      405
        ├── TooLarge              413: body or tensor over its bound
        ├── UnsupportedMedia      415: a content type or encoding that is not supported
        ├── Overloaded            429: the queue is full; come back after `retry_after_s`
        ├── NotReady              503: the model is loading or draining, or no worker can answer
        ├── ServerFault           503, or 507 without room: the server's disk, memory or limits; not the client's fault
        └── DeadlineExceeded      504: no answer within the request's deadline

A message gives the value, what was expected, and (in `hint`) what to do next. A class exists where callers can react
differently, not for every message.
"""

import re
from collections.abc import Iterable, Mapping

_USER = re.compile(r"(\w://)[^/@\s]+@")
_PARAMETER = re.compile(
    r"(?i)([?&](?:[\w-]{0,32}(?:signature|token|secret|passw(?:or)?d|credential|access_?key|api_?key|key_?id)"
    r"[\w-]{0,32}|sig|sas|key|auth|code)=)[^&#\s,;'\"]+"
)


def redact_urls(text: str) -> str:
    """`text` with its URLs without users, passwords and tokens: for logs, terminals and clients. Source: CWE-532.

    >>> redact_urls("403 for https://id:pw@host/x?X-Amz-Signature=abc&n=1")
    '403 for https://host/x?X-Amz-Signature=***&n=1'
    """
    if "://" not in text:
        return text
    return _PARAMETER.sub(r"\1***", _USER.sub(r"\1", text))


class TruelineError(Exception):
    """Root of the tree. `str()` is the message; `hint` says what to do, and is printed on its own line. Credentials in
    URLs are taken out of both.
    """

    code = "error"
    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message, self.hint = redact_urls(message), redact_urls(hint)
        super().__init__(self.message)
        if self.hint:
            self.add_note(f"hint: {self.hint}")  # in tracebacks, as of notebooks


class UsageError(TruelineError):
    code = "usage"
    exit_code = 2


class RecipeError(TruelineError):
    code = "recipe"


class DataError(TruelineError):
    code = "data"


class MissingValues(DataError):
    code = "missing_values"


class UnequalLengths(DataError):
    code = "unequal_lengths"


class StorageError(TruelineError):
    code = "storage"


class DiskFull(StorageError):
    code = "disk_full"


class MissingPackage(TruelineError, ImportError):
    code = "missing_package"


class PortInUse(TruelineError):
    code = "port_in_use"


class EngineAway(TruelineError):
    code = "engine_away"


class TrainError(TruelineError):
    code = "train"


class StateLost(TrainError):
    code = "state_lost"


class JobStopped(TrainError):
    code = "job_stopped"


class RecordsMiscounted(TrainError):
    code = "records_miscounted"


class CheckpointError(TruelineError):
    code = "checkpoint"


class OtherSchema(CheckpointError):
    code = "checkpoint_schema"


class CaptureError(TruelineError):
    code = "capture"


class NotProven(CaptureError):
    code = "not_proven"


class BudgetMissed(TruelineError):
    code = "budget_missed"


class BundleError(TruelineError):
    code = "bundle"


class RegistryError(TruelineError):
    code = "registry"


class RequestError(TruelineError):
    """One request is refused with `status`; the message goes to the client, so it names no path of the server."""

    code = "bad_request"
    status = 400


class NotFound(RequestError):
    code = "not_found"
    status = 404


class MethodNotAllowed(RequestError):
    code = "method_not_allowed"
    status = 405


class TooLarge(RequestError):
    code = "too_large"
    status = 413


class UnsupportedMedia(RequestError):
    code = "unsupported_media"
    status = 415


class Overloaded(RequestError):
    code = "overloaded"
    status = 429

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class NotReady(RequestError):
    """`retry_after_s`: when it may be over; None: unknown."""

    code = "not_ready"
    status = 503

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class ServerFault(RequestError):
    code = "server_fault"
    status = 503

    def __init__(self, message: str, *, hint: str = "", status: int = 503) -> None:
        super().__init__(message, hint=hint)
        self.status = status


class DeadlineExceeded(RequestError):
    code = "deadline_exceeded"
    status = 504


def find_error_class(code: str, default: type[TruelineError] = TruelineError) -> type[TruelineError]:
    """The class of the tree whose `code` another process reported; `default` for an unknown code.

    >>> find_error_class("state_lost")
    <class 'trueline.errors.StateLost'>
    """
    classes: list[type[TruelineError]] = [TruelineError]
    for known in classes:  # grows while it is walked
        if known.code == code:
            return known
        classes += known.__subclasses__()
    return default


def rebuild_error(code: str, record: Mapping[str, object]) -> TruelineError:
    """The error that another process reported as `code`, with `message` and `hint` in `record`."""
    return find_error_class(code)(str(record["message"]), hint=str(record.get("hint", "")))


_LONGEST_NAME = 256


def closest(word: str, names: Iterable[str]) -> str | None:
    """The name most similar to `word`, or None without a similar one: for "did you mean" in messages.

    >>> closest("optimzer", ["model", "optimizer"])
    'optimizer'
    """
    if len(word) > _LONGEST_NAME:  # comparing takes the product of both lengths
        return None
    import difflib  # not at each start

    return next(iter(difflib.get_close_matches(word, list(names), n=1, cutoff=0.6)), None)


def name_type(value: object) -> str:
    """The class of a value, in words.

    >>> name_type(3), name_type({})
    ('an int', 'a dict')
    """
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def join_names(names: Iterable[str]) -> str:
    """Names for a message, `none` when there are none.

    >>> join_names(["a", "b"])
    'a, b'
    """
    return ", ".join(names) or "none"


def first_line(error: BaseException) -> str:
    """The first line of the error's message, or the name of its class where that is empty."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
