"""The OpenAPI document is kept to, whatever is sent: schemathesis finds no server error and no undocumented answer."""

import subprocess
import sys
from pathlib import Path

from photon_jax.server.app import create_app
from photon_jax.server.state import ServerState

SECONDS = 30
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_every_answer_to_generated_requests_is_documented(served, tmp_path):
    command = Path(sys.executable).parent / "schemathesis"
    result = subprocess.run(
        [
            *(command, "run", f"{served.url}/openapi.json", "--checks", CHECKS, "--max-time", str(SECONDS)),
            *("--seed", "1", "--max-examples", "30", "--workers", "1", "--request-timeout", "300"),
            *("--generation-database", "none", "--no-color", "--suppress-health-check", "filter_too_much"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-10_000:] + result.stderr[-2_000:]


def test_the_document_names_errors_and_streams():
    document = create_app(ServerState(model_name="m")).openapi()
    for path in ("/v1/chat/completions", "/v1/completions"):
        responses = document["paths"][path]["post"]["responses"]
        assert {"200", "400", "401", "404", "413", "500", "503"} <= set(responses)
        assert "422" not in responses
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
        assert responses["400"]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorAnswer")
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "tools", "top_k", "structured_outputs", "return_progress"} <= set(fields)
