"""What every route table promises. Import the tests; define the fixtures `table`, `own_paths` and `foreign_paths`."""

import asyncio
import inspect

import pytest

from trueline.errors import RequestError
from trueline.web.messages import Request, Response


def parts(path):
    return path.split("/")[1:]


def test_each_of_its_paths_has_a_handler(table, own_paths):
    for path in own_paths:
        assert callable(table.match(parts(path))), path


def test_a_path_that_is_not_its_own_is_left_to_the_next_table(table, foreign_paths):
    for path in foreign_paths:
        assert table.match(parts(path)) is None, path


def test_matching_asks_nobody_and_so_never_fails(table):
    strange = ["", "/", "//", "/%00", "/v2/models//infer", "/predictions/", "/" + "a/" * 500, "/models/é"]
    for path in strange:
        found = table.match(parts(path))
        assert found is None or callable(found), path
        assert not inspect.isawaitable(found)


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"])
def test_a_handler_answers_now_or_later_or_refuses_in_words(table, own_paths, method):
    for path in own_paths:
        found = answer_of(table.match(parts(path)), Request(method, path.encode(), {}, b"{}"))
        if isinstance(found, RequestError):
            assert 400 <= found.status < 600, (path, found)
            assert found.message, path
            continue
        assert isinstance(found, Response | asyncio.Future), path
        if isinstance(found, asyncio.Future):
            found.cancel()


def answer_of(handler, request):
    try:
        return handler(request)
    except RequestError as error:
        return error
