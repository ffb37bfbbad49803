"""`switchhead prepare`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from switchhead.cli.common import Chosen, Json, arguments_of_the_user, print_json, table

if TYPE_CHECKING:
    from switchhead.data.prepare import Progress
    from switchhead.data.prepared import Prepared

SECONDS_BETWEEN_LINES = 10.0
SECONDS_BETWEEN_UPDATES = 0.2

SOURCE_HELP = (
    "c4, pes2o, wikitext103, enwik8, hf:NAME/CONFIG#column, text:FILE|GLOB, jsonl:GLOB#field (.gz, .xz, .zst) "
    "or parquet:GLOB#column"
)


def prepare(
    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE", help=SOURCE_HELP)],
    /,
    *,
    out: Path,
    valid: Chosen[str | None] = None,
    test: Chosen[str | None] = None,
    held_out: Chosen[float | None] = None,
    tokenizer: Chosen[str | None] = None,
    vocab_size: int = 8000,
    limit_tokens: Chosen[int | None] = None,
    shuffle: Chosen[int | None] = None,
    copy: Chosen[Path | None] = None,
    processes: Chosen[int | None] = None,
    as_json: Json = False,
) -> None:
    """Tokenize text once, into a directory that --data takes.

    After a kill, the same command goes on where it was; of a finished directory it verifies the checksums.

    Args:
        out: the directory.
        valid: validation text; otherwise the source's own, or documents held out.
        test: test text; otherwise the source's own.
        held_out: part of the documents to hold out for validation (0: none); otherwise 0.005 where there is no
            validation text.
        tokenizer: bytes, or a Hugging Face tokenizer by directory or name; otherwise one is trained on the source.
        vocab_size: pieces of the SentencePiece BPE that is trained.
        limit_tokens: exact number of training tokens, the first ones; otherwise all.
        shuffle: seed of a random order of the training documents; otherwise they stay in the source's order.
        copy: local copy of the files that c4, pes2o, wikitext103 or enwik8 would fetch.
        processes: that encode side by side; otherwise one a core.
    """
    from switchhead.data.prepare import Settings
    from switchhead.data.prepare import prepare as run

    with arguments_of_the_user():
        settings = Settings(
            source=source,
            valid=valid,
            test=test,
            held_out=held_out,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            limit_tokens=limit_tokens,
            shuffle=shuffle,
        )
        if processes is not None and processes < 1:
            raise ValueError(f"processes is {processes}; it must be at least 1")
    display = _Display()
    try:
        prepared = run(settings, out, copy=copy, processes=processes or _cores(), progress=display.show)
    finally:
        display.close()
    if as_json:
        print_json({"out": str(out), "tokenizer": prepared.manifest["tokenizer"], "splits": _counts(prepared)})
    else:
        print(f"{out}: {prepared.vocabulary.size:,} token ids")
        rows = [[split, *(f"{count:,}" for count in counts.values())] for split, counts in _counts(prepared).items()]
        print(table(["split", "documents", "tokens", "bytes"], rows, right_aligned=(1, 2, 3)))


def _counts(prepared: Prepared) -> dict[str, dict[str, int]]:
    return {
        name: {count: split[count] for count in ("documents", "tokens", "bytes")}
        for name, split in prepared.splits.items()
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Display:
    """Progress on standard error: one line that changes on a terminal, now and then a line elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._doing, self._shown, self._started = "", 0.0, (time.monotonic(), 0)

    def show(self, progress: Progress) -> None:
        """Show it, unless something was shown just now."""
        now = time.monotonic()
        new = progress.doing != self._doing
        if new:
            self._doing, self._started = progress.doing, (now, progress.tokens)
        elif now - self._shown < (SECONDS_BETWEEN_UPDATES if self._terminal else SECONDS_BETWEEN_LINES):
            return
        self._shown = now
        line = progress.doing
        if progress.parts:
            seconds, tokens = now - self._started[0], progress.tokens - self._started[1]
            line += f"  file {progress.part}/{progress.parts}  {progress.tokens:,} tokens"
            line += f"  {tokens / seconds:,.0f} tokens/s" if seconds > 0 else ""
        print(f"\r\x1b[K{line}" if self._terminal else line, end="" if self._terminal else "\n", file=sys.stderr)
        sys.stderr.flush()

    def close(self) -> None:
        """Leave a terminal's line."""
        if self._terminal and self._doing:
            print(file=sys.stderr)
