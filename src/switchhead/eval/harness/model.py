"""The harness's view of a language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from switchhead.data.tokens import join_documents
from switchhead.eval import reading
from switchhead.eval.generation import generate
from switchhead.eval.language_model import load_language_model
from switchhead.eval.likelihood import Request, encode_request, score_continuations
from switchhead.eval.perplexity import default_batch_size, score_tokens

TASKS = Path(__file__).parent / "tasks"


@register_model("switchhead")
class SwitchHeadLM(TemplateLM):
    """A run directory, saved model or hub id in the harness.

    Requests are tokenised by the harness, behind the beginning token. Unlike the harness's own `hf`, this takes every
    vocabulary of ours, and Transformer-XL, which reads texts of any length in chunks and carries its memory.

    Args:
        pretrained: as `load_language_model` takes it.
        device: as `load_language_model` takes it.
        batch_size: texts read side by side; "auto": see `default_batch_tokens`.
        max_length: tokens that the model reads at once; default: as in training.
        dtype: of the computation, "float32" or "bfloat16" (autocast over float32 weights).
        max_batch_size: what the harness passes along with "auto"; without effect.

    Raises:
        RunError: see `load_language_model`.
        ValueError: another dtype.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        device: str = "auto",
        batch_size: int | str = "auto",
        max_length: int | None = None,
        dtype: str = "float32",
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype is {dtype!r}; it must be 'float32' or 'bfloat16'")
        if device.startswith("cuda") and not torch.cuda.is_available():  # the harness's default
            device = "auto"
        self.language_model = load_language_model(pretrained, device)
        self.model, self.vocabulary = self.language_model.model, self.language_model.vocabulary
        self.rows = None if str(batch_size).startswith("auto") else int(batch_size)
        self.max_length = max_length or reading.chunk_length(self.model)
        self.dtype = dtype

    @property
    def eot_token_id(self) -> int:
        """The beginning token, which ends a text as well, and stands before one that has no context."""
        if self.vocabulary.beginning is None:
            raise ValueError("this model's vocabulary has no token that stands between texts")
        return self.vocabulary.beginning

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokens of a text, behind the beginning token unless that is not wanted."""
        beginning = [] if add_special_tokens is False else [self.eot_token_id]
        return beginning + self.vocabulary.encode(string).tolist()

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihood in nats of each continuation, and whether it is the greedy one."""
        if self.vocabulary.beginning is not None:
            return super().loglikelihood(requests, disable_tqdm)
        # Without such a token the harness has nothing to put before the first one.
        encoded = []
        for request in requests:
            context, continuation = cast(tuple[str, str], request.args)
            tokens = encode_request(self.vocabulary, context, continuation)
            encoded.append(((context, continuation), list(tokens.context), list(tokens.continuation)))
        return self._loglikelihood_tokens(encoded)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        with self._autocast():
            likelihoods = score_continuations(
                self.model,
                [Request(context, continuation) for _, context, continuation in requests],
                batch_size=self.rows,
                chunk_length=self.max_length,
            )
        answers = [(likelihood.log_likelihood, likelihood.greedy) for likelihood in likelihoods]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood in nats of whole texts, every token once, as `score_tokens` reads them."""
        answers = []
        for request in requests:
            (text,) = cast(tuple[str], request.args)
            tokens = join_documents([text], self.vocabulary)
            with self._autocast():
                score = score_tokens(
                    self.model,
                    self.vocabulary,
                    tokens,
                    chunk_length=self.max_length,
                    batch_size=default_batch_size(self.model, self.max_length),
                )
            answers.append(-score.loss * score.tokens)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answers[-1])
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations of texts, each up to the first of its stop sequences; the likeliest ones unless asked else."""
        answers = []
        for request in requests:
            context, options = cast(tuple[str, dict[str, Any]], request.args)
            stops = options.get("until") or []
            with self._autocast():
                text = generate(
                    self.model,
                    self.vocabulary,
                    context,
                    max_new_tokens=options.get("max_gen_toks", 256),
                    temperature=options.get("temperature", 1.0) if options.get("do_sample") else 0,
                    top_k=options.get("top_k"),
                )
            for stop in [stops] if isinstance(stops, str) else stops:
                text = text.partition(stop)[0] if stop else text
            answers.append(text)
            self.cache_hook.add_partial("generate_until", request.args, text)
        return answers

    def get_model_info(self) -> dict[str, Any]:
        """What identifies the model in the harness's results."""
        return {
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": self.dtype,
            "model_revision": self.language_model.step,
            "model_sha": self.language_model.sha256,
        }

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16")
