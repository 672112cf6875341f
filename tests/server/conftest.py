"""Servers that the tests of a module share."""

import pytest
from helpers.browser import chromium
from helpers.chat_page import READY, serving_page


@pytest.fixture(scope="module")
def served():
    from helpers.web_server import serving, tiny_llm  # not above: JAX must not be imported before the test settings

    with serving(tiny_llm()) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    with served.client() as client:
        yield client


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture(scope="module")
def paced_server():
    with serving_page() as served_and_pace:
        yield served_and_pace


@pytest.fixture
def chat_server(paced_server):
    served, pace = paced_server
    yield served
    pace.free()
    served.state.phase = "ready"


@pytest.fixture
def pace(paced_server):
    return paced_server[1]


@pytest.fixture
def page(browser, chat_server):
    """The chat page; nothing may go wrong on it, and nothing leave the origin."""
    with browser.page(chat_server.url) as page:
        page.wait(READY)
        yield page
    assert not page.errors
    assert not page.failures
    assert not [url for url in page.requests if not url.startswith((chat_server.url, "data:", "blob:"))]


@pytest.fixture
def failing_page(browser, chat_server):
    """The chat page for tests in which requests fail."""
    with browser.page(chat_server.url) as page:
        page.wait(READY)
        yield page
    assert not page.errors
