from pathlib import Path

import pytest
from helpers.small_tokenizers import sentencepiece_fields, train_byte_level

from photon_jax.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def byte_level_json() -> str:
    return train_byte_level().to_str()


@pytest.fixture(scope="session")
def byte_level_folder(byte_level_json: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tokenizer.json alone."""
    folder = tmp_path_factory.mktemp("byte_level")
    (folder / "tokenizer.json").write_text(byte_level_json, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def byte_level(byte_level_folder: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(byte_level_folder)


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_fields())
