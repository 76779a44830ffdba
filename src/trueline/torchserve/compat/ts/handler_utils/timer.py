"""Measures the steps of a handler."""

import functools
import time
from collections.abc import Callable
from typing import Any


def timed(func: Callable[..., Any]) -> Callable[..., Any]:
    """Reports `ts_handler_NAME` in ms if model-config.yaml has `handler: {profile: true}`."""

    @functools.wraps(func)
    def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = getattr(self, "context", None)
        config = getattr(context, "model_yaml_config", {}).get("handler")
        if context is None or not isinstance(config, dict) or not config.get("profile"):
            return func(self, *args, **kwargs)
        began = time.perf_counter()
        result = func(self, *args, **kwargs)
        context.metrics.add_time(f"ts_handler_{func.__name__}", (time.perf_counter() - began) * 1e3)
        return result

    return measured
