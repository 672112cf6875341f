"""Writes the golden files in tests/text/golden with transformers (needs transformers and tokenizers).

    python scripts/make_text_goldens.py

chats.json: what transformers renders of conversations by chat templates written as those of well-known models are.
words.json: how its tokenizers cut text into words, by the names that GGUF files give these rules.
"""

import json
from pathlib import Path

import transformers
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.utils.chat_template_utils import render_jinja_template

_FOLDER = Path(__file__).parent.parent / "tests" / "text" / "golden"

# A date from the caller or the clock, the system turn cut off by a slice, trimmed content, calls and their results.
_HEADERS = """\
{%- macro turn(role, text) -%}
    {{- '<|head|>' ~ role ~ '<|body|>\\n\\n' ~ text ~ eos_token -}}
{%- endmacro -%}
{{- bos_token }}
{%- set today = date_string if date_string is defined else strftime_now('%d %b %Y') %}
{%- set first = messages | first %}
{%- set talk = messages[1:] if first.role == 'system' else messages %}
{%- set rules = first.content | trim if first.role == 'system' else 'No rules.' %}
{%- if tools is not none %}
    {%- set rules = rules ~ '\\nCallable:' %}
    {%- for tool in tools %}
        {%- set rules = rules ~ loop.index %}
        {{- '<|tool|>' ~ (tool | tojson(indent=4)) ~ '\\n\\n' }}
    {%- endfor %}
{%- endif %}
{{- turn('system', 'Date: ' ~ today ~ '\\n' ~ rules) }}
{%- for entry in talk %}
    {%- if 'tool_calls' in entry %}
        {%- if entry.tool_calls | length > 1 %}{{ raise_exception('only one call a turn') }}{% endif %}
        {%- set wanted = entry['tool_calls'][0]['function'] %}
        {{- turn('assistant', '{"call": "' ~ wanted.name ~ '", "with": ' ~ (wanted.arguments | tojson) ~ '}') }}
    {%- elif entry.role in ('tool', 'ipython') %}
        {{- turn('result', entry.content if entry.content is string else (entry.content | tojson)) }}
    {%- else %}
        {{- turn(entry.role, entry.content | trim) }}
    {%- endif %}
{%- endfor %}
{{- '<|head|>assistant<|body|>\\n\\n' if add_generation_prompt }}
"""

# A namespace written in a backward loop, methods of strings, thoughts kept after the last question alone, a switch.
_THINKING = """\
{%- set seen = namespace(question=-1, results=0) %}
{%- for entry in messages | reverse %}
    {%- if seen.question < 0 and entry.role == 'user' and not entry.content.startswith('<result>') %}
        {%- set seen.question = loop.revindex0 %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\nFunctions:' }}
    {%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for entry in messages %}
    {%- set said = entry.content if entry.content is string else '' %}
    {%- if entry.role == 'tool' %}
        {%- set seen.results = seen.results + 1 %}
        {{- '<|im_start|>user' if not (loop.previtem is defined and loop.previtem.role == 'tool') }}
        {{- '\\n<result>' ~ said ~ '</result>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- elif entry.role != 'assistant' %}
        {{- '<|im_start|>%s\\n%s<|im_end|>\\n' | format(entry.role, said) }}
    {%- else %}
        {%- set parts = said.split('</think>') %}
        {%- set thought = entry.reasoning_content or (parts[0].replace('<think>', '') if parts | length > 1 else '') %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if thought and loop.index0 > seen.question %}
            {{- '<think>\\n' ~ thought.strip() ~ '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- parts[-1].lstrip('\\n') }}
        {%- for item in entry.tool_calls or [] %}
            {%- set wanted = item.function or item %}
            {{- '<call>' ~ {'name': wanted.name, 'arguments': wanted.arguments} | tojson ~ '</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

# A default system turn, literal line ends in strings, one line.
_PLAIN = (
    "{% for turn in messages %}{% if loop.first and turn['role'] != 'system' %}{{ '<|im_start|>system\nBe brief."
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + turn['role'] + '\n' + turn['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Block tags on lines of their own, a marked answer, break and continue, filters: what the environment's switches do.
_SWITCHES = """\
{% set counter = namespace(value=0) %}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% if counter.value >= 3 %}
        {% break %}
    {% endif %}
    {% set counter.value = counter.value + 1 %}
    {% if message.role == 'assistant' %}
        {% generation %}
{{ message.content }}{{ eos_token }}
        {% endgeneration %}
    {% else %}
[{{ message.role | upper }}] {{ message.content | replace('<', '(') }} {{ unk_token }}{{ nothing }}
    {% endif %}
{% endfor %}
{{ {'b': 1, 'a': ['é', '<&>', none, true]} | tojson(sort_keys=true, separators=(',', ':')) }}
{{ dict(x=1).items() | list }}{{ messages | map(attribute='role') | join(', ') }}
"""

_TALK = [
    {"role": "system", "content": "  Answer in verse.  "},
    {"role": "user", "content": "Hi <b>there</b> 🙂 "},
    {"role": "assistant", "content": "<think>\nshort?\n</think>\n\nHello!"},
    {"role": "user", "content": "é\n'quoted' \"text\""},
]
_TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "number", "é": "<>&'"}}}}]
_CALLS = [
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2.5}}}]},
    {"role": "tool", "content": '{"sum": 5}'},
]
_ANSWERED = [*_CALLS, {"role": "assistant", "content": "It is 5.", "reasoning_content": "easy\n"}]
_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

_TEXTS = (
    *("Hello, world!", "  leading  and   trailing   ", "\n\n\tTabs\r\nCRLF \n x", "don't I'LL we've They'Re 's 'x"),
    *("1234567890 12.5 3,000 ½² ٣٤ 一二 Ⅷ", "a1b22c333d4444", "émigré Ωμέγα Привет e\u0301 a\u0308", " 123 \r \r8"),
    *(
        "日本語のテキスト 안녕 你好、世界。",
        "🙂👩‍🚀 👍🏽",
        "\u00a0x\u200by\ufeffz",
        "def f(x):\n    return x**2  # !\n\n",
    ),
    *("$%^& !!\n\n\n??", "snake_case CamelCase kebab-case", "\x00\x01\x7f", "end of line \n", "\t\tx", "''' \"\"\""),
)


def make_chats() -> list[dict[str, object]]:
    inputs = [
        (_HEADERS, _TALK, {"date_string": "1 Jan 2026"}),
        (_HEADERS, _CALLS, {"date_string": "1 Jan 2026", "tools": _TOOLS}),
        (_THINKING, _TALK, {}),
        (_THINKING, _TALK[1:], {"enable_thinking": False}),
        (_THINKING, _CALLS, {"tools": _TOOLS}),
        (_THINKING, _ANSWERED, {"tools": _TOOLS, "add_generation_prompt": False}),
        (_PLAIN, _TALK, {}),
        (_PLAIN, _TALK[1:], {"add_generation_prompt": False}),
        (_HEADERS, _TALK[:3], {"date_string": "x", "add_generation_prompt": False, "continue_final_message": True}),
        (_PLAIN, [*_TALK, {"role": "assistant", "content": "So: "}], {"continue_final_message": True}),
        (_SWITCHES, [*_TALK, *_TALK], {"add_generation_prompt": False}),
    ]
    cases = []
    for template, messages, options in inputs:
        options = {"add_generation_prompt": not options.get("continue_final_message", False), **options}
        rendered, _ = render_jinja_template([messages], chat_template=template, **_SPECIAL, **options)
        case = {"template": template, "special_tokens": _SPECIAL, "messages": messages, "options": options}
        cases.append({**case, "text": rendered[0]})
    return cases


def make_words() -> dict[str, object]:
    qwen2 = transformers.Qwen2Tokenizer().backend_tokenizer
    gpt2 = transformers.GPT2Tokenizer().backend_tokenizer
    cohere = transformers.CohereTokenizer().backend_tokenizer  # cuts numbers as SmolLM's tokenizer does
    split = pre_tokenizers.Split(Regex(TikTokenConverter().pattern), behavior="isolated", invert=False)
    llama3 = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    unchanged = normalizers.Sequence([])
    rules = {
        "gpt-2": (unchanged, gpt2.pre_tokenizer),
        "smollm": (unchanged, cohere.pre_tokenizer),
        "llama-bpe": (unchanged, llama3),
        "qwen2": (qwen2.normalizer, qwen2.pre_tokenizer),
    }
    words = {
        name: [[word for word, _ in cut.pre_tokenize_str(normal.normalize_str(text))] for text in _TEXTS]
        for name, (normal, cut) in rules.items()
    }
    return {"texts": _TEXTS, "words": words}


def main() -> None:
    _FOLDER.mkdir(parents=True, exist_ok=True)
    for name, value in (("chats", make_chats()), ("words", make_words())):
        text = json.dumps({"transformers": transformers.__version__, name: value}, ensure_ascii=False, indent=1)
        (_FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
