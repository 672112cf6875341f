"""For tests of the chat page: a server whose tiny model reads out a script, and what a person does on the page."""

import contextlib
import json
import re
import threading

SCRIPT = 'Some **bold** words, <img src=x onerror="document.title=1"> and\n\n```py\nx = 1\n```\n\n光 is light.'
PIECES = re.findall(r"\s*\S+", SCRIPT)

READY = "document.querySelector('#model-state').dataset.phase === 'ready'"
IS_DONE = "document.querySelector('.message:last-child .stats') && !document.querySelector('.is-running')"
HAS_ENDED = "document.querySelector('.message:last-child .message-foot .message-actions')"
MAX_WAIT_S = 60  # so that a test that failed can end


class Pace:
    """Lets an engine step freely, or a number of times."""

    def __init__(self, client):
        self._step = client.step
        self._left = None  # no limit
        self._changed = threading.Condition()
        client.step = self._paced

    def _paced(self):
        with self._changed:
            self._changed.wait_for(lambda: self._left is None or self._left > 0, timeout=MAX_WAIT_S)
            if self._left is not None:
                self._left -= 1
        self._step()

    def hold(self, after):
        """From now on lets `after` more steps go on."""
        with self._changed:
            self._left = after
            self._changed.notify_all()

    def free(self):
        with self._changed:
            self._left = None
            self._changed.notify_all()


@contextlib.contextmanager
def serving_page(**settings):
    """Serves the script; yields the server, and its pace."""
    from helpers.web_server import script_llm, serving  # not above: they import JAX, and conftest.py imports this file

    llm = script_llm(PIECES)
    pace = Pace(llm.client)
    with serving(llm, **settings) as served:
        try:
            yield served, pace
        finally:
            pace.free()


def send(page, text):
    page.click("#message-input")
    page.type(text)
    page.press("Enter")


def ask(page, text):
    """Sends a message and waits for the whole answer."""
    send(page, text)
    page.wait(IS_DONE)


def stored(page):
    """Returns the one conversation that the browser keeps."""
    (key,) = page.run("Object.keys(localStorage).filter((key) => key.startsWith('photon.chat.'))")
    return json.loads(page.run(f"localStorage.getItem('{key}')"))


def chats(page):
    """Returns the chats that were asked for, as they were sent."""
    return [body for body in page.bodies if "messages" in body]
