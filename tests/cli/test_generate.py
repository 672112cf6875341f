import json
import re

import pytest
from absl import flags
from helpers.fake_llm import FakeLLM
from helpers.tiny_checkpoint import write_checkpoint

import photon_jax
from photon_jax.cli import generate
from photon_jax.errors import ConfigError, RequestError
from photon_jax.request import SamplingParams


@pytest.fixture
def made(monkeypatch):
    """The FakeLLMs that the command made; its options are given by making `options` entries first."""
    llms, options = [], {}

    def make(*args, **kwargs):
        llms.append(FakeLLM(*args, **kwargs, **options))
        return llms[-1]

    monkeypatch.setitem(photon_jax.__dict__, "LLM", make)
    llms_and_options = type("Made", (list,), {"options": options})(llms)
    llms_and_options.llms = llms
    return llms_and_options


def run_main(*arguments):
    flag_values = flags.FlagValues()
    generate.define_flags(flag_values)
    flag_values(["photon-generate", "--compile_cache_dir=", *arguments])
    generate.main(flag_values)


def only(made):
    (llm,) = made.llms
    assert llm.is_closed
    return llm


def type_lines(monkeypatch, *lines):
    """Makes input() give these lines, then the end of the input."""
    left = list(lines)

    def read(_prompt):
        if not left:
            raise EOFError
        return left.pop(0)

    monkeypatch.setattr("builtins.input", read)


def test_a_prompt_goes_through_the_chat_template_and_streams(made, capsys):
    run_main("--prompt=good day to you", "--model=folder", "--block_size=32", "--temperature=0")
    llm = only(made)
    assert (llm.model, llm.engine_config.cache.block_size) == ("folder", 32)
    messages = [{"role": "user", "content": "good day to you"}]
    assert llm.calls == [("stream_chat", messages, SamplingParams(temperature=0.0))]
    out, err = capsys.readouterr()
    assert out == "GOOD DAY TO YOU\n"
    assert err.startswith("4 tokens in ") and "tokens/s" in err and "time to first token" in err


def test_a_system_message_opens_the_chat(made, capsys):
    run_main("--prompt=hello", "--system=Be brief.")
    ((_, messages, _),) = only(made).calls
    assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]


@pytest.mark.parametrize("has_template", [True, False])
def test_raw_or_a_model_without_a_template_continues_the_text(made, capsys, has_template):
    made.options["has_template"] = has_template
    run_main("--prompt=good day", *(["--raw"] if has_template else []))
    assert [call[:2] for call in only(made).calls] == [("stream", "good day")]
    assert capsys.readouterr().out == "GOOD DAY\n"


def test_several_samples_are_printed_one_after_the_other(made, capsys):
    run_main("--prompt=a b", "--n=2", "--max_tokens=2")
    out, err = capsys.readouterr()
    assert out == "--- 1 of 2\nA B\n--- 2 of 2\nA B\n"
    assert err.startswith("4 tokens in ")
    assert [call[0] for call in only(made).calls] == ["chat"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([], "give one of --prompt, --interactive, --prompts_file and --describe, got none"),
        (["--prompt=a", "--interactive"], "got --prompt, --interactive"),
        (["--describe", "--prompt=a"], "got --prompt, --describe"),
        (["--prompt=a", "--output_file=x"], "--output_file goes with --prompts_file"),
        (["--prompt=a", "--logprobs=0"], "--logprobs goes with --prompts_file"),
        (["--interactive", "--prompt_logprobs=2"], "--prompt_logprobs goes with --prompts_file"),
        (["--interactive", "--raw"], "--raw"),
        (["--prompt=a", "--raw", "--system=b"], "--raw"),
        (["--interactive", "--n=2"], "--n=2"),
        (["--prompt=a", "--block_size=3"], "--block_size must be a power of two"),
    ],
)
def test_flags_that_contradict_each_other_are_refused_before_the_model_is_loaded(made, arguments, match):
    with pytest.raises(ConfigError, match=match):
        run_main(*arguments)
    assert not made.llms


def test_chat_needs_a_template(made):
    made.options["has_template"] = False
    with pytest.raises(ConfigError, match="chat template"):
        run_main("--interactive")
    with pytest.raises(ConfigError, match="chat template"):
        run_main("--prompt=a", "--system=b")


def test_a_chat_keeps_the_conversation_until_new(made, capsys, monkeypatch):
    type_lines(monkeypatch, "first one", "  ", "second", "/new", "third", "/exit", "never")
    run_main("--interactive", "--system=S")
    conversations = [[m["content"] for m in messages] for _, messages, _ in only(made).calls]
    assert conversations == [["S", "first one"], ["S", "first one", "FIRST ONE", "second"], ["S", "third"]]
    assert capsys.readouterr().out == "FIRST ONE\nSECOND\nTHIRD\n"


def test_a_chat_goes_on_after_a_message_that_was_refused(made, capsys, monkeypatch):
    made.options["longest"] = 2
    type_lines(monkeypatch, "far too long", "short")
    run_main("--interactive")
    (_, first, _), (_, second, _) = only(made).calls
    assert [m["content"] for m in first] == ["far too long"]
    assert [m["content"] for m in second] == ["short"]
    assert "too long" in capsys.readouterr().err


def test_an_interrupt_ends_the_answer_and_keeps_what_came(made, capsys, monkeypatch):
    type_lines(monkeypatch, "one two three", "next")
    num_flushes = 0

    def speed_line(*_):
        return "speed"

    real_stream = FakeLLM._stream

    def interrupted(self, door, asked, params):
        nonlocal num_flushes
        stream = real_stream(self, door, asked, params)
        for output in stream:
            yield output
            num_flushes += 1
            if num_flushes == 2:
                stream.close()
                raise KeyboardInterrupt

    monkeypatch.setattr(generate, "speed_line", speed_line)
    monkeypatch.setattr(FakeLLM, "_stream", interrupted)
    run_main("--interactive")
    _, (_, messages, _) = only(made).calls
    assert [m["content"] for m in messages] == ["one two three", "ONE TWO", "next"]
    assert capsys.readouterr().out == "ONE TWO\nNEXT\n\n"


def test_a_stream_that_is_dropped_in_printing_is_closed(made, monkeypatch, capsys):
    llm = FakeLLM()
    monkeypatch.setattr(generate, "print_stream", lambda stream: next(stream))
    generate._take_turn(llm, [{"role": "user", "content": "a b c"}], SamplingParams())
    assert llm.num_streams_ended == 1


def test_a_prompts_file_is_answered_in_order(made, tmp_path, capsys):
    prompts, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": "chat one"}]},
        {"prompt": "plain text", "max_tokens": 1},
        {"messages": [{"role": "user", "content": "chat two"}]},
        {"prompt": [4, 5]},
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    run_main(f"--prompts_file={prompts}", f"--output_file={results}", "--max_tokens=2", "--temperature=0")
    records = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    assert [record["index"] for record in records] == [0, 1, 2, 3]
    assert [record["outputs"][0]["text"] for record in records] == ["CHAT ONE", "PLAIN", "CHAT TWO", "4 5"]
    assert [door for door, _, _ in only(made).calls] == ["generate"]  # all at once, in the file's order
    out, err = capsys.readouterr()
    assert out == "" and "tokens/s" in err


def test_results_go_to_standard_output_when_no_file_is_named(made, tmp_path, capsys):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "a"}\n', encoding="utf-8")
    run_main(f"--prompts_file={prompts}")
    assert json.loads(capsys.readouterr().out)["outputs"][0]["text"] == "A A A"


def test_a_bad_line_stops_everything_before_the_model_is_loaded(made, tmp_path):
    prompts, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": 1}\n', encoding="utf-8")
    with pytest.raises(RequestError, match="line 2"):
        run_main(f"--prompts_file={prompts}", f"--output_file={results}")
    assert not made.llms and not results.exists()


def test_messages_for_a_model_without_a_template_are_refused_before_anything_runs(made, tmp_path):
    made.options["has_template"] = False
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n', encoding="utf-8")
    with pytest.raises(RequestError, match=r"in\.jsonl, line 2 has messages, but the model has no chat template"):
        run_main(f"--prompts_file={prompts}")
    assert not only(made).calls


@pytest.mark.parametrize(
    ("third", "message"),
    [
        ({"messages": [{"role": "user", "content": "refused"}]}, "the chat template refuses the conversation"),
        ({"messages": [{"role": "user", "content": "far too long"}]}, "prompt of 3 tokens is too long"),
        ({"prompt": "far too long"}, "prompt of 3 tokens is too long"),
    ],
)
@pytest.mark.parametrize("first", ['{"prompt": "a"}', ""])
def test_a_request_that_is_refused_is_named_by_its_line_before_anything_runs(made, tmp_path, first, third, message):
    made.options["longest"] = 2
    prompts, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(f"{first}\n\n{json.dumps(third)}\n", encoding="utf-8")
    with pytest.raises(RequestError) as refused:
        run_main(f"--prompts_file={prompts}", f"--output_file={results}")
    assert str(refused.value) == f"{prompts}, line 3: {message}"
    assert not results.exists()


def test_describe_prints_the_model_card_and_loads_nothing(made, tmp_path, capsys):
    write_checkpoint(tmp_path)
    run_main(f"--model={tmp_path}", "--describe", "--dtype=bfloat16")
    assert not made.llms
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["architecture"] == "LlamaForCausalLM"
    assert lines["in memory"].endswith("bfloat16")


def test_an_error_about_one_prompt_names_flags(made, monkeypatch):
    def refuse(*_):
        raise RequestError("a prompt of 9 tokens is above max_model_len (8)")

    monkeypatch.setattr(FakeLLM, "_stream", refuse)
    with pytest.raises(RequestError, match=r"above --max_model_len \(8\)"):
        run_main("--prompt=a")


def test_speed_line_gives_the_rate_after_the_first_token():
    assert generate.speed_line(11, 1.0, 3.0) == "11 tokens in 3.00 s: 5.0 tokens/s, time to first token 1.000 s"
    assert generate.speed_line(1, 1.0, 1.0) == "1 token in 1.00 s: time to first token 1.000 s"
    assert generate.speed_line(0, None, 2.0) == "no tokens in 2.00 s"
