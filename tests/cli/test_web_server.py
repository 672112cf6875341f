"""photon-web-server: what its flags mean, and the whole way from a checkpoint to an answer."""

import contextlib
import os
import signal
import ssl
import subprocess

import httpx
import pytest
from absl import flags
from helpers.tiny_checkpoint import ENGINE_FIELDS, write_checkpoint
from helpers.web_process import web_server

from photon_jax.cli import web_server as command
from photon_jax.cli.flags import engine_config_from_flags
from photon_jax.errors import ConfigError
from photon_jax.server.state import ServerSettings


def parse(*arguments):
    flag_values = flags.FlagValues()
    command.define_flags(flag_values)
    flag_values(["prog", *arguments])
    return flag_values


def settings(*arguments):
    return command.settings_from_flags(parse(*arguments))


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch):
    monkeypatch.delenv("PHOTON_API_KEY", raising=False)


def test_no_flags_are_the_default_settings_on_the_loopback_address():
    assert settings() == ServerSettings()
    assert settings().host == "127.0.0.1" and settings().port == 5728


def test_repeated_flags_are_lists_also_under_their_short_names(monkeypatch):
    assert settings("--api_key=a", "--api_key=b,c").api_keys == ("a", "b,c")
    assert settings("--cors_origin=https://a", "--cors_origins=https://b").cors_origins == ("https://a", "https://b")
    monkeypatch.setenv("PHOTON_API_KEY", "secret")
    assert settings("--api_key=a").api_keys == ("a", "secret")
    assert settings().api_keys == ("secret",)


def test_every_setting_has_its_flag():
    given = settings(
        *("--host=::1", "--port=80", "--max_body_bytes=9", "--max_queue=7", "--drain_s=1.5", "--keep_alive_s=0"),
        *("--client_timeout_s=2", "--metrics_prefix=vllm:", "--tls_cert=c", "--tls_key=k", "--static_dir=d"),
    )
    assert given == ServerSettings(
        host="::1",
        port=80,
        max_body_bytes=9,
        max_queue=7,
        drain_s=1.5,
        keep_alive_s=0.0,
        client_timeout_s=2.0,
        metrics_prefix="vllm:",
        tls_cert="c",
        tls_key="k",
        static_dir="d",
    )


def test_flags_of_the_system_before_this_one_mean_what_they_meant():
    before = parse("--https", *("--cert", "c", "--key", "k", "--static-dir", "d", "--checkpoint", "m"))
    assert command.settings_from_flags(before) == ServerSettings(tls_cert="c", tls_key="k", static_dir="d")
    assert before.model == "m"


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--port=70000", "--port must be between 0 and 65535"),
        ("--max_body_bytes=0", "--max_body_bytes must be at least 1"),
        ("--max_queue=0", "--max_queue must be at least 1"),
        ("--drain_s=-1", "--drain_s must be at least 0"),
        ("--drain_s=nan", "--drain_s must be at least 0"),
        ("--client_timeout_s=0", "--client_timeout_s must be above 0"),
        ("--metrics_prefix=a b", "--metrics_prefix must be letters"),
        ("--api_key=", "--api_keys holds an empty key"),
        ("--tls_cert=c", "--tls_cert and --tls_key belong together"),
        ("--cert=c", "--tls_cert and --tls_key belong together"),
        ("--https", "--https goes with --tls_cert and --tls_key"),
    ],
)
def test_a_wrong_setting_names_its_flag(flag, words):
    with pytest.raises(ConfigError, match=words):
        settings(flag)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ([], "demo"),
        (["--model=org/name"], "org/name"),
        (["--checkpoint=org/name", "--model_name=mine"], "mine"),
        (["--model={}/model-1b/"], "model-1b"),
    ],
)
def test_clients_ask_for_the_model_by_its_last_name(tmp_path, arguments, name):
    (tmp_path / "model-1b").mkdir()
    assert command.model_name(parse(*(argument.format(tmp_path) for argument in arguments))) == name


def test_all_programs_are_compiled_first_on_a_gpu_unless_asked_otherwise():
    for arguments, platform, warmup in (
        ([], "cpu", "lazy"),
        ([], "gpu", "full"),
        (["--warmup=lazy"], "gpu", "lazy"),
        (["--warmup=full"], "cpu", "full"),
    ):
        flag_values = parse(*arguments)
        config = engine_config_from_flags(flag_values)
        assert command.config_for_serving(config, flag_values, platform).warmup == warmup


@pytest.mark.parametrize(
    ("arguments", "platform", "is_refused"),
    [([], "cpu", True), (["--warmup=lazy"], "gpu", True), ([], "gpu", False), (["--warmup=full"], "cpu", False)],
)
def test_strictness_about_programs_needs_all_of_them_compiled_first(arguments, platform, is_refused):
    flag_values = parse("--strict_compile", *arguments)
    config = engine_config_from_flags(flag_values)
    expected = pytest.raises(ConfigError, match="needs warmup=") if is_refused else contextlib.nullcontext()
    with expected:
        assert command.config_for_serving(config, flag_values, platform).strict_compile


def test_a_checkpoint_is_served_over_https_until_a_signal_comes(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*make.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    checkpoint = write_checkpoint(tmp_path / "tiny")
    engine = [f"--{name}={value}" for name, value in ENGINE_FIELDS.items() if name != "progress"]
    flags_given = [*engine, "--linear=xla", "--attention=xla", "--compile_cache_dir=", f"--tls_cert={cert}"]
    with web_server(checkpoint, *flags_given, f"--tls_key={key}", "--api_key=k") as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=cert)
        with httpx.Client(base_url=server.url, verify=context, timeout=60) as client:
            while client.get("/health").status_code != 200:
                pass
            assert client.get("/v1/models").status_code == 401
            client.headers["authorization"] = "Bearer k"
            assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
            answer = client.post("/api/chat", json={"message": "Hello", "max_tokens": 5})
            assert answer.status_code == 200 and answer.json()["tokens"] <= 5
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
    assert any(line.endswith(": ready") for line in server.log)


def test_a_model_that_is_not_there_ends_it_with_one_line(tmp_path):
    with web_server(os.fspath(tmp_path / "nothing")) as server:
        assert server.exit_code() == 2
    assert "nothing" in server.log[-1] and not any("Traceback" in line for line in server.log)
