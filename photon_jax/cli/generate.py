"""photon-generate: answers one prompt, a chat, or a file of prompts; or describes a model.

  photon-generate --prompt="What is the capital of France?"
  photon-generate --model=FOLDER --interactive
  photon-generate --prompts_file=prompts.jsonl --output_file=results.jsonl --temperature=0
  photon-generate --model=FOLDER --describe

A prompt is put into the model's chat template when it has one; --raw continues it as plain text. The text goes to
standard output as it comes; a line with the speed goes to standard error. Each line of a prompts file is a JSON object
with "prompt" (plain text, or token ids) or "messages", and optionally "id" and sampling fields of its own.
Flags can stand in a file, one a line: --flagfile=FILE.
"""

import contextlib
import sys
import time
from collections.abc import Generator, Iterator, Mapping

from absl import flags

import photon_jax
from photon_jax.cli.command import define_common_flags, load_llm, run_command, shows_progress
from photon_jax.cli.flags import (
    define_sampling_flags,
    engine_config_from_flags,
    errors_name_flags,
    sampling_params_from_flags,
)
from photon_jax.cli.prompts_file import PromptLine, open_results, read_prompts, write_results
from photon_jax.config import EngineConfig
from photon_jax.describe import describe_checkpoint
from photon_jax.errors import ConfigError, RequestError
from photon_jax.loading import weights_quantization
from photon_jax.outputs import RequestOutput
from photon_jax.request import SamplingParams

_MODES = ("prompt", "interactive", "prompts_file", "describe")
_LOGPROBS = ("logprobs", "prompt_logprobs")

Message = Mapping[str, object]


def define_flags(flag_values: flags.FlagValues) -> None:
    """Defines every flag of the command."""
    flags.DEFINE_string("prompt", None, "Prompt to answer.", flag_values=flag_values)
    flags.DEFINE_bool(
        "interactive", False, "Chat on the terminal; /new starts over, /exit ends.", flag_values=flag_values
    )
    flags.DEFINE_string("prompts_file", None, "JSONL file of requests.", flag_values=flag_values)
    flags.DEFINE_bool(
        "describe", False, "Print what the model is and takes, without loading its weights.", flag_values=flag_values
    )
    flags.DEFINE_string("output_file", None, "JSONL file of results; unset: standard output.", flag_values=flag_values)
    flags.DEFINE_string("system", None, "System message that opens a chat.", flag_values=flag_values)
    flags.DEFINE_bool(
        "raw", False, "Continue the prompt as plain text, without the chat template.", flag_values=flag_values
    )
    define_sampling_flags(flag_values)
    define_common_flags(flag_values)


def main(flag_values: flags.FlagValues) -> None:
    """Runs the mode that the flags ask for; everything that can be wrong is checked before the model is loaded."""
    _check_modes(flag_values)
    params = sampling_params_from_flags(flag_values)
    config = engine_config_from_flags(flag_values)
    if flag_values.prompts_file is not None:
        requests = read_prompts(flag_values.prompts_file, params)
        with open_results(flag_values.output_file) as file, load_llm(flag_values, config) as llm:
            write_results(file, requests, run_requests(llm, requests, progress=shows_progress(flag_values)))
        return
    if flag_values.describe:
        describe(flag_values.model, config)
        return
    with load_llm(flag_values, config) as llm, errors_name_flags():
        if flag_values.interactive:
            chat_loop(llm, params, system=flag_values.system)
        else:
            answer(llm, flag_values.prompt, params, system=flag_values.system, is_raw=flag_values.raw)


def _check_modes(flag_values: flags.FlagValues) -> None:
    given = [f"--{name}" for name in _MODES if flag_values[name].value not in (None, False)]
    if len(given) != 1:
        raise ConfigError(
            f"give one of --prompt, --interactive, --prompts_file and --describe, got {', '.join(given) or 'none'}"
        )
    if flag_values.output_file is not None and flag_values.prompts_file is None:
        raise ConfigError("--output_file goes with --prompts_file; the text of --prompt goes to standard output")
    if flag_values.prompts_file is None:
        asked = next((name for name in _LOGPROBS if flag_values[name].value is not None), None)
        if asked is not None:
            raise ConfigError(f"--{asked} goes with --prompts_file, whose results have a place for log-probabilities")
    if flag_values.raw and (flag_values.interactive or flag_values.system is not None):
        raise ConfigError("--raw continues a plain prompt; it goes with neither --interactive nor --system")
    if flag_values.interactive and flag_values.n != 1:
        raise ConfigError(f"--interactive gives one answer at a time, got --n={flag_values.n}")


def describe(model: str, config: EngineConfig) -> None:
    """Prints the model card of a checkpoint."""
    print(
        describe_checkpoint(
            model,
            dtype=config.dtype,
            quantization=weights_quantization(config),
            use_generation_config=config.use_generation_config,
            kv_dtype=config.cache.kv_dtype,
        )
    )


def answer(llm: "photon_jax.LLM", prompt: str, params: SamplingParams, *, system: str | None, is_raw: bool) -> None:
    """Prints the model's answer to one prompt as it comes, or all of them when several samples are asked for."""
    is_chat = has_chat_template(llm) and not is_raw
    if system is not None and not is_chat:
        raise ConfigError("--system needs a model with a chat template; this one has none")
    messages = [*_opening(system), {"role": "user", "content": prompt}]
    if params.n == 1:
        print_stream(llm.stream_chat(messages, params) if is_chat else llm.stream(prompt, params))
        return
    started = time.perf_counter()
    output = (llm.chat(messages, params, progress=False) if is_chat else llm.generate(prompt, params, progress=False))[
        0
    ]
    for completion in output.outputs:
        print(f"--- {completion.index + 1} of {params.n}\n{completion.text}")
    _print_total([output], time.perf_counter() - started)


def has_chat_template(llm: "photon_jax.LLM") -> bool:
    """Returns whether the model can take messages."""
    return llm.tokenizer is not None and llm.tokenizer.has_chat_template


def _opening(system: str | None) -> list[Message]:
    return [] if system is None else [{"role": "system", "content": system}]


def print_stream(stream: Iterator[RequestOutput]) -> RequestOutput | None:
    """Prints a growing answer to standard output and its speed to standard error.

    Returns:
      The last output, None when the stream had none.
    """
    started = time.perf_counter()
    first_s: float | None = None
    num_printed = 0
    output = None
    try:
        for output in stream:
            completion = output.outputs[0]
            if first_s is None and completion.token_ids:
                first_s = time.perf_counter() - started
            sys.stdout.write(completion.text[num_printed:])
            sys.stdout.flush()
            num_printed = len(completion.text)
    finally:
        print(flush=True)
    if output is not None:
        num_tokens = len(output.outputs[0].token_ids)
        print(speed_line(num_tokens, first_s, time.perf_counter() - started), file=sys.stderr)
    return output


def speed_line(num_tokens: int, first_s: float | None, total_s: float) -> str:
    """Returns a line with the tokens made, their rate after the first one, and the wait for that one."""
    if first_s is None:
        return f"no tokens in {total_s:.2f} s"
    unit = "token" if num_tokens == 1 else "tokens"
    rate = f"{(num_tokens - 1) / (total_s - first_s):.1f} tokens/s, " if num_tokens > 1 and total_s > first_s else ""
    return f"{num_tokens} {unit} in {total_s:.2f} s: {rate}time to first token {first_s:.3f} s"


def chat_loop(llm: "photon_jax.LLM", params: SamplingParams, *, system: str | None) -> None:
    """Reads messages from the terminal and prints the answers until the input ends.

    An interrupt while an answer comes ends that answer and keeps what there is of it; one at the prompt ends the chat.
    """
    if not has_chat_template(llm):
        raise ConfigError("--interactive needs a model with a chat template, and this one has none; use --prompt")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (its import gives input() editing and history)
    messages = _opening(system)
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text == "/exit":
            return
        if text == "/new":
            messages = _opening(system)
        elif text:
            messages = _take_turn(llm, [*messages, {"role": "user", "content": text}], params)


def _take_turn(llm: "photon_jax.LLM", messages: list[Message], params: SamplingParams) -> list[Message]:
    """Prints the answer to the last message; returns the conversation with it, or without both when refused."""
    reply: list[str] = []

    def watched() -> Generator[RequestOutput, None, None]:
        stream = llm.stream_chat(messages, params)
        try:
            for output in stream:
                reply[:] = [output.outputs[0].text]
                yield output
        finally:
            if isinstance(stream, Generator):
                stream.close()  # an interrupted answer gives its blocks back before the next turn

    try:
        with contextlib.closing(watched()) as stream:
            print_stream(stream)
    except RequestError as error:
        print(f"{error} (/new starts over)", file=sys.stderr)
        return messages[:-1]
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    return [*messages, {"role": "assistant", "content": "".join(reply)}]


def run_requests(llm: "photon_jax.LLM", requests: list[PromptLine], *, progress: bool) -> list[RequestOutput]:
    """Returns the outputs of a prompts file's requests, in order; prints the total speed to standard error.

    Raises:
      RequestError: a request can't be served; names its line. Nothing has run then.
    """
    started = time.perf_counter()
    prompts = [_token_ids_or_text(llm, request) for request in requests]
    try:
        outputs = llm.generate(prompts, [request.params for request in requests], progress=progress)
    except RequestError as error:
        if error.prompt_index is None:
            raise
        raise RequestError(f"{requests[error.prompt_index].where}: {error.__cause__ or error}") from error
    _print_total(outputs, time.perf_counter() - started)
    return outputs


def _token_ids_or_text(llm: "photon_jax.LLM", request: PromptLine) -> str | list[int]:
    if request.messages is None:
        assert request.prompt is not None, f"{request.where} has neither a prompt nor messages"
        return request.prompt
    if llm.tokenizer is None or not has_chat_template(llm):
        raise RequestError(f"{request.where} has messages, but the model has no chat template; give a prompt")
    try:
        return llm.tokenizer.encode_chat(request.messages)
    except RequestError as error:
        raise RequestError(f"{request.where}: {error}") from error


def _print_total(outputs: list[RequestOutput], total_s: float) -> None:
    num_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    waits = [output.metrics.time_to_first_token_s for output in outputs]
    first = sorted(wait for wait in waits if wait is not None)
    median = f", median time to first token {first[len(first) // 2]:.3f} s" if first else ""
    print(f"{num_tokens} tokens in {total_s:.2f} s: {num_tokens / total_s:.1f} tokens/s{median}", file=sys.stderr)


def run() -> None:
    """Entry point of the installed command."""
    run_command(main, define_flags, __doc__)


if __name__ == "__main__":
    run()
