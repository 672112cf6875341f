import json

import pytest
from helpers.small_tokenizers import CORPUS, SPECIALS, sentencepiece_fields

from photon_jax.text.gguf_tokenizer import read_gguf_fields
from photon_jax.text.tokenizer import Tokenizer
from photon_jax.text.tokenizer_files import read_tokenizer_folder
from photon_jax.text.write_tokenizer import tokenizer_files

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


def write(parts, folder):
    for name, content in tokenizer_files(parts).items():
        (folder / name).write_bytes(content)
    return read_tokenizer_folder(folder)


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("eot", [None, 5])
def test_a_gguf_tokenizer_that_was_written_is_read_back_the_same(tmp_path, add_bos, eot):
    fields = sentencepiece_fields(add_bos_token=add_bos)
    fields["tokenizer.chat_template"], fields["tokenizer.chat_template.tools"] = TEMPLATE, "{{ tools }}"
    if eot is not None:
        fields["tokenizer.ggml.eot_token_id"] = eot
    parts = read_gguf_fields(fields)
    back = write(parts, tmp_path)
    for name in ("special_tokens", "bos_token_id", "eos_token_ids", "add_bos", "chat_templates"):
        assert getattr(back, name) == getattr(parts, name), name
    ours, expected = Tokenizer(back), Tokenizer(parts)
    for text in [*CORPUS, *SPECIALS, "", "<s>x</s>", "  a", "ünïcødé \u2581 \n\n"]:
        ids = expected.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == expected.decode(ids)
    messages = [{"role": "user", "content": "hi"}]
    assert ours.encode_chat(messages) == expected.encode_chat(messages)


def test_what_a_tokenizer_lacks_is_not_written(tmp_path):
    fields = {key: value for key, value in sentencepiece_fields().items() if not key.endswith("bos_token_id")}
    files = tokenizer_files(read_gguf_fields(fields))
    assert set(files) == {"tokenizer.json", "tokenizer_config.json"}
    assert set(json.loads(files["tokenizer_config.json"])) == {"eos_token", "unk_token", "add_bos_token"}
