"""`context`: a handler's second argument."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any


class RequestProcessor:
    """Headers of one request, status and headers of its response."""

    def __init__(self, request_header: Mapping[str, Any]) -> None:
        self._request_header = dict(request_header)
        self._status_code = 200
        self._reason_phrase: str | None = None
        self._response_header: dict[str, str] = {}

    def get_request_property(self, key: str) -> Any:
        """A header, whatever its case; None if it is missing."""
        found = self._request_header.get(key)
        return self._request_header.get(key.lower()) if found is None else found

    def get_request_properties(self) -> dict[str, Any]:
        return self._request_header

    def report_status(self, code: int, reason_phrase: str | None = None) -> None:
        self._status_code = code
        self._reason_phrase = reason_phrase

    def get_response_status_code(self) -> int:
        return self._status_code

    def get_response_status_phrase(self) -> str | None:
        return self._reason_phrase

    def add_response_property(self, key: str, value: str) -> None:
        self._response_header[key] = value

    def get_response_headers(self) -> dict[str, str]:
        return self._response_header

    def get_response_header(self, key: str) -> str | None:
        return self._response_header.get(key)


@dataclass(eq=False)
class Context:
    """Facts of the model and the worker, and the headers of the batch."""

    model_name: str
    model_dir: InitVar[str]
    manifest: dict[str, Any]
    batch_size: InitVar[int]
    gpu: InitVar[int | None]
    mms_version: InitVar[str]
    limit_max_image_pixels: InitVar[bool] = True
    metrics: Any = None
    model_yaml_config: dict[str, Any] | None = None
    header_key_sequence_id = "ts_request_sequence_id"
    header_key_sequence_start = "ts_request_sequence_start"
    header_key_sequence_end = "ts_request_sequence_end"

    def __post_init__(self, model_dir: str, batch_size: int, gpu: int | None, version: str, limit: bool) -> None:
        self.model_yaml_config = self.model_yaml_config or {}
        self.request_ids: dict[int, str] | None = None
        self.request_processor: list[RequestProcessor] = []
        self.cache: dict[Any, Any] = {}
        """The handler's own, as long as its process lives."""
        self.stopping_criteria: Any = None
        """By index: called with an answer, False means another call for more of it, True and None the end."""
        self.send_piece: Callable[[Sequence[Any], Mapping[int, str], int], None] | None = None
        """Sends a piece of an answer before the whole: set by the worker."""
        self.system_properties: dict[str, Any] = {
            "model_dir": model_dir, "gpu_id": gpu, "batch_size": batch_size, "server_name": "MMS",
            "server_version": version, "limit_max_image_pixels": limit,
        }  # fmt: skip
        self._system_properties = self.system_properties  # TorchServe's name of them, which some handlers read

    def get_request_id(self, idx: int = 0) -> str | None:
        return None if self.request_ids is None else self.request_ids.get(idx)

    def get_sequence_id(self, idx: int) -> Any:
        """The sequence of request `idx` of the batch, of a stateful model."""
        return self.get_request_header(idx, self.header_key_sequence_id)

    def get_request_header(self, idx: int, key: str) -> Any:
        return self.request_processor[idx].get_request_property(key)

    def get_all_request_header(self, idx: int) -> dict[str, Any]:
        return self.request_processor[idx].get_request_properties()

    def set_response_content_type(self, idx: int, value: str) -> None:
        self.set_response_header(idx, "content-type", value)

    def get_response_content_type(self, idx: int) -> str | None:
        return self.get_response_headers(idx).get("content-type")

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        if self.request_processor:
            self.request_processor[idx].report_status(code, reason_phrase=phrase)

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        for one in self.request_processor:
            one.report_status(code, reason_phrase=phrase)

    def get_response_status(self, idx: int) -> tuple[int, str | None]:
        one = self.request_processor[idx]
        return one.get_response_status_code(), one.get_response_status_phrase()

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        self.request_processor[idx].add_response_property(key, value)

    def get_response_headers(self, idx: int) -> dict[str, str]:
        return self.request_processor[idx].get_response_headers()
