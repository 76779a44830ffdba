"""No web page reaches a port of a server without tokens, neither by its own name nor by one that leads to loopback."""

import pytest

from worlds import servers
from worlds.attacks import Target

pytestmark = pytest.mark.slow


def urls_of(target: Target) -> dict[str, str]:
    running = target.server
    return {"data": running.url, "management": running.management_url, "metrics": running.metrics_url}


@pytest.mark.parametrize(
    "headers",
    [{"host": "rebound.evil.test"}, {"origin": "http://evil.test"}, {"origin": "null"},
     {"sec-fetch-site": "cross-site"}, {"origin": "http://evil.test", "content-type": "text/plain"}],
    ids=str,
)  # fmt: skip
def test_no_port_answers_a_foreign_page(target, headers):
    for port, url in urls_of(target).items():
        for method, path in (
            ("GET", "/metrics"), ("GET", "/ping"), ("GET", "/try"), ("GET", "/dashboard"), ("GET", "/openapi.json"),
            ("POST", "/models?url=x.mar"), ("POST", "/v2/repository/models/tiny/unload"), ("DELETE", "/models/tiny"),
            ("PUT", "/models/tiny?min_worker=0"), ("OPTIONS", "/models"), ("POST", "/v2/models/tiny/infer"),
        ):  # fmt: skip
            answer = servers.request(method, url + path, headers=headers)
            assert answer.status_code == 403, (port, method, path)
    assert servers.get(f"{target.server.url}/v2/models/tiny/ready").is_success


def test_a_page_of_the_server_itself_and_a_followed_link_are_answered(target):
    for port, path in (("data", "/try"), ("management", "/models"), ("metrics", "/metrics")):
        url = urls_of(target)[port]
        assert servers.get(url + path, headers={"origin": url, "sec-fetch-site": "same-origin"}).is_success
        link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
        assert servers.get(url + path, headers=link).is_success


def test_with_tokens_a_page_has_to_have_one(guarded):
    url = guarded.server.management_url
    assert servers.post(f"{url}/models?url=x", headers={"origin": "http://evil.test"}).status_code == 401
