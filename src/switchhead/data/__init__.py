"""Text to tokens to batches; knows no model."""

from switchhead.data.batches import Batches, LaneBatches, WindowBatches
from switchhead.data.sources import read_documents
from switchhead.data.tokens import load_tokens, split_tail
from switchhead.data.vocabulary import ByteVocabulary, Tokens, Vocabulary, load_vocabulary

__all__ = [
    "Batches",
    "ByteVocabulary",
    "LaneBatches",
    "Tokens",
    "Vocabulary",
    "WindowBatches",
    "load_tokens",
    "load_vocabulary",
    "read_documents",
    "split_tail",
]
