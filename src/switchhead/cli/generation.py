"""`switchhead generate`."""

from __future__ import annotations

import tyro

from switchhead.cli.common import Chosen, Device, Json, ModelName, arguments_of_the_user, print_json


def generate(
    model: tyro.conf.Positional[ModelName],
    /,
    *,
    prompt: str = "",
    max_new_tokens: int = 200,
    temperature: float = 1.0,
    top_k: Chosen[int | None] = None,
    seed: int = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Let a model continue a text.

    Args:
        prompt: the text to continue.
        max_new_tokens: length of the continuation, at most.
        temperature: below 1 is safer, above 1 bolder, 0 always takes the likeliest token.
        top_k: sample from the likeliest k tokens only; otherwise from all.
        seed: of the sampling.
    """
    from switchhead.eval import generate, load_language_model

    loaded = load_language_model(model, device)
    with arguments_of_the_user():
        continuation = generate(
            loaded.model,
            loaded.vocabulary,
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
        )
    if as_json:
        print_json({"model": loaded.name, "step": loaded.step, "prompt": prompt, "continuation": continuation})
    else:
        print(prompt + continuation)
