"""A web server as a process of its own, its log, and plain sockets to it."""

import contextlib
import json
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

import photon_jax

PATHS = (Path(__file__).parents[1], Path(photon_jax.__file__).parents[1])  # of helpers, and of the package under test
PATIENCE_S = 120  # machines that run tests may be slow


class WebProcess:
    """A server process whose standard error is read.

    Attributes:
      url: where it listens.
      log: its lines so far.
    """

    def __init__(self, command):
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS))},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log = []
        self._lines = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        try:
            match = re.search(r"https?://\S+?:(\d+)", self.wait_for("listening on"))
        except BaseException:
            self.close()
            raise
        self.url, self.port = match[0], int(match[1])

    def _read(self):
        with self.process.stderr:
            for line in self.process.stderr:
                self.log.append(line.rstrip("\n"))
                self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, text):
        """Returns the next line that holds `text`."""
        while (line := self._lines.get(timeout=PATIENCE_S)) is not None:
            if text in line:
                return line
        raise AssertionError(f"no {text!r} in {self.log}")

    def wait_until_ready(self):
        """Returns itself once it serves."""
        deadline = time.monotonic() + PATIENCE_S
        while httpx.get(f"{self.url}/health").status_code != 200:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)
        return self

    def exit_code(self):
        """Waits for its end."""
        return self.process.wait(timeout=PATIENCE_S)

    def raw(self, data=b""):
        """Returns a connection on which `data` was sent."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
        connection.sendall(data)
        return connection

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()


@contextlib.contextmanager
def fake_server(**options):
    """Runs fake_server.py."""
    with contextlib.closing(WebProcess(["helpers.fake_server", json.dumps(options)])) as server:
        yield server


@contextlib.contextmanager
def web_server(model, *flags):
    """Runs photon-web-server."""
    command = ["photon_jax.cli.web_server", f"--model={model}", "--port=0", *flags]
    with contextlib.closing(WebProcess(command)) as server:
        yield server


def completion(prompt=(1, 2, 3), **fields):
    """Returns the body of a completion of token ids."""
    return {"prompt": list(prompt), "max_tokens": 8, "temperature": 0, **fields}


def read_all(connection):
    """Returns what comes until the server closes."""
    with connection:
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
        return b"".join(parts)


def status_of(answer):
    """Returns the status of a raw answer."""
    return int(answer.split(b" ", 2)[1])


def error_of(answer):
    """Returns the error that a raw answer holds, in OpenAI's form."""
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def events_of(lines):
    """Returns the JSON values of a stream's events, and whether [DONE] was the last."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    is_done = bool(data) and data[-1] == "[DONE]"
    return [json.loads(item) for item in data if item != "[DONE]"], is_done
