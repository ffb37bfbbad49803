"""Hugging Face tokenizers as vocabularies."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from switchhead.data.hub import require_model
from switchhead.data.vocabulary import Tokens, documents_of, dtype_of, write_vocabulary
from switchhead.errors import DataError, RunError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPACE = "\u2581"  # how SentencePiece writes a space
# How the tokenizers of `train_bpe` cut text before any merge: in front of every space, and around control characters.
WORD_SPLIT = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "never", "split": True}
WORD = re.compile(r" ?[^ \x00-\x1f]+|[ \x00-\x1f]")
KNOWN_WORDS = 1 << 20  # about 200 MB
BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")


class TokenizerVocabulary:
    """A Hugging Face tokenizer of the fast kind (one with a `tokenizer.json`).

    Text is encoded as text: a document that happens to hold "<s>" gives no beginning token. The beginning token is the
    tokenizer's `bos_token`, or else its `eos_token` (GPT-2's one token for both).

    Attributes:
        tokenizer: the Hugging Face object, whose `save_pretrained` writes what `AutoTokenizer` reads.
        size: number of ids, the beginning token included.
        beginning: id of the token that stands before every document.

    Raises:
        DataError: the tokenizer is a slow one, or has no token that could stand before a document.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise DataError(f"{type(tokenizer).__name__} is no fast tokenizer: use one that has a tokenizer.json")
        beginning = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if beginning is None:
            raise DataError("the tokenizer has neither a bos_token nor an eos_token to stand before documents: set one")
        self.tokenizer = tokenizer
        self.beginning = int(beginning)  # pyright: ignore[reportArgumentType] (one id, not a list)
        self.size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self._json = backend.to_str()

    @classmethod
    def load(cls, directory: Path, content: Mapping[str, Any]) -> TokenizerVocabulary:
        """The tokenizer saved in a directory whose `vocabulary.json` has this content; see `load_vocabulary`."""
        path = directory / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise RunError(f"cannot read tokenizer {path}: {error.strerror}") from error
        except ValueError as error:
            raise RunError(f"{path} is no tokenizer") from error
        if hashlib.sha256(text.encode()).hexdigest() != content.get("sha256"):
            raise RunError(f"{path} is not the tokenizer that was saved there: its checksum differs")
        vocabulary = load_tokenizer(directory)
        vocabulary._json = text  # as first written: another release may write the same tokenizer in other words
        return vocabulary

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides the ids of a text."""
        return hashlib.sha256(self._json.encode()).hexdigest()

    def encode(self, text: str) -> Tokens:
        """Ids of a text, without the beginning token."""
        return self._encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; special tokens give none, bytes that are not UTF-8 give U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def count_bytes(self, tokens: Tokens) -> int:
        """UTF-8 bytes of the text that the tokens stand for."""
        if self._byte_lengths is not None:
            return int(self._byte_lengths[tokens].sum())
        return sum(len(self.decode(document.tolist()).encode()) for document in documents_of(tokens, self.beginning))

    def count_words(self, tokens: Tokens) -> int:
        """Words of that text, separated by white space or the end of a document."""
        return sum(len(self.decode(document.tolist()).split()) for document in documents_of(tokens, self.beginning))

    def save(self, directory: Path) -> None:
        """Write what `load_vocabulary` reads, and `AutoTokenizer` too."""
        directory.mkdir(exist_ok=True)
        self.tokenizer.save_pretrained(directory)
        (directory / "tokenizer.json").write_text(self._json, encoding="utf-8")
        content = {"format": 1, "kind": "tokenizer", "size": self.size, "beginning": self.beginning}
        write_vocabulary(directory, {**content, "sha256": self.fingerprint})

    @cached_property
    def _backend(self) -> Any:
        """The tokenizer without templates, padding and truncation, for which special tokens in text are text."""
        from tokenizers import Tokenizer

        backend = Tokenizer.from_str(self._json)
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True
        return backend

    @cached_property
    def _encode(self) -> Callable[[str], Tokens]:
        dtype, backend = dtype_of(self), self._backend
        description = json.loads(self._json)
        if description["normalizer"] is None and description["pre_tokenizer"] == WORD_SPLIT and self._cuts_controls:
            return _WordEncoder(backend, dtype)

        def encode(text: str) -> Tokens:
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)  # does not count offsets
            return np.array(encoding.ids, dtype=dtype)

        return encode

    @property
    def _cuts_controls(self) -> bool:
        """Whether no piece holds a control character, so that words end there too."""
        return not any(re.search(r"[\x00-\x1f]", piece) for piece in self._backend.get_vocab(with_added_tokens=True))

    @cached_property
    def _byte_lengths(self) -> np.ndarray | None:
        """UTF-8 bytes of every id, where pieces are joined without changing them; else None."""
        decoder = json.loads(self._json)["decoder"] or {}
        steps = [step["type"] for step in decoder.get("decoders", [decoder]) if "type" in step]
        if steps == ["ByteLevel"]:
            length = len  # a character a byte
        elif steps == ["Replace", "ByteFallback", "Fuse"]:
            length = _sentencepiece_length
        else:
            return None
        lengths = np.zeros(self.size, dtype=np.int64)
        for piece, index in self._backend.get_vocab(with_added_tokens=False).items():
            lengths[index] = length(piece)
        for index, token in self._backend.get_added_tokens_decoder().items():
            lengths[index] = 0 if token.special else len(token.content.encode())
        return lengths


def load_tokenizer(source: str | Path) -> TokenizerVocabulary:
    """A Hugging Face tokenizer by directory, or by name on the hub.

    Raises:
        DataError: there is none, or it cannot serve; see `TokenizerVocabulary`.
    """
    from transformers import AutoTokenizer

    try:
        if not Path(source).exists():
            require_model(str(source))
        tokenizer = AutoTokenizer.from_pretrained(str(source))
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"cannot load tokenizer {str(source)!r}: {reason}") from error
    return TokenizerVocabulary(tokenizer)


class _WordEncoder(dict[str, bytes]):
    """Encodes text word by word, and every frequent word once: several times as fast as the tokenizer alone."""

    def __init__(self, backend: Any, dtype: np.dtype) -> None:
        super().__init__()
        self._model, self._dtype = backend.model, dtype

    def __call__(self, text: str) -> Tokens:
        return np.frombuffer(bytearray().join(map(self.__getitem__, WORD.findall(text))), dtype=self._dtype)

    def __missing__(self, word: str) -> bytes:
        pieces = self._model.tokenize(word.replace(" ", SPACE))
        ids = np.array([piece.id for piece in pieces], dtype=self._dtype).tobytes()
        if len(self) < KNOWN_WORDS:
            self[word] = ids
        return ids


def _sentencepiece_length(piece: str) -> int:
    return 1 if BYTE_PIECE.fullmatch(piece) else len(piece.replace(SPACE, " ").encode())
