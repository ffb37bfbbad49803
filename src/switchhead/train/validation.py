"""Validation: the text scored as `switchhead.eval` scores it, by all ranks together."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from torch import Tensor

from switchhead.data import TokenArray, Vocabulary
from switchhead.eval.perplexity import Evaluation, score_tokens
from switchhead.eval.reading import memory_length
from switchhead.eval.results import standard_error
from switchhead.hf import SwitchHeadForCausalLM
from switchhead.train.distributed import World


def validate(
    model: SwitchHeadForCausalLM,
    vocabulary: Vocabulary,
    text: TokenArray,
    *,
    chunk_length: int,
    batch_size: int,
    world: World,
    report: Callable[[float], None],
) -> Evaluation:
    """Score a text as `score_tokens` does, under the autocast that is active. Every rank has to ask; each gets all.

    Each rank scores its share of the windows. A window is scored by one rank alone, so that more ranks change the
    result only as far as a forward pass of fewer rows rounds differently. A sharded model needs all ranks in each
    forward pass: where a rank has a batch less than the first, it scores one window more, which does not count.

    A model with memory reads lanes, which `score_tokens` does not split: there every rank scores the whole text.

    Args:
        model: the plain model, or its shards.
        vocabulary: counts bytes.
        text: at least two tokens.
        chunk_length: tokens of a window.
        batch_size: windows that all ranks together read at once.
        world: the ranks.
        report: told after each forward pass how much of its own part this rank has read, 0 to 1.
    """

    def score(part: TokenArray, batch_size: int) -> Evaluation:
        return score_tokens(model, vocabulary, part, chunk_length=chunk_length, batch_size=batch_size)

    n_scored = len(text) - 1
    if world.size == 1 or memory_length(model):
        with _reported(model, n_scored, report):
            return score(text, batch_size)

    n_windows, at_once = math.ceil(n_scored / chunk_length), math.ceil(batch_size / world.size)
    mine, most = world.share(n_windows), World(0, world.size).share(n_windows)

    def score_windows(windows: range) -> Evaluation:
        return score(text[windows.start * chunk_length : windows.stop * chunk_length + 1], at_once)

    sums = np.zeros(n_windows)  # nats of every window; adding zeros to those of the others is exact
    with _reported(model, len(most) * chunk_length, report):
        if mine:
            sums[mine.start : mine.stop] = _sums(score_windows(mine))
        if math.ceil(len(mine) / at_once) < math.ceil(len(most) / at_once):
            score_windows(range(1))
    sums = np.array(world.sum(sums.tolist()))

    ends = np.minimum(np.arange(1, n_windows + 1) * chunk_length, n_scored)
    loss = sums.sum() / n_scored
    deviations = (sums - _counts(ends) * loss) / n_scored
    return Evaluation(
        loss=float(loss),
        standard_error=standard_error([deviations]),
        tokens=n_scored,
        bytes=vocabulary.count_bytes(text[:]),  # of all at once: a character may lie in two windows
        ends=ends,
        deviations=deviations,
    )


def _sums(score: Evaluation) -> np.ndarray:
    """Nats of every chunk, which its deviation tells: it is (sum - count * loss) / tokens."""
    assert score.ends is not None
    assert score.deviations is not None
    return score.deviations * score.tokens + _counts(score.ends) * score.loss


def _counts(ends: np.ndarray) -> np.ndarray:
    return np.diff(ends, prepend=0)


@contextlib.contextmanager
def _reported(model: SwitchHeadForCausalLM, n_tokens: int, report: Callable[[float], None]) -> Iterator[None]:
    read = 0

    def count(module: object, args: object, arguments: Mapping[str, Tensor], output: object) -> None:
        nonlocal read
        read += arguments["input_ids"].numel()
        report(min(read / n_tokens, 1.0))

    with model.register_forward_hook(count, with_kwargs=True):
        yield
