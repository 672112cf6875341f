"""Small tokenizers, trained on the spot: byte-level as of Qwen and Llama 3, and with byte fallback as of Llama 2."""

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from photon_jax.text.pieces import byte_level_alphabet

CORPUS = (
    "The quick brown fox jumps over the lazy dog. The stop word STOP ends the text, and so does <END>.\n",
    "Numbers 12345, 3.14 and 007; don't we'll they're. def f(x):\n    return x ** 2\n",
    "Zürich naïve café, Ωμέγα, Привет мир, 日本語のテキスト, 안녕하세요 세계, 你好世界\n",
    "🙂🚀👩‍🚀 👍🏽 🏳️‍🌈 e\u0301a\u0308 \u200b end  two  spaces   three\n",
)
SPECIALS = ("<|begin|>", "<|end|>", "<|turn|>")


def train_byte_level() -> tokenizers.Tokenizer:
    """Returns a byte-level BPE tokenizer of 420 tokens; the three special ones have the ids 0 to 2."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
        initial_alphabet=list(byte_level_alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    return backend


def sentencepiece_fields(**changes: object) -> dict[str, object]:
    """Returns GGUF metadata of a SentencePiece BPE vocabulary: <unk>, <s>, </s>, 256 bytes, then pieces by score."""
    backend = tokenizers.Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=170, show_progress=False)
    words = [word for line in CORPUS[:2] for word in ("\u2581" + line.replace(" ", "\u2581")).splitlines()]
    backend.train_from_iterator(words * 3, trainer)
    vocabulary = backend.get_vocab()
    pieces = sorted(vocabulary, key=lambda piece: (len(piece) == 1, vocabulary[piece]))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merged = [float(-rank) for rank in range(len(pieces))]
    fields: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + merged,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return {**fields, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
