"""What every request must pass: size, time and shape of what it sends, a key; and what every answer carries."""

import json
import time

import httpx
import pytest
from helpers.web_process import completion, error_of, fake_server, read_all, status_of

KEYS = ("first-key", "second-key")
MAX_BODY = 100_000


@pytest.fixture(scope="module")
def server():
    settings = {"max_body_bytes": MAX_BODY, "client_timeout_s": 2.0, "max_queue": 2}
    with fake_server(settings=settings, step_s=0.005, scheduler={"max_num_seqs": 2}) as server:
        yield server.wait_until_ready()


@pytest.fixture(scope="module")
def guarded():
    settings = {"api_keys": KEYS, "cors_origins": ["https://friend.example"]}
    with fake_server(settings=settings) as server:
        yield server.wait_until_ready()


def post(server, content, **headers):
    headers = {"content-type": "application/json"} | headers
    return httpx.post(f"{server.url}/v1/completions", content=content, headers=headers, timeout=60)


def check_error(response, status, words):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"]
    return error


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_is_too_long_is_refused_and_one_that_just_fits_is_served(server, is_chunked):
    def send(size):
        body = json.dumps(completion()).encode()
        body += b" " * (size - len(body))
        return post(server, iter([body]) if is_chunked else body)

    assert send(MAX_BODY).status_code == 200
    refused = send(MAX_BODY + 1)
    check_error(refused, 413, f"longer than the {MAX_BODY} bytes")
    assert refused.headers["connection"] == "close"


def test_a_client_that_asks_first_is_told_before_it_sends(server):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\nexpect: 100-continue\r\n\r\n"
    begin = time.monotonic()
    answer = read_all(server.raw(head))
    assert status_of(answer) == 413 and error_of(answer)
    assert time.monotonic() - begin < 4  # it did not wait for a body, which would take 5 s


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[" * 200 + b"]" * 200, "nests more than 128"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "nests more than 128"),
        (b'{"prompt": "x", "seed": ' + b"9" * 65 + b"}", "a number of more than 64 characters"),
        (b'{"prompt": "x", "temperature": NaN}', "NaN or Infinity"),
        (b'{"prompt": "x", "temperature": -Infinity}', "NaN or Infinity"),
        (b'{"prompt": "\xff"}', "not UTF-8: byte 12 is 0xff"),
        ('{"prompt": "x"}'.encode("utf-16"), "not UTF-8"),
        (b'{"prompt": "x"', "not valid JSON"),
        (b"", "must be a JSON object"),
        (b"[1, 2]", "must be a JSON object"),
    ],
)
def test_a_body_that_is_no_plain_json_is_refused_by_name(server, body, words):
    check_error(post(server, body), 400, words)


def test_brackets_and_numbers_within_texts_are_only_text(server):
    text = "[" * 500 + "9" * 500 + 'NaN \\" { \\\\'
    answer = post(server, json.dumps(completion(user=text)))
    assert answer.status_code == 200, answer.text


def test_a_lone_surrogate_is_answered(server):
    answer = post(server, b'{"prompt": [1, 2], "max_tokens": 2, "stop": "\\ud800"}')
    assert answer.status_code in (200, 400)


def test_too_many_headers_are_refused(server):
    lines = b"".join(b"x-h%d: 1\r\n" % number for number in range(101))
    answer = read_all(server.raw(b"GET /version HTTP/1.1\r\nhost: x\r\n" + lines + b"\r\n"))
    assert status_of(answer) == 431 and "102 headers, 100 are allowed" in error_of(answer)["message"]


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"], ids=["endless", "whole"])
@pytest.mark.parametrize("where", ["a header", "all headers", "the query"])
def test_headers_that_are_too_long_are_refused(server, where, end):
    long = b"a" * 36_000
    if where == "the query":
        head = b"GET /version?%s HTTP/1.1\r\nhost: x" % long
    else:
        lines = [long] if where == "a header" else [long[:400]] * 90
        head = b"GET /version HTTP/1.1\r\nhost: x" + b"".join(b"\r\nx-%d: %s" % pair for pair in enumerate(lines))
    answer = read_all(server.raw(head + end))
    assert status_of(answer) == 431 and error_of(answer)["message"]


def test_headers_that_just_fit_are_served(server):
    head = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-long: %s\r\n\r\n" % (b"a" * 32_000)
    assert status_of(read_all(server.raw(head))) == 200


@pytest.mark.parametrize(
    "path", ["/", "/health", "/live", "/metrics", "/v1/models", "/version", "/static/none", "/v1/x"]
)
def test_a_head_is_a_get_without_its_body(server, path):
    head, get = (httpx.request(method, server.url + path) for method in ("HEAD", "GET"))
    assert (head.status_code, head.content) == (get.status_code, b"")
    same = ("content-type", "content-security-policy", "x-content-type-options", "etag")
    assert [head.headers.get(name) for name in same] == [get.headers.get(name) for name in same]
    assert get.content


def test_a_head_of_a_stream_ends(server):
    assert httpx.head(f"{server.url}/api/stats?stream=true", timeout=60).status_code == 200
    assert httpx.head(f"{server.url}/v1/completions").status_code == 405


def test_what_is_no_http_is_refused(server):
    answer = read_all(server.raw(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n"))
    assert status_of(answer) == 400 and error_of(answer)["message"]


def test_headers_that_come_slowly_are_not_waited_for(server):
    begin = time.monotonic()
    with server.raw(b"GET /version HTTP/1.1\r\n") as connection:
        connection.settimeout(0.1)
        answer = b""
        while not answer:
            connection.sendall(b"x: y\r\n")  # always something new: what counts is the whole
            try:
                answer = connection.recv(65536)
            except TimeoutError:
                assert time.monotonic() - begin < 30
    assert status_of(answer) == 408 and "did not come within 2 s" in error_of(answer)["message"]


def test_the_headers_of_a_second_request_are_not_waited_for_either(server):
    with server.raw(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n") as connection:
        answer = b""
        while not answer.endswith(b'"}'):
            answer += connection.recv(65536)
        connection.sendall(b"GET /version HTTP/1.1\r\n")
        assert status_of(connection.recv(65536)) == 408


def test_a_connection_that_sends_nothing_is_closed(server):
    assert read_all(server.raw()) == b""


def test_a_body_that_does_not_come_is_not_waited_for(server):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
    answer = read_all(server.raw(head + b'{"prompt":'))
    assert status_of(answer) == 408 and "did not come within 2 s" in error_of(answer)["message"]


def test_a_full_queue_is_said_with_when_to_come_back(server):
    refused = []
    with httpx.Client(base_url=server.url, timeout=60) as client:
        streams = []
        for _ in range(6):
            request = client.build_request("POST", "/v1/completions", json=completion(max_tokens=400, stream=True))
            response = client.send(request, stream=True)
            (streams if response.status_code == 200 else refused).append(response)
        for response in refused:
            response.read()
            error = check_error(response, 503, "the queue is full")
            assert error["code"] == "overloaded" and response.headers["retry-after"] == "1"
        for response in streams:
            response.close()
    assert len(streams) == 4 and len(refused) == 2


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/v1/nothing", "/tokenizer_info"])
@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong", "first-key", "Basic first-key", "Bearer \xff"])
def test_without_a_right_key_there_is_no_work_and_no_word_about_the_model(guarded, path, header):
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    method = "POST" if path == "/v1/completions" else "GET"
    response = httpx.request(method, guarded.url + path, headers=headers)
    error = check_error(response, 401, "API key")
    assert error["code"] == "invalid_api_key" and response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/api/chat"])
def test_every_door_that_works_asks_for_a_key(guarded, path):
    check_error(httpx.post(guarded.url + path, json={}), 401, "no API key")


@pytest.mark.parametrize("key", KEYS)
def test_each_of_the_keys_is_right(guarded, key):
    response = post(guarded, json.dumps(completion()), authorization=f"Bearer {key}")
    assert response.status_code == 200


@pytest.mark.parametrize("path", ["/health", "/live", "/version", "/api/health", "/api/stats"])
def test_health_is_told_without_a_key(guarded, path):
    assert httpx.get(guarded.url + path).status_code == 200


def test_only_pages_of_the_given_origins_may_read_answers(guarded, server):
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for url, origin, is_allowed in (
        (guarded.url, "https://friend.example", True),
        (guarded.url, "https://foe.example", False),
        (server.url, "https://friend.example", False),
    ):
        answers = [
            httpx.options(f"{url}/v1/completions", headers={"origin": origin, **ask}),
            httpx.get(f"{url}/version", headers={"origin": origin}),
            httpx.get(f"{url}/v1/models", headers={"origin": origin}),
        ]
        for answer in answers:
            assert (answer.headers.get("access-control-allow-origin") == origin) is is_allowed


@pytest.mark.parametrize("path", ["/version", "/nothing", "/v1/models"])
def test_each_answer_has_the_requests_id_and_strict_headers(guarded, path):
    answer = httpx.get(guarded.url + path, headers={"x-request-id": "my-id.1"})
    assert answer.headers["x-request-id"] == "my-id.1"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in answer.headers
    assert "server" not in answer.headers


@pytest.mark.parametrize("given", [None, "", "a b", "x" * 129, "\xe9"])
def test_an_id_that_could_harm_a_log_is_replaced(server, given):
    headers = {} if given is None else {"x-request-id": given.encode("latin-1")}
    first, second = (httpx.get(f"{server.url}/version", headers=headers).headers["x-request-id"] for _ in range(2))
    assert first != second and len(first) == 32


def test_a_connection_serves_several_requests(server):
    with server.raw() as connection:
        for _ in range(3):
            connection.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b'"}'):
                answer += connection.recv(65536)
            assert status_of(answer) == 200


def test_refused_requests_are_counted_by_reason(guarded):
    httpx.get(f"{guarded.url}/v1/models")
    post(guarded, b"[" * 200, authorization=f"Bearer {KEYS[0]}")
    text = httpx.get(f"{guarded.url}/metrics").text
    for reason in ("api_key", "body_json"):
        (line,) = (
            line for line in text.splitlines() if "admission_rejections_total{" in line and f'"{reason}"' in line
        )
        assert float(line.rpartition(" ")[2]) >= 1
