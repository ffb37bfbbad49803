"""Byte-pair encoding by SentencePiece, as the paper trains it, in a form that Hugging Face reads."""

from __future__ import annotations

import io
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from switchhead.data.tokenizer import SPACE, WORD, TokenizerVocabulary
from switchhead.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEGINNING = "<s>"
UNKNOWN = "<unk>"  # SentencePiece wants one; with a piece for every byte nothing is unknown


def train_bpe(documents: Iterable[str], vocab_size: int) -> TokenizerVocabulary:
    """A tokenizer of `vocab_size` pieces, the beginning token `<s>` and 256 bytes among them.

    Digits stand alone, no piece spans a space or a control character, and characters too rare for a piece are spelled
    in bytes. Nothing is normalised, so that decoding gives back the text; one character, U+2581, which SentencePiece
    writes for a space, comes back as a space. Equal documents give equal tokenizers.

    Raises:
        DataError: the documents have too little text for so many pieces, or too many characters for so few.
    """
    return TokenizerVocabulary(to_hugging_face(train_sentencepiece(documents, vocab_size)))


def train_sentencepiece(documents: Iterable[str], vocab_size: int) -> bytes:
    """SentencePiece's model for `train_bpe`, serialised."""
    try:
        import sentencepiece
    except ImportError as error:
        raise DataError("training a tokenizer needs sentencepiece: pip install 'switchhead[data]'") from error
    # Its training counts words first and looks at nothing else, so counted words are all it needs: that is faster,
    # and bounded in memory by the number of different words.
    words: Counter[str] = Counter()
    for document in documents:
        words.update(WORD.findall(document))
    if not any(word.strip() for word in words):
        raise DataError("there is no text to train a tokenizer on")
    model = io.BytesIO()
    with tempfile.TemporaryDirectory() as directory:
        table = Path(directory) / "words.tsv"
        rows = (f"{word}\t{count}\n" for word, count in sorted(words.items()) if word >= " ")
        table.write_text("".join(rows), encoding="utf-8")
        try:
            sentencepiece.SentencePieceTrainer.train(
                input=str(table),
                input_format="tsv",
                model_writer=model,
                model_type="bpe",
                vocab_size=vocab_size,
                split_digits=True,
                byte_fallback=True,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                unk_id=0,
                bos_id=1,
                eos_id=-1,
                pad_id=-1,
                unk_piece=UNKNOWN,
                bos_piece=BEGINNING,
                num_threads=1,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise DataError(
                f"cannot train a tokenizer of {vocab_size} pieces on this text: {_reason(error)} "
                "(--vocab-size; --tokenizer bytes needs no training)"
            ) from error
    return model.getvalue()


def to_hugging_face(model: bytes) -> PreTrainedTokenizerBase:
    """A model of `train_sentencepiece` as a Hugging Face tokenizer that gives the same ids, behind `<s>` by default."""
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    source = SentencePieceProcessor(model_proto=model)
    pieces = [source.id_to_piece(index) for index in range(source.get_piece_size())]
    known = {piece: index for index, piece in enumerate(pieces)}
    # SentencePiece joins whatever neighbours make the piece with the lowest id; here every such pair is listed.
    merges = [
        (piece[:cut], piece[cut:])
        for index, piece in enumerate(pieces)
        if not (source.is_byte(index) or source.is_control(index) or source.is_unknown(index))
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
    backend = Tokenizer(models.BPE(vocab=known, merges=merges, unk_token=UNKNOWN, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never", split=True)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])  # pyright: ignore[reportAttributeAccessIssue]
    backend.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=f"{BEGINNING} $A", pair=f"{BEGINNING} $A {BEGINNING} $B", special_tokens=[(BEGINNING, known[BEGINNING])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BEGINNING,
        eos_token=BEGINNING,  # a document ends where the next begins
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def _reason(error: RuntimeError) -> str:
    text = " ".join(str(error).split())
    return text.rsplit("] ", 1)[-1] or text
