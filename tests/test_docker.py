"""The container's files: what can be checked where no container can be built."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from absl import flags
from helpers.source_tree import ROOT

FOLDER = ROOT / "scripts" / "docker"
DOCKERFILE = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
LINES = re.sub(r"\\\n\s*", "", DOCKERFILE).splitlines()  # one instruction a line


def instructions(name):
    """Returns the arguments of each instruction of a kind."""
    return [line.removeprefix(f"{name} ") for line in LINES if line.startswith(f"{name} ")]


def test_hadolint_finds_nothing():
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "--no-color", FOLDER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_extras_it_installs_are_those_of_the_project():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (default,) = (line.partition("=")[2] for line in instructions("ARG") if line.startswith("EXTRAS"))
    others = re.findall(r"EXTRAS=([\w,]+)", DOCKERFILE)
    for extra in ",".join([default, *others]).split(","):
        assert extra in extras
    assert any('pip install --no-cache-dir ".[${EXTRAS}]"' in line for line in instructions("RUN"))


def test_what_it_copies_is_enough_to_build_the_package_and_passes_the_ignore_file(tmp_path):
    allowed = (FOLDER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    for line in instructions("COPY"):
        if line.startswith("--from"):
            continue
        *sources, target = line.split()
        for source in sources:
            assert f"!{source}" in allowed
            name = target if (ROOT / source).is_dir() else source
            subprocess.run(["cp", "-r", ROOT / source, tmp_path / name], check=True)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", tmp_path / "wheels", tmp_path], check=True)
    (wheel,) = (tmp_path / "wheels").glob("photon_jax-*.whl")
    assert wheel.stat().st_size > 100_000


def start(tmp_path, *arguments, **variables):
    """Returns the command line that the entry point starts in place of the server."""
    stub = tmp_path / "photon-web-server"
    stub.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "import sys; print(sys.argv[1:])" "$@"\n')
    stub.chmod(0o755)
    (entry,) = instructions("ENTRYPOINT")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PORT": "5728", "MODEL": "/model", "MODEL_NAME": ""}
    done = subprocess.run(
        [*yaml.safe_load(entry), *arguments], env=environment | variables, capture_output=True, text=True, check=True
    )
    return yaml.safe_load(done.stdout)


def test_the_entry_point_hands_variables_and_arguments_to_the_server(tmp_path):
    plain = ["--host=0.0.0.0", "--port=5728", "--model=/model"]
    assert start(tmp_path) == plain
    assert start(tmp_path, "--max_num_seqs=8", "--api_key=a b") == [*plain, "--max_num_seqs=8", "--api_key=a b"]
    given = start(tmp_path, PORT="80", MODEL="/a b", MODEL_NAME="my model")
    assert given == ["--host=0.0.0.0", "--port=80", "--model=/a b", "--model_name=my model"]


def test_the_entry_points_flags_and_the_comments_are_the_servers_own():
    from photon_jax.cli.web_server import _KEY_VARIABLE, define_flags

    flag_values = flags.FlagValues()
    define_flags(flag_values)
    (entry,) = instructions("ENTRYPOINT")
    for name in re.findall(r"--(\w+)=", entry):
        assert name in flag_values
    assert _KEY_VARIABLE in DOCKERFILE and _KEY_VARIABLE in COMPOSE["services"]["photon"]["environment"]


def test_it_runs_as_nobody_special_with_a_health_check_on_its_port():
    assert instructions("USER") == ["10001"]
    (check,) = instructions("HEALTHCHECK")
    assert "http://127.0.0.1:$PORT/health" in check
    defaults = dict(re.findall(r"(\w+)=(\S*)", " ".join(instructions("ENV"))))
    assert defaults["PORT"] in instructions("EXPOSE") and defaults["MODEL"] == "/model"


def test_the_compose_file_fits_the_image():
    service = COMPOSE["services"]["photon"]
    context = (FOLDER / service["build"]["context"]).resolve()
    assert context == ROOT.resolve()
    assert (context / service["build"]["dockerfile"]).samefile(FOLDER / "Dockerfile")
    assert service["ports"] == ["127.0.0.1:${PORT:-5728}:5728"]
    targets = [volume.rpartition("}")[2] if "$" in volume else volume for volume in service["volumes"]]
    assert targets == [":/model:ro", "cache:/home/photon/.cache"]
    assert "cache" in COMPOSE["volumes"]
    assert yaml.safe_load(instructions("VOLUME")[0]) == ["/home/photon/.cache"]


def test_the_time_to_end_is_longer_than_that_of_the_server():
    from photon_jax.server.state import ServerSettings

    grace = COMPOSE["services"]["photon"]["stop_grace_period"]
    assert float(grace.removesuffix("s")) > ServerSettings().drain_s + 5


@pytest.mark.parametrize("is_well", [True, False])
def test_the_health_check_tells_a_well_server_from_another(is_well):
    import http.server
    import threading

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if is_well and self.path == "/health" else 503)
            self.end_headers()

        def log_message(self, *_):
            pass

    (check,) = instructions("HEALTHCHECK")
    command = yaml.safe_load(check.partition("CMD ")[2])
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {"PATH": path, "PORT": str(server.server_address[1])}
        done = subprocess.run(command, env=environment, capture_output=True, check=False)
        thread.join()
    assert (done.returncode == 0) is is_well
