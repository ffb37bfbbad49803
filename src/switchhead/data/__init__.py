"""Text to tokens to batches; knows no model."""

from switchhead.data.batches import Batches, LaneBatches, WindowBatches
from switchhead.data.corpus import Corpus, load_tokens, open_corpus
from switchhead.data.prepared import Prepared, open_prepared
from switchhead.data.sources import read_documents
from switchhead.data.tokenizer import TokenizerVocabulary, load_tokenizer
from switchhead.data.tokens import TokenArray, split_tail
from switchhead.data.vocabulary import ByteSubsetVocabulary, ByteVocabulary, Tokens, Vocabulary, load_vocabulary

__all__ = [
    "Batches",
    "ByteSubsetVocabulary",
    "ByteVocabulary",
    "Corpus",
    "LaneBatches",
    "Prepared",
    "TokenArray",
    "TokenizerVocabulary",
    "Tokens",
    "Vocabulary",
    "WindowBatches",
    "load_tokenizer",
    "load_tokens",
    "load_vocabulary",
    "open_corpus",
    "open_prepared",
    "read_documents",
    "split_tail",
]
