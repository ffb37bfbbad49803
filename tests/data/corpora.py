"""Documents, and directories prepared from them."""

from pydoc_data.topics import topics

from switchhead.data import ByteVocabulary
from switchhead.data.prepare import Settings
from switchhead.data.vocabulary import documents_of

DOCUMENTS = [topics[name] for name in sorted(topics)]
BYTES = ByteVocabulary()
IN_ORDER = [text for number in range(3) for text in DOCUMENTS[number::3]]


def settings(source, **changes):
    """Bytes, nothing held out, and several shards."""
    return Settings(**{"source": source, "tokenizer": "bytes", "held_out": 0, "shard_tokens": 50_000, **changes})


def contents(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def texts(prepared, split="train"):
    tokens = prepared.tokens(split)[:]
    return [BYTES.decode(document.tolist()) for document in documents_of(tokens, BYTES.beginning)]
