"""Requests from a JSONL file, all checked before any runs, and results back to one."""

import codecs
import contextlib
import dataclasses
import json
import os
import sys
import typing
from collections.abc import Iterator, Sequence

import numpy as np

from photon_jax.controls import logit_bias_from_json
from photon_jax.errors import RequestError
from photon_jax.outputs import CompletionOutput, PromptLogprobs, RequestOutput, TokenLogprobs
from photon_jax.request import CODE_FIELDS, SamplingParams

_SAMPLING_NAMES = frozenset(field.name for field in dataclasses.fields(SamplingParams)) - CODE_FIELDS
_BOOL_NAMES = frozenset(name for name, hint in typing.get_type_hints(SamplingParams).items() if hint is bool)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PromptLine:
    """One line of a prompts file; exactly one of prompt and messages is set."""

    where: str  # file and line, for messages
    prompt: str | list[int] | None
    messages: list[dict[str, object]] | None
    params: SamplingParams
    identity: str | int | None  # the line's "id", given back with its result


def read_prompts(path: str, defaults: SamplingParams) -> list[PromptLine]:
    """Returns the requests of a JSONL file; blank lines are skipped.

    A line is an object with "prompt" (text, or token ids) or "messages", and optionally "id" and any field of
    SamplingParams, which then replaces the default.

    Raises:
      RequestError: the file can't be read or holds no request, or a line is wrong; names the line's number.
    """
    try:
        with open(path, "rb") as file:
            lines = file.read().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise RequestError(f"prompts file {path!r} can't be read: {error}") from error
    requests = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            requests.append(_parse_line(line.decode(), defaults, where))
        except UnicodeDecodeError as error:
            raise RequestError(f"{where}: not UTF-8 text ({error}); save the file as UTF-8") from error
        except (ValueError, TypeError, RecursionError) as error:
            raise RequestError(f"{where}: {error}") from error
    if not requests:
        raise RequestError(
            f"prompts file {path!r} holds no request; each line is a JSON object with prompt or messages"
        )
    return requests


def _parse_line(line: str, defaults: SamplingParams, where: str) -> PromptLine:
    record = json.loads(line, object_pairs_hook=_unique_keys)
    if not isinstance(record, dict):
        raise RequestError(f"expected a JSON object, got {type(record).__name__}")
    unknown = sorted(set(record) - _SAMPLING_NAMES - {"prompt", "messages", "id"})
    if unknown:
        raise RequestError(
            f"unknown field {', '.join(map(repr, unknown))}; a line has prompt or messages, id, and the fields of "
            f"SamplingParams: {', '.join(sorted(_SAMPLING_NAMES))}"
        )
    if ("prompt" in record) == ("messages" in record):
        raise RequestError("expected exactly one of prompt and messages")
    identity = record.get("id")
    if identity is not None and (isinstance(identity, bool) or not isinstance(identity, str | int)):
        raise RequestError(f"id must be a string or an integer, got {identity!r}")
    request = PromptLine(
        where=where,
        prompt=_check_prompt(record["prompt"]) if "prompt" in record else None,
        messages=_check_messages(record["messages"]) if "messages" in record else None,
        params=_params_of(record, defaults),
        identity=identity,
    )
    json.dumps(record, ensure_ascii=False, allow_nan=False).encode()  # what can't come back with its result fails now
    return request


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise RequestError(f"{', '.join(map(repr, twice))} is given twice; keep one of them")
    return record


def _params_of(record: dict[str, object], defaults: SamplingParams) -> SamplingParams:
    given = {name: value for name, value in record.items() if name in _SAMPLING_NAMES}
    for name in _BOOL_NAMES & set(given):
        if not isinstance(given[name], bool):
            raise RequestError(f"{name} must be true or false, got {given[name]!r}")
    for name in ("stop", "stop_token_ids"):
        if name in given and not isinstance(given[name], list | str):
            raise RequestError(f"{name} must be a list, got {given[name]!r}")
    if "logit_bias" in given:
        given["logit_bias"] = logit_bias_from_json(given["logit_bias"])
    return dataclasses.replace(defaults, **given)  # type: ignore[arg-type]


def _check_prompt(value: object) -> str | list[int]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return value
    raise RequestError(f"prompt must be text or a list of token ids, got {_shorten(value)}")


def _check_messages(value: object) -> list[dict[str, object]]:
    is_list = isinstance(value, list) and bool(value)
    if (
        isinstance(value, list)
        and is_list
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value)
    ):
        return value
    raise RequestError(f"messages must be a list of objects with role and content, got {_shorten(value)}")


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def result_line(index: int, request: PromptLine, output: RequestOutput) -> str:
    """Returns the result of the request at `index` as one line of JSON, without the line's end."""
    record: dict[str, object] = {"index": index}
    if request.identity is not None:
        record["id"] = request.identity
    if request.messages is not None:
        record["messages"] = request.messages
    else:
        record["prompt"] = request.prompt
    record["num_prompt_tokens"] = len(output.prompt_token_ids)
    record["num_cached_tokens"] = output.num_cached_tokens
    if output.prompt_logprobs is not None:
        scored = [int(token_id) for token_id in output.prompt_token_ids[1:]]
        record["prompt_logprobs"] = {"token_ids": scored, **_arrays(output.prompt_logprobs)}
    record["outputs"] = [_completion(completion) for completion in output.outputs]
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def _completion(completion: CompletionOutput) -> dict[str, object]:
    record: dict[str, object] = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": [int(token_id) for token_id in completion.token_ids],
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        record["logprobs"] = _arrays(completion.logprobs)
    return record


def _arrays(logprobs: TokenLogprobs | PromptLogprobs) -> dict[str, object]:
    """Returns the arrays as lists, one entry a token, without those of the most likely tokens when none are there."""
    arrays = {field.name: getattr(logprobs, field.name) for field in dataclasses.fields(logprobs)}
    return {name: _finite_or_null(array) for name, array in arrays.items() if array.ndim == 1 or array.shape[1]}


def _finite_or_null(values: np.ndarray) -> object:
    """Returns the values for JSON, which has no infinity: an impossible token's logprob becomes null."""
    found = values.astype(object)
    found[~np.isfinite(values)] = None
    return found.tolist()


@contextlib.contextmanager
def open_results(path: str | None) -> Iterator[typing.TextIO]:
    """Opens the results file, or standard output when there is no path; the file appears whole, at the end.

    Raises:
      RequestError: the file can't be written.
    """
    if path is None:
        yield sys.stdout
        return
    if os.path.isdir(path):
        raise RequestError(f"output file {path!r} is a folder; name a file")
    partial = f"{path}.partial"
    try:
        file = open(partial, "w", encoding="utf-8")  # noqa: SIM115 (closed below, before the rename)
    except OSError as error:
        raise RequestError(f"output file {path!r} can't be written: {error}") from error
    try:
        with file:
            yield file
        os.replace(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)


def write_results(file: typing.TextIO, requests: Sequence[PromptLine], outputs: Sequence[RequestOutput]) -> None:
    """Writes one line for each request, in order."""
    for index, (request, output) in enumerate(zip(requests, outputs, strict=True)):
        file.write(result_line(index, request, output) + "\n")
