"""The files of the chat page as the server gives them."""

import re

import pytest
from fastapi.testclient import TestClient

from photon_jax.errors import ConfigError
from photon_jax.server.app import create_app
from photon_jax.server.limits import protect
from photon_jax.server.pages import read_files
from photon_jax.server.state import ServerSettings, ServerState


@pytest.fixture(scope="module")
def client():
    state = ServerState(model_name="org/tiny")  # nothing is loaded
    return TestClient(protect(create_app(state), state))


def test_the_page_answers_while_the_model_loads(client):
    answer = client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "<main>" in answer.text


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("app.js", "text/javascript; charset=utf-8"),
        ("base.css", "text/css; charset=utf-8"),
        ("icons.svg", "image/svg+xml"),
        ("vendor/marked.esm.js", "text/javascript; charset=utf-8"),
        ("vendor/purify.LICENSE.txt", "text/plain; charset=utf-8"),
    ],
)
def test_each_kind_of_file_has_its_content_type(client, path, kind):
    answer = client.get(f"/static/{path}")
    assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_policy_lets_nothing_in_from_elsewhere_and_runs_nothing_inline(client):
    for path in ("/", "/static/app.js"):
        policy = dict(part.split(" ", 1) for part in client.get(path).headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'self'"
        assert policy["trusted-types"] == "dompurify" and policy["require-trusted-types-for"] == "'script'"
        assert policy["object-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
        assert "unsafe" not in str(policy) and "http" not in str(policy)


def test_a_browser_that_has_a_file_is_told_so(client):
    first = client.get("/static/app.js")
    assert first.headers["cache-control"] == "no-cache"
    again = client.get("/static/app.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = client.get("/static/app.js", headers={"If-None-Match": '"another"'})
    assert other.content == first.content


@pytest.mark.parametrize("path", ["none.js", "../pages.py", "%2e%2e/pages.py", "vendor", "", "..%2f..%2ferrors.py"])
def test_what_is_not_a_file_of_the_page_is_not_found(client, path):
    answer = client.get(f"/static/{path}")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"]


def test_another_folder_takes_the_place_of_the_page(tmp_path):
    (tmp_path / "img").mkdir()
    for name, content in (
        ("index.html", b"<p>mine"),
        ("img/a.png", b"\x89PNG"),
        (".env", b"secret"),
        ("a.py", b"secret"),
    ):
        (tmp_path / name).write_bytes(content)
    state = ServerState(model_name="org/tiny", settings=ServerSettings(static_dir=str(tmp_path)))
    client = TestClient(create_app(state))
    assert client.get("/").text == "<p>mine"
    image = client.get("/static/img/a.png")
    assert (image.content, image.headers["content-type"]) == (b"\x89PNG", "image/png")
    assert [client.get(f"/static/{name}").status_code for name in (".env", "a.py", "app.js")] == [404] * 3


def test_a_folder_without_a_page_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=f"static_dir '{tmp_path}' holds no index"):
        read_files(str(tmp_path))


def test_files_name_no_other_origin_and_hold_nothing_inline():
    for name, file in read_files().items():
        if name.startswith("vendor/"):
            continue
        text = file.content.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text and "https:" not in text and "url(" not in text, name
        assert "innerHTML" not in text and "eval(" not in text, name
    page = read_files()["index.html"].content.decode()
    assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]*src=)", page)


def test_every_text_of_the_page_exists_in_both_languages():
    files = {name: file.content.decode() for name, file in read_files().items() if not name.startswith("vendor/")}
    english, chinese = files.pop("words.js").split("\n  zh: {\n")
    keys, same_keys = (re.findall(r'^    "([\w.]+)":', part, re.MULTILINE) for part in (english, chinese))
    assert keys == same_keys and len(set(keys)) == len(keys)
    for key, other in zip(*(re.findall(r'": "(.*)",', part) for part in (english, chinese)), strict=True):
        assert set(re.findall(r"{\w+}", key)) == set(re.findall(r"{\w+}", other))
    text = "".join(files.values())
    used = set(re.findall(r"""(?:\bt\(|data-t(?:-label|-placeholder)?=)"([\w.]+)\"""", text))
    assert used <= set(keys)
    in_parts = ("error.", "state.", "notice.", "settings.")  # some of these are put together
    assert not {key for key in keys if f'"{key}"' not in text and not key.startswith(in_parts)}


def test_files_stay_small_enough_to_read():
    long = {name: file.content.count(b"\n") for name, file in read_files().items() if not name.startswith("vendor/")}
    assert not {name: lines for name, lines in long.items() if lines > 400}
