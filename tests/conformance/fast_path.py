"""What every fast path promises. Import the tests; define the fixture `case`."""

from collections.abc import Callable
from dataclasses import dataclass

from trueline.serve.fastpath.fast_path import FastPath
from trueline.web.messages import Request, Response


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fast path whose server has answered requests of some forms, and what those are."""

    fast_path: FastPath
    answer_uncached: Callable[[Request], Response]
    repeated: Callable[[], list[Request]]
    """Requests of those forms, made again at each call, some with other tensor values."""
    foreign: Callable[[], list[Request]]
    """Requests that only the uncached path can answer."""
    change_models: Callable[[], object]
    """Such requests lead to another version from then on."""


def parts(response):
    return response.status, response.body, response.content_type, response.headers


def test_an_answer_equals_the_uncached_one_byte_for_byte(case):
    for request in case.repeated():
        answer = case.fast_path.try_answer(request)
        assert isinstance(answer, Response), request.body
        assert parts(answer) == parts(case.answer_uncached(request)), request.body


def test_what_it_cannot_answer_it_leaves_to_the_uncached_path(case):
    for request in case.foreign():
        assert case.fast_path.try_answer(request) is None, request.body


def test_a_request_is_as_it_was_after_it_was_tried(case):
    for request in [*case.repeated(), *case.foreign()]:
        before = (request.method, request.target, dict(request.headers), bytes(request.body))
        case.fast_path.try_answer(request)
        assert (request.method, request.target, dict(request.headers), bytes(request.body)) == before


def test_it_forgets_its_answers_when_the_models_change(case):
    before = [parts(case.answer_uncached(request)) for request in case.repeated()]
    case.change_models()
    for request in case.repeated():
        assert case.fast_path.try_answer(request) is None, request.body
    for request, old in zip(case.repeated(), before, strict=True):
        assert parts(case.answer_uncached(request)) != old, "change_models has changed nothing"
