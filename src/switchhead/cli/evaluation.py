"""`switchhead eval`."""

from __future__ import annotations

from typing import Any

import tyro

from switchhead.cli.common import Device, Json, RunPath, arguments_of_the_user, print_json


def evaluate(
    run: tyro.conf.Positional[RunPath],
    /,
    *,
    data: str,
    chunk_length: int | None = None,
    batch_size: int | None = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Score a text with a trained model: perplexity and bits per byte, every token once.

    Args:
        data: the text, text:FILE or jsonl:GLOB#field.
        chunk_length: tokens read at once; otherwise as in training.
        batch_size: pieces of the text scored side by side.
    """
    from switchhead.eval import evaluate
    from switchhead.train import load_run

    loaded = load_run(run, device=device)
    with arguments_of_the_user():
        result = evaluate(loaded.model, loaded.vocabulary, data, chunk_length=chunk_length, batch_size=batch_size)
    if as_json:
        print_json({"run": str(loaded.directory), "step": loaded.step, "data": data, **scores(result)})
    else:
        print(f"{loaded.directory} at step {loaded.step}: {data}")
        print(score_lines(result))


def scores(result: Any) -> dict[str, float | int]:
    """Scores of a text for JSON."""
    return {
        "loss": result.loss,
        "perplexity": result.perplexity,
        "bits_per_byte": result.bits_per_byte,
        "tokens": result.tokens,
        "bytes": result.bytes,
    }


def score_lines(result: Any) -> str:
    """Scores of a text for people."""
    return (
        f"perplexity {result.perplexity:.4f}, {result.bits_per_byte:.4f} bits per byte "
        f"({result.tokens:,} tokens, {result.bytes:,} bytes)"
    )
