"""TorchServe's config.properties as settings of this server. Reads a file, starts nothing.

Of its keys some mean here what they meant there, some are answered by something else, and some have lost their sense
(Netty's threads, Java's arguments). The first are taken, the others named with the reason: nothing is passed over
without a word. An environment variable `TS_<KEY>` goes before the command line, and that before the file, as in
TorchServe; variables are looked at only when the file says `enable_envvars_config=true`. Source: TorchServe 0.12's
ConfigManager, as the contract page has it; Java's Properties.load for the syntax.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from trueline.errors import UsageError, closest
from trueline.serve.handlers.envelopes import NAMES

_LINE = re.compile(r"((?:\\.|[^\\=:\s])*)\s*[=:]?\s*(.*)", re.DOTALL)
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_ELSEWHERE = {
    "allowed_urls": "clients load names of the store, never URLs",
    "use_env_allowed_urls": "clients load names of the store, never URLs",
    "blacklist_env_vars": "handlers never see variables that look like secrets",
    "install_py_dep_per_model": "nothing is installed for an archive; put it into the server's environment",
    "enable_model_api": "models are managed on the management port, by who has its token",
    "model_api_enabled": "models are managed on the management port, by who has its token",
    "prefer_direct_buffer": "there are no buffers of Netty",
    "number_of_netty_threads": "there are no threads of Netty",
    "netty_client_threads": "there are no threads of Netty",
    "vmargs": "there is no JVM",
    "async_logging": "the log never holds up a request",
    "metrics_mode": "/metrics always answers",
    "metrics_config": "every metric of a handler stands on /metrics; none has to be declared",
    "model_metrics_auto_detect": "every metric of a handler stands on /metrics; none has to be declared",
    "disable_system_metrics": "the machine is asked only when /metrics is",
    "ts_open_inference_protocol": "it is always spoken",
    "grpc_inference_max_connection_age_ms": "gRPC connections are not ended by age",
    "grpc_management_max_connection_age_ms": "gRPC connections are not ended by age",
    "grpc_inference_max_connection_age_grace_ms": "gRPC connections are not ended by age",
    "grpc_management_max_connection_age_grace_ms": "gRPC connections are not ended by age",
    "max_response_size": "an answer has the bound of what the server takes, four times over",
    "unregister_model_timeout": "a version leaves when its last request is answered",
    "limit_max_image_pixels": "images are bounded at 89 million pixels",
    "number_of_gpu": "handlers see the machine's GPUs, or those that model-config.yaml names",
    "job_queue_type": "one queue for each model",
    "system_metrics_cmd": "the server asks the machine itself",
    "cpu_launcher_enable": "workers are started plainly; pin the server with taskset or numactl",
    "cpu_launcher_args": "workers are started plainly; pin the server with taskset or numactl",
    "ipex_enable": "handlers import what they need themselves",
    "ipex_gpu_enable": "handlers import what they need themselves",
    "keystore_pass": "it belongs to a Java keystore",
    "keystore_type": "it belongs to a Java keystore",
    "token_expiration_min": "tokens have 256 bits and no end, unless the key file gives them one",
    "header_key_id": "not read",
    "ts_header_key_sequence_id": "sequences are named by the header ts_request_sequence_id",
    "ts_header_key_sequence_start": "sequences begin by the header ts_request_sequence_start",
    "ts_header_key_sequence_end": "sequences are closed by the header ts_request_sequence_end",
}
"""Keys that are known and change nothing, and why."""
_PER_MODEL = {
    "default_workers_per_model": "minWorkers",
    "default_response_timeout": "responseTimeout",
    "default_startup_timeout": "startupTimeout",
    "job_queue_size": "jobQueueSize",
}
"""Keys that every archive without a value of its own has, in model-config.yaml's words."""


@dataclass(slots=True)
class Told:
    """What the file says."""

    options: dict[str, Any] = field(default_factory=dict)
    """Fields of `serve.settings.ServeSettings`."""
    forced: dict[str, Any] = field(default_factory=dict)
    """Of these, what the environment said."""
    ignored: list[tuple[str, str]] = field(default_factory=list)
    """Keys that change nothing, and why."""


def read(path: Path, environ: Mapping[str, str]) -> Told:
    """The file at `path`. Raises UsageError that names the key whose value cannot be."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"cannot read the configuration {path}: {reason}") from error
    given = parse(text)
    told = translate(given, where=str(path))
    if given.get("enable_envvars_config", "false").lower() == "true":
        keys = {name.removeprefix("TS_").lower(): value for name, value in environ.items() if name.startswith("TS_")}
        over = {key: value for key, value in keys.items() if key in _TAKEN or key in _PER_MODEL}
        both = translate(given | over, where=f"{path} and the environment")
        forced = {name: both.options[name] for name in translate(over, where="the environment").options}
        told = Told(options=both.options, forced=forced, ignored=both.ignored)
    return told


def parse(text: str) -> dict[str, str]:
    r"""Keys and values of a properties file.

    >>> parse("# ports\nport=8085\nmodels={\\\n  \"a\": 1}\nkey : value\n")
    {'port': '8085', 'models': '{"a": 1}', 'key': 'value'}
    """
    found: dict[str, str] = {}
    whole = ""
    for line in text.splitlines():
        line = line.lstrip()
        if not whole and (not line or line[0] in "#!"):
            continue
        whole += line
        if (len(whole) - len(whole.rstrip("\\"))) % 2:
            whole = whole[:-1]
            continue
        match = _LINE.fullmatch(whole)
        assert match is not None
        found[_unescaped(match[1])] = _unescaped(match[2]).rstrip()
        whole = ""
    if whole:
        match = _LINE.fullmatch(whole)
        assert match is not None
        found[_unescaped(match[1])] = _unescaped(match[2]).rstrip()
    return found


def _unescaped(text: str) -> str:
    return re.sub(r"\\(u([0-9a-fA-F]{4})|.)", lambda m: chr(int(m[2], 16)) if m[2] else _ESCAPES.get(m[1], m[1]), text)


def translate(given: Mapping[str, str], *, where: str) -> Told:
    """`given` as settings. Raises UsageError."""
    told = Told()
    models: dict[str, dict[str, Any]] = {}
    hosts: dict[str, str] = {}
    for key, value in given.items():
        if key in _TAKEN:
            try:
                found = _TAKEN[key](value)
            except ValueError as error:
                raise UsageError(f"{where}: {key} is '{value[:80]}'; {error}") from error
            host = found.pop("host", None)
            if host is not None:
                hosts[key] = host
            for model, own in found.pop("models", {}).items():
                models.setdefault(model, {}).update(own)
            told.options |= found
        elif key in _PER_MODEL:
            models.setdefault("", {})[_PER_MODEL[key]] = _whole(where, key, value)
        elif key != "enable_envvars_config":
            told.ignored.append((key, _why_not(key)))
    secured = [key for key in hosts if given[key].startswith("https:")]
    if secured and "certificate" not in told.options:
        raise UsageError(
            f"{where}: {secured[0]} is '{given[secured[0]]}', and there is no certificate for it",
            hint="name the PEM file: certificate_file=server.pem",
        )
    if len(set(hosts.values())) > 1:
        told_apart = ", ".join(f"{key}: {host}" for key, host in hosts.items())
        raise UsageError(f"{where}: all ports are of one address here ({told_apart})", hint="name one address in each")
    if hosts:
        told.options["host"] = next(iter(hosts.values()))
    if models:
        told.options["models"] = msgspec.json.encode(models).decode()
    return told


def _why_not(key: str) -> str:
    if key in _ELSEWHERE:
        return _ELSEWHERE[key]
    near = closest(key, [*_TAKEN, *_PER_MODEL, *_ELSEWHERE])
    return f"no key that is known here{f'; did you mean {near}?' if near else ''}"


def _whole(where: str, key: str, value: str) -> int:
    try:
        return _number(value)
    except ValueError as error:
        raise UsageError(f"{where}: {key} is '{value[:80]}'; {error}") from error


def _number(value: str) -> int:
    if not value.isdecimal() or len(value) > 12:
        raise ValueError("expected a whole number of 0 or more")
    return int(value)


def _flag(value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ValueError("expected true or false")
    return value.lower() == "true"


def _address(port: str) -> Callable[[str], dict[str, Any]]:
    def read(value: str) -> dict[str, Any]:
        try:
            found = urlsplit(value)
            number = found.port
        except ValueError as error:
            raise ValueError(f"expected an address as http://127.0.0.1:8080 ({error})") from error
        if found.scheme not in ("http", "https") or not found.hostname:
            raise ValueError("expected an address as http://127.0.0.1:8080")
        usual = 443 if found.scheme == "https" else 80
        return {"host": found.hostname, port: usual if number is None else number}

    return read


def _grpc_address(value: str) -> dict[str, Any]:
    return {"host": value}


def _port(name: str) -> Callable[[str], dict[str, Any]]:
    def read(value: str) -> dict[str, Any]:
        number = _number(value)
        if number > 65535:
            raise ValueError("expected a port of at most 65535")
        return {name: number}

    return read


def _text(name: str) -> Callable[[str], dict[str, Any]]:
    return lambda value: {name: value}


def _load_models(value: str) -> dict[str, Any]:
    return {"load": "" if value.lower() == "none" else value}


def _keystore(value: str) -> dict[str, Any]:
    raise ValueError(
        "a Java keystore is not read: export it (openssl pkcs12 -in store.p12 -out server.pem -nodes) and name it as "
        "certificate_file"
    )


def _no_tokens(value: str) -> dict[str, Any]:
    return {"key_file": None if _flag(value) else "key_file.json"}


def _models(value: str) -> dict[str, Any]:
    """`{"noop": {"1.0": {"marName": "noop.mar", "minWorkers": 1, ...}}}`."""
    try:
        given = msgspec.json.decode(value, type=dict[str, dict[str, dict[str, Any]]])
    except msgspec.DecodeError as error:
        raise ValueError(f"expected JSON by model and version ({error})") from error
    return {"models": {f"{model}/{version}": own for model, all in given.items() for version, own in all.items()}}


def _envelope(value: str) -> dict[str, Any]:
    if value not in NAMES:
        raise ValueError(f"expected one of {', '.join(NAMES)}")
    return {"models": {"": {"serviceEnvelope": value}}}


def _snapshot(value: str) -> dict[str, Any]:
    """`{"name": ..., "modelCount": 1, "models": {...}}`: what was served when TorchServe stopped."""
    try:
        given = msgspec.json.decode(value, type=dict[str, Any])
        found = _models(msgspec.json.encode(given.get("models", {})).decode())
    except msgspec.DecodeError as error:
        raise ValueError(f"expected JSON with the models ({error})") from error
    archives = [str(own["marName"]) for own in found["models"].values() if own.get("marName")]
    return found | {"load": ",".join(dict.fromkeys(archives))}


_TAKEN: dict[str, Callable[[str], dict[str, Any]]] = {
    "inference_address": _address("port"),
    "management_address": _address("management_port"),
    "metrics_address": _address("metrics_port"),
    "grpc_inference_address": _grpc_address,
    "grpc_management_address": _grpc_address,
    "grpc_inference_port": _port("grpc_port"),
    "grpc_management_port": _port("grpc_management_port"),
    "load_models": _load_models,
    "model_store": _text("model_store"),
    "workflow_store": _text("workflow_store"),
    "models": _models,
    "service_envelope": _envelope,
    "cors_allowed_origin": _text("cors_origin"),
    "cors_allowed_methods": _text("cors_methods"),
    "cors_allowed_headers": _text("cors_headers"),
    "decode_input_request": lambda value: {"models": {"": {"decodeInputRequest": _flag(value)}}},
    "model_snapshot": _snapshot,
    "max_request_size": lambda value: {"max_body_bytes": _number(value)},
    "disable_token_authorization": _no_tokens,
    "keystore": _keystore,
    "certificate_file": _text("certificate"),
    "private_key_file": _text("private_key"),
}
"""Keys that mean here what they mean there."""
