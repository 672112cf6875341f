import json
import math

import numpy as np
import pytest
from helpers.fake_llm import FakeLLM

from photon_jax.cli.prompts_file import open_results, read_prompts, result_line
from photon_jax.errors import RequestError
from photon_jax.request import SamplingParams
from photon_jax.structured_outputs import StructuredOutputs

DEFAULTS = SamplingParams(temperature=0.5, max_tokens=3)


def write(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_prompts_ids_and_messages_are_read_with_their_own_parameters(tmp_path):
    messages = [{"role": "user", "content": "hé"}]
    path = write(
        tmp_path,
        '{"prompt": "one", "id": "a"}',
        "",
        '{"prompt": [1, 2], "temperature": 0, "stop": ["x"], "id": 7}',
        json.dumps({"messages": messages, "max_tokens": 9}, ensure_ascii=False),
    )
    first, second, third = read_prompts(path, DEFAULTS)
    assert (first.prompt, first.messages, first.params, first.identity) == ("one", None, DEFAULTS, "a")
    assert (second.prompt, second.identity) == ([1, 2], 7)
    assert second.params == SamplingParams(temperature=0, max_tokens=3, stop=("x",))
    assert (third.prompt, third.messages, third.params.max_tokens) == (None, messages, 9)


def test_controls_are_read_from_a_line(tmp_path):
    controls = {
        "repetition_penalty": 1.2,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {"5": -1.5, "7": 2},
        "allowed_token_ids": [5, 7],
        "bad_words": ["a", [1, 2]],
    }
    (request,) = read_prompts(write(tmp_path, json.dumps({"prompt": "one"} | controls)), SamplingParams())
    assert request.params == SamplingParams(**(controls | {"logit_bias": {5: -1.5, 7: 2.0}}))


def test_structured_outputs_are_read_from_a_line(tmp_path):
    form = {"json": {"type": "object", "maxProperties": 2}}
    (request,) = read_prompts(write(tmp_path, json.dumps({"prompt": "a", "structured_outputs": form})), DEFAULTS)
    assert request.params.structured_outputs == StructuredOutputs(**form)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "line 2: logit_bias must have token ids"),
        ('{"prompt": "a", "structured_outputs": {"jsn": {}}}', "line 2: structured_outputs has no 'jsn'"),
        ('{"prompt": "a", "structured_outputs": {"regex": 5}}', "line 2: regex must be a non-empty text"),
        ('{"prompt": "a", "allowed_token_ids": []}', "line 2: allowed_token_ids is empty"),
        ('{"prompt": "a", "bad_words": "b"}', "line 2: bad_words must be a list"),
        ('{"prompt": "a", "logits_processor": "f"}', "line 2: unknown field 'logits_processor'"),
        ("{", "line 2: Expecting"),
        ("[1]", "line 2: expected a JSON object, got list"),
        ("{}", "line 2: expected exactly one of prompt and messages"),
        ('{"prompt": "a", "messages": []}', "line 2: expected exactly one"),
        ('{"prompt": "a", "temprature": 1}', "line 2: unknown field 'temprature'"),
        ('{"prompt": 5}', "line 2: prompt must be text or a list of token ids, got 5"),
        ('{"prompt": []}', "line 2: prompt must be"),
        ('{"prompt": [true]}', "line 2: prompt must be"),
        ('{"prompt": ["a"]}', "line 2: prompt must be"),
        ('{"messages": []}', "line 2: messages must be"),
        ('{"messages": [{"content": "a"}]}', "line 2: messages must be"),
        ('{"prompt": "a", "top_p": 2}', "line 2: top_p must be a finite number"),
        ('{"prompt": "a", "max_tokens": "5"}', "line 2: max_tokens must be an integer"),
        ('{"prompt": "a", "ignore_eos": "no"}', "line 2: ignore_eos must be true or false"),
        ('{"prompt": "a", "stop_token_ids": 5}', "line 2: stop_token_ids must be a list"),
        ('{"prompt": "a", "stop_token_ids": [null]}', "line 2: stop_token_ids must be"),
        ('{"prompt": "a", "stop": 5}', "line 2: stop must be"),
        ('{"prompt": "a", "temperature": NaN}', "line 2: temperature must be a finite number"),
        ('{"prompt": "a", "id": [1]}', "line 2: id must be"),
        ('{"prompt": "a", "top_k": 1, "top_k": 2, "id": 1}', "line 2: 'top_k' is given twice; keep one of them"),
        ('{"messages": [{"role": "user", "role": "system", "content": "a"}]}', "line 2: 'role' is given twice"),
        ('{"prompt": "a", "top_k": ' + "9" * 5000 + "}", "line 2: Exceeds the limit"),
        ("[" * 100_000, "line 2: "),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, line, match):
    path = write(tmp_path, '{"prompt": "fine"}', line)
    with pytest.raises(RequestError, match=match):
        read_prompts(path, DEFAULTS)


def test_a_file_that_is_missing_empty_or_no_text_is_an_error(tmp_path):
    with pytest.raises(RequestError, match="can't be read"):
        read_prompts(str(tmp_path / "none.jsonl"), DEFAULTS)
    with pytest.raises(RequestError, match="holds no request"):
        read_prompts(write(tmp_path, "", "  "), DEFAULTS)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9"}\n')
    with pytest.raises(RequestError, match=r"latin\.jsonl, line 2: not UTF-8 text .*; save the file as UTF-8"):
        read_prompts(str(tmp_path / "latin.jsonl"), DEFAULTS)
    (tmp_path / "wide.jsonl").write_bytes('{"prompt": "a"}\n'.encode("utf-16"))
    with pytest.raises(RequestError, match=r"wide\.jsonl, line 1: not UTF-8 text"):
        read_prompts(str(tmp_path / "wide.jsonl"), DEFAULTS)


def test_a_byte_order_mark_line_ends_of_windows_and_blank_lines_are_read(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes('\ufeff{"prompt": "één\u2028twee"}\r\n\r\n \t\r\n{"prompt": "last", "id": 4}'.encode())
    first, last = read_prompts(str(path), DEFAULTS)
    assert (first.prompt, first.where) == ("één\u2028twee", f"{path}, line 1")
    assert (last.prompt, last.identity, last.where) == ("last", 4, f"{path}, line 4")


def test_a_result_is_valid_json_with_null_for_an_impossible_tokens_logprob(tmp_path):
    (request,) = read_prompts(write(tmp_path, '{"prompt": "één twee", "id": 3, "logprobs": 0}'), DEFAULTS)
    (output,) = FakeLLM().generate([request.prompt], [request.params])
    record = json.loads(result_line(5, request, output), parse_constant=pytest.fail)
    assert (record["index"], record["id"], record["prompt"]) == (5, 3, "één twee")
    assert (record["num_prompt_tokens"], record["num_cached_tokens"]) == (2, 0)
    (completion,) = record["outputs"]
    assert (completion["text"], completion["token_ids"]) == ("ÉÉN TWEE ÉÉN", [0, 1, 2])
    assert (completion["finish_reason"], completion["stop_reason"]) == ("length", None)
    assert completion["logprobs"]["sampling"] == [None, None, None]
    np.testing.assert_allclose(completion["logprobs"]["raw"], [-1.0, -1.5, -2.0])
    assert not any(math.isinf(value) for value in completion["logprobs"]["raw"])
    assert set(completion["logprobs"]) == {"raw", "tempered", "sampling"}
    assert "prompt_logprobs" not in record


def test_a_result_holds_the_most_likely_tokens_of_output_and_prompt(tmp_path):
    line = '{"prompt": "one two three", "logprobs": 2, "prompt_logprobs": 3, "logprobs_kind": "tempered"}'
    (request,) = read_prompts(write(tmp_path, line), DEFAULTS)
    assert request.params.logprobs_kind == "tempered"
    (output,) = FakeLLM().generate([request.prompt], [request.params])
    record = json.loads(result_line(0, request, output), parse_constant=pytest.fail)
    (completion,) = record["outputs"]
    assert completion["logprobs"]["top_ids"] == [[0, 1]] * 3
    assert completion["logprobs"]["top_logprobs"] == [[0.0, None]] * 3
    assert record["prompt_logprobs"] == {
        "token_ids": [1, 2],
        "logprobs": [-3.0, -2.0],
        "is_greedy": [False, True],
        "top_ids": [[0, 1, 2]] * 2,
        "top_logprobs": [[0.0, -1.0, None]] * 2,
    }


def test_the_output_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("old\n", encoding="utf-8")
    with pytest.raises(KeyError), open_results(str(path)) as file:
        file.write("half")
        raise KeyError
    assert path.read_text(encoding="utf-8") == "old\n"
    with open_results(str(path)) as file:
        file.write("new\n")
    assert path.read_text(encoding="utf-8") == "new\n"
    assert list(tmp_path.iterdir()) == [path]


def test_an_output_file_that_cannot_be_written_is_an_error_before_the_run(tmp_path):
    with pytest.raises(RequestError, match="can't be written"), open_results(str(tmp_path / "none" / "out.jsonl")):
        pytest.fail("the body ran")


@pytest.mark.parametrize("line", ['{"prompt": "a", "id": "\\ud800"}', '{"messages": [{"role": "user", "score": NaN}]}'])
def test_what_could_not_come_back_with_its_result_is_refused_before_anything_runs(tmp_path, line):
    with pytest.raises(RequestError, match="line 1: "):
        read_prompts(write(tmp_path, line), SamplingParams())


def test_a_folder_as_output_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(RequestError, match="is a folder; name a file"), open_results(str(tmp_path)):
        pass
