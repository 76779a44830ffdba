"""How a handler runs: the call's parameters, else the archive's configuration, else TorchServe's defaults. Pure.

As in TorchServe, an invalid value is an error in the configuration and falls back to the default in a call.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trueline.serve.handlers.archive import ArchiveError, Manifest
from trueline.serve.handlers.budget import check_number
from trueline.serve.handlers.envelopes import NAMES

NOT_RUN = ("asyncCommunication", "continuousBatching", "useJobTicket", "useVenv")
"""Keys of model-config.yaml without effect here; the handler sees them."""
OF_SEQUENCES = ("sequenceMaxIdleMSec", "sequenceTimeoutMSec", "maxNumSequence", "maxSequenceJobQueueSize")
"""Keys for stateful models only."""
_BACKOFF_S = (0.0, 1.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0, 55.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Limits of a stateful model's sequences."""

    max_idle_s: float  # a sequence is closed after this time without a request
    timeout_s: float = 0.0  # how long a sequence may last; 0: no bound
    max_sequences: int = 1  # at a time; never fewer than fill the batches of all workers
    queue_size: int = 1  # requests of one sequence that may wait


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerPlan:
    handler: str
    workers: int = 1
    batch_size: int = 1
    max_batch_delay_s: float = 0.1
    response_timeout_s: float = 120.0
    startup_timeout_s: float = 120.0  # 0, from a call alone: no worker is ready in time, as in TorchServe
    max_retry_s: float = 300.0  # how long a dying worker is restarted before it is given up
    client_timeout_s: float = 0.0  # for a whole request; 0: the timeouts of start and response together
    queue_size: int = 100
    envelope: str = ""
    decode: bool = True  # whether the handler gets JSON as values and text as str, not bytes
    gpus: tuple[int, ...] = ()  # worker i gets gpus[i % len(gpus)]; none: the CPU
    sequences: Terms | None = None

    def max_sequences(self, workers: int) -> int:
        """Over all `workers`; 0 if the model is not stateful."""
        return max(self.sequences.max_sequences, self.batch_size * workers) if self.sequences else 0


def draw_up(
    manifest: Manifest, config: Mapping[str, Any], given: Mapping[str, str], gpus: Sequence[int] = ()
) -> HandlerPlan:
    """`given`: the call's parameters; `gpus`: the machine's. Raises ArchiveError."""
    parallel = config.get("parallelType")
    if parallel not in (None, "", "custom") or int(_number(config, "parallelLevel", 1)) > 1:
        raise ArchiveError(
            f"the archive's parallelType {parallel!r} wants several processes for one worker (torchrun); "
            "that is not run here"
        )
    workers = _workers(manifest.model, config, given)
    delay_ms = _count(given, "max_batch_delay", _number(config, "maxBatchDelay", 100))
    return HandlerPlan(
        handler=given.get("handler") or manifest.handler,
        workers=workers,
        batch_size=max(1, int(_count(given, "batch_size", _number(config, "batchSize", 1)))),
        max_batch_delay_s=delay_ms / 1e3,
        response_timeout_s=_count(given, "response_timeout", _number(config, "responseTimeout", 120)) or 120.0,
        startup_timeout_s=_count(given, "startup_timeout", _number(config, "startupTimeout", 120) or 120.0),
        max_retry_s=_number(config, "maxRetryTimeoutInSec", 300),
        client_timeout_s=_number(config, "clientTimeoutInMills", 0) / 1e3,
        queue_size=max(1, int(_number(config, "jobQueueSize", 100))),
        envelope=_envelope(manifest.envelope or config.get("serviceEnvelope") or ""),
        decode=config.get("decodeInputRequest", True) is not False,
        gpus=_gpus(config, gpus),
        sequences=_terms(config),
    )


def _workers(model: str, config: Mapping[str, Any], given: Mapping[str, str]) -> int:
    """The call's number, else `minWorkers`. Raises TooManyWorkers for each number that is above the bound."""
    least = int(_number(config, "minWorkers", _count(given, "default_workers", 0)))
    most = int(_number(config, "maxWorkers", least))
    for key, number in (("minWorkers", least), ("maxWorkers", most)):
        if key in config:
            check_number(model, number, what=f"{key} of its configuration")
    asked = given.get("initial_workers", "")
    workers = int(asked) if asked.isdecimal() and asked.isascii() and len(asked) <= 100 else least
    check_number(model, workers, what="initial_workers" if "initial_workers" in given else "")
    return workers


def find_ignored(config: Mapping[str, Any], plan: HandlerPlan) -> list[str]:
    """The keys of the archive's configuration that are set and have no effect."""
    silent = NOT_RUN if plan.sequences else (*NOT_RUN, *OF_SEQUENCES)
    return [key for key in silent if config.get(key)]


def _terms(config: Mapping[str, Any]) -> Terms | None:
    """TorchServe 0.12 needs `sequenceBatching: true` beside the times, older versions the times alone."""
    max_idle_s = _number(config, "sequenceMaxIdleMSec", 0) / 1e3
    stateful = config.get("sequenceBatching", config.get("stateful", max_idle_s > 0))
    if not isinstance(stateful, bool):
        raise ArchiveError(
            f"'sequenceBatching' of the archive's configuration is to be true or false, not {stateful!r}"
        )
    if not stateful:
        return None
    if not max_idle_s:
        raise ArchiveError(
            "the archive's configuration has sequences without an end: set 'sequenceMaxIdleMSec', the milliseconds "
            "without a request after which one is closed"
        )
    return Terms(
        max_idle_s=max_idle_s,
        timeout_s=_number(config, "sequenceTimeoutMSec", 0) / 1e3,
        max_sequences=max(1, int(_number(config, "maxNumSequence", 1))),
        queue_size=max(1, int(_number(config, "maxSequenceJobQueueSize", 1))),
    )


def _envelope(name: Any) -> str:
    if name not in ("", *NAMES):
        raise ArchiveError(f"the service envelope is {name!r}, expected one of {', '.join(NAMES)}")
    return str(name)


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ArchiveError(f"'{key}' of the archive's configuration is to be a number of 0 or more, it is {value!r}")
    return float(value)


def _count(given: Mapping[str, str], key: str, default: float) -> float:
    text = given.get(key, "")
    return float(text) if text.isdecimal() and len(text) < 10 else default


def _gpus(config: Mapping[str, Any], found: Sequence[int]) -> tuple[int, ...]:
    if config.get("deviceType", "gpu") != "gpu":
        return ()
    chosen = config.get("deviceIds")
    if chosen is None:
        return tuple(found)
    if not isinstance(chosen, list) or not all(isinstance(one, int) and one in found for one in chosen):
        raise ArchiveError(f"'deviceIds' of the archive's configuration is {chosen!r}; this machine has {list(found)}")
    return tuple(chosen)


def backoff_s(deaths: int) -> float:
    """The pause before restarting a worker that died `deaths` times without an answer in between.

    >>> [backoff_s(n) for n in (1, 2, 5, 99)]
    [0.0, 1.0, 3.0, 55.0]
    """
    return _BACKOFF_S[min(deaths, len(_BACKOFF_S)) - 1] if deaths > 0 else 0.0


class Waiting(Protocol):
    since: float
    alone: bool


def gather(queue: Sequence[Waiting], *, now: float, plan: HandlerPlan) -> tuple[int, float | None]:
    """The size of the batch at the head of the queue that an idle worker takes at `now`; if 0, when to look again.

    A full batch runs at once, another when its oldest request has waited `max_batch_delay_s`. A request that is `alone`
    (an explanation) has a batch of its own.
    """
    if not queue:
        return 0, None
    if queue[0].alone:
        return 1, None
    run = 0
    for waiting in queue[: plan.batch_size]:
        if waiting.alone:
            break
        run += 1
    full = run == plan.batch_size or run < len(queue)
    due = queue[0].since + plan.max_batch_delay_s
    return (run, None) if full or now >= due else (0, due)
