"""What a test asks one of its own servers: one request on a connection of its own, patiently.

httpx makes a client for each, and each client would read all authorities of the web: more work than the request.
"""

from __future__ import annotations

import ssl
from functools import partial

import httpx

_OWN = {"verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), "timeout": 250.0}
"""It trusts nobody: the servers speak plain HTTP. Nothing ends by waiting; a machine may be slow."""

request = partial(httpx.request, **_OWN)
get, post, put = (partial(one, **_OWN) for one in (httpx.get, httpx.post, httpx.put))
delete, options = (partial(one, **_OWN) for one in (httpx.delete, httpx.options))
