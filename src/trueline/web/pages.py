"""An HTML page with its style and headers: a browser runs the page's own script, which asks its own server alone.

Neither text that became markup by mistake nor a page of another origin that frames this one then does anything. Source:
Content Security Policy Level 3.
"""

import base64
import hashlib
import re
from pathlib import Path

from trueline.web.messages import Request

HTML = b"text/html; charset=utf-8"
_STYLE = b"/* style.css */"
"""A page has it where the style that all pages share belongs."""
_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


def read_page(path: Path) -> bytes:
    """The page in the file `path`, with the shared style."""
    return path.read_bytes().replace(_STYLE, Path(__file__).with_name("style.css").read_bytes(), 1)


def page_headers(html: bytes, *, cache: str = "no-cache") -> bytes:
    """Header lines for `html`, whose scripts are inline and allowed by their SHA-256; `cache`: the cache-control."""
    scripts = (base64.b64encode(hashlib.sha256(script).digest()).decode() for script in _SCRIPT.findall(html))
    allowed = " ".join(f"'sha256-{digest}'" for digest in scripts) or "'none'"
    return (
        f"content-security-policy: default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'\r\n"
        f"referrer-policy: no-referrer\r\ncache-control: {cache}\r\nx-content-type-options: nosniff\r\n"
    ).encode()


def asks_for_home(request: Request) -> bool:
    """Whether a browser opens the server's address itself; for other clients `/` is part of a protocol."""
    if request.path != "/" or request.method not in ("GET", "HEAD"):
        return False
    return b"text/html" in request.headers.get(b"accept", b"")
