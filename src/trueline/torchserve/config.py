"""Translates TorchServe's config.properties to settings of the server.

A key is either used or reported with the reason why it has no effect (Netty's threads, Java's arguments). An
environment variable `TS_<KEY>` overrides the command line, which overrides the file, as in TorchServe; variables count
only if the file has `enable_envvars_config=true`. Source: TorchServe 0.12's ConfigManager, as the contract page has it;
Java's Properties.load for the syntax.
"""

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
_UNUSED_FOR = {
    "set TS_ALLOWED_URLS with enable_envvars_config=true": "use_env_allowed_urls",
    "handlers never see variables that look like secrets": "blacklist_env_vars",
    "nothing is installed for an archive; put it into the server's environment": "install_py_dep_per_model",
    "models are managed on the management port, with its token": "enable_model_api model_api_enabled",
    "there are no buffers of Netty": "prefer_direct_buffer",
    "there are no threads of Netty": "number_of_netty_threads netty_client_threads",
    "there is no JVM": "vmargs",
    "the log never delays a request": "async_logging",
    "/metrics always answers": "metrics_mode",
    "every metric of a handler is on /metrics; none has to be declared": "metrics_config model_metrics_auto_detect",
    "the machine's metrics are read only for /metrics": "disable_system_metrics",
    "it is always on": "ts_open_inference_protocol",
    "gRPC connections are not ended by age": "grpc_inference_max_connection_age_ms "
    "grpc_management_max_connection_age_ms grpc_inference_max_connection_age_grace_ms "
    "grpc_management_max_connection_age_grace_ms",
    "a response may be four times as large as the largest request": "max_response_size",
    "a version leaves when its last request is answered": "unregister_model_timeout",
    "images are bounded at 89 million pixels": "limit_max_image_pixels",
    "handlers see the machine's GPUs, or those that model-config.yaml names": "number_of_gpu",
    "one queue for each model": "job_queue_type",
    "the server reads the machine's metrics itself": "system_metrics_cmd",
    "workers are started plainly; pin the server with taskset or numactl": "cpu_launcher_enable cpu_launcher_args",
    "handlers import what they need themselves": "ipex_enable ipex_gpu_enable",
    "it belongs to a Java keystore": "keystore_pass keystore_type",
    "tokens have 256 bits and no end, unless the key file gives them one": "token_expiration_min",
    "not read": "header_key_id",
    "sequences are named by the header ts_request_sequence_id": "ts_header_key_sequence_id",
    "sequences begin by the header ts_request_sequence_start": "ts_header_key_sequence_start",
    "sequences are closed by the header ts_request_sequence_end": "ts_header_key_sequence_end",
}
_UNUSED = {key: why for why, keys in _UNUSED_FOR.items() for key in keys.split()}
"""Known keys without effect, and why."""


@dataclass(slots=True)
class TorchServeConfig:
    """The content of a config.properties."""

    options: dict[str, Any] = field(default_factory=dict)
    """Fields of `serve.settings.ServeSettings`."""
    forced: dict[str, Any] = field(default_factory=dict)
    """Of these, the ones from the environment."""
    ignored: list[tuple[str, str]] = field(default_factory=list)
    """Keys without effect, and why."""


def read(path: Path, environ: Mapping[str, str]) -> TorchServeConfig:
    """The file at `path`. Raises UsageError that names the key of a wrong value."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"cannot read the configuration {path}: {reason}") from error
    given = parse(text)
    if given.get("enable_envvars_config", "false").lower() != "true":
        return translate(given, where=str(path))
    keys = {name.removeprefix("TS_").lower(): value for name, value in environ.items() if name.startswith("TS_")}
    over = {key: value for key, value in keys.items() if key in _TRANSLATED}
    config = translate(given | over, where=f"{path} and the environment")
    config.forced = {name: config.options[name] for name in translate(over, where="the environment").options}
    return config


def parse(text: str) -> dict[str, str]:
    r"""Keys and values of a properties file.

    >>> parse("# ports\nport=8085\nmodels={\\\n  \"a\": 1}\nkey : value\n")
    {'port': '8085', 'models': '{"a": 1}', 'key': 'value'}
    """
    found: dict[str, str] = {}
    whole = ""
    for line in (*text.splitlines(), ""):
        if not whole and line.lstrip()[:1] in ("", "#", "!"):
            continue
        whole += line.lstrip()
        if (len(whole) - len(whole.rstrip("\\"))) % 2:  # an odd number of backslashes continues the line
            whole = whole[:-1]
            continue
        match = _LINE.fullmatch(whole)
        assert match is not None
        found[_unescape(match[1])] = _unescape(match[2]).rstrip()
        whole = ""
    return found


def _unescape(text: str) -> str:
    return re.sub(r"\\(u([0-9a-fA-F]{4})|.)", lambda m: chr(int(m[2], 16)) if m[2] else _ESCAPES.get(m[1], m[1]), text)


def translate(given: Mapping[str, str], *, where: str) -> TorchServeConfig:
    """`given` as settings. Raises UsageError."""
    config = TorchServeConfig()
    models: dict[str, dict[str, Any]] = {}
    hosts: dict[str, str] = {}
    for key, value in given.items():
        if key == "enable_envvars_config":
            continue
        if key not in _TRANSLATED:
            near = closest(key, [*_TRANSLATED, *_UNUSED])
            unknown = f"no key that is known here{f'; did you mean {near}?' if near else ''}"
            config.ignored.append((key, _UNUSED.get(key, unknown)))
            continue
        try:
            found = _TRANSLATED[key](value)
        except ValueError as error:
            raise UsageError(f"{where}: {key} is '{value[:80]}'; {error}") from error
        if "host" in found:
            hosts[key] = found.pop("host")
        for model, own in found.pop("models", {}).items():
            models.setdefault(model, {}).update(own)
        config.options |= found
    secured = [key for key in hosts if given[key].startswith("https:")]
    if secured and "certificate" not in config.options:
        raise UsageError(
            f"{where}: {secured[0]} is '{given[secured[0]]}', and there is no certificate for it",
            hint="name the PEM file: certificate_file=server.pem",
        )
    if len(set(hosts.values())) > 1:
        addresses = ", ".join(f"{key}: {host}" for key, host in hosts.items())
        raise UsageError(f"{where}: all ports are of one address here ({addresses})", hint="name one address in each")
    if hosts:
        config.options["host"] = next(iter(hosts.values()))
    if models:
        config.options["models"] = msgspec.json.encode(models).decode()
    return config


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
            found, number = urlsplit(value), urlsplit(value).port
        except ValueError as error:
            raise ValueError(f"expected an address as http://127.0.0.1:8080 ({error})") from error
        if found.scheme not in ("http", "https") or not found.hostname:
            raise ValueError("expected an address as http://127.0.0.1:8080")
        usual = 443 if found.scheme == "https" else 80
        return {"host": found.hostname, port: usual if number is None else number}

    return read


def _port(value: str) -> int:
    if _number(value) > 65535:
        raise ValueError("expected a port of at most 65535")
    return _number(value)


def _set(name: str, parse: Callable[[str], Any] = str) -> Callable[[str], dict[str, Any]]:
    return lambda value: {name: parse(value)}


def _for_all(name: str, parse: Callable[[str], Any]) -> Callable[[str], dict[str, Any]]:
    """A default of all archives, by its name in model-config.yaml."""
    return lambda value: {"models": {"": {name: parse(value)}}}


def _keystore(value: str) -> dict[str, Any]:
    raise ValueError(
        "a Java keystore is not read: export it (openssl pkcs12 -in store.p12 -out server.pem -nodes) and name it as "
        "certificate_file"
    )


def _models(value: str) -> dict[str, Any]:
    """`{"noop": {"1.0": {"marName": "noop.mar", "minWorkers": 1, ...}}}`."""
    try:
        given = msgspec.json.decode(value, type=dict[str, dict[str, dict[str, Any]]])
    except msgspec.DecodeError as error:
        raise ValueError(f"expected JSON by model and version ({error})") from error
    return {"models": {f"{model}/{version}": own for model, all in given.items() for version, own in all.items()}}


def _envelope(value: str) -> str:
    if value not in NAMES:
        raise ValueError(f"expected one of {', '.join(NAMES)}")
    return value


def _snapshot(value: str) -> dict[str, Any]:
    """`{"name": ..., "modelCount": 1, "models": {...}}`: the models when TorchServe stopped."""
    try:
        given = msgspec.json.decode(value, type=dict[str, Any])
        found = _models(msgspec.json.encode(given.get("models", {})).decode())
    except msgspec.DecodeError as error:
        raise ValueError(f"expected JSON with the models ({error})") from error
    archives = [str(own["marName"]) for own in found["models"].values() if own.get("marName")]
    return found | {"load": ",".join(dict.fromkeys(archives))}


_TRANSLATED: dict[str, Callable[[str], dict[str, Any]]] = {
    "inference_address": _address("port"),
    "management_address": _address("management_port"),
    "metrics_address": _address("metrics_port"),
    "grpc_inference_address": _set("host"),
    "grpc_management_address": _set("host"),
    "grpc_inference_port": _set("grpc_port", _port),
    "grpc_management_port": _set("grpc_management_port", _port),
    "load_models": _set("load", lambda value: "" if value.lower() == "none" else value),
    "model_store": _set("model_store"),
    "workflow_store": _set("workflow_store"),
    "allowed_urls": _set("allowed_urls"),
    "models": _models,
    "service_envelope": _for_all("serviceEnvelope", _envelope),
    "decode_input_request": _for_all("decodeInputRequest", _flag),
    "default_workers_per_model": _for_all("minWorkers", _number),
    "default_response_timeout": _for_all("responseTimeout", _number),
    "default_startup_timeout": _for_all("startupTimeout", _number),
    "job_queue_size": _for_all("jobQueueSize", _number),
    "cors_allowed_origin": _set("cors_origin"),
    "cors_allowed_methods": _set("cors_methods"),
    "cors_allowed_headers": _set("cors_headers"),
    "model_snapshot": _snapshot,
    "max_request_size": _set("max_body_bytes", _number),
    "disable_token_authorization": _set("key_file", lambda value: None if _flag(value) else "key_file.json"),
    "keystore": _keystore,
    "certificate_file": _set("certificate"),
    "private_key_file": _set("private_key"),
}
"""Keys that have an effect."""
