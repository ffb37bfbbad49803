"""Examples and scores for the harness's task files, which are in `tasks`; the readers are those of the native tasks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datasets import Dataset

from switchhead.eval import blimp, cbt, lambada
from switchhead.eval.examples import HubData, Record, load_examples


def lambada_openai(**metadata: Any) -> dict[str, Dataset]:
    """The restored form."""
    return _load(lambada.OPENAI.file, lambada.OPENAI.hub, lambada.parse, metadata)


def lambada_standard(**metadata: Any) -> dict[str, Dataset]:
    """The original form."""
    return _load(lambada.STANDARD.file, lambada.STANDARD.hub, lambada.parse, metadata)


def blimp_pairs(**metadata: Any) -> dict[str, Dataset]:
    """The pairs of all paradigms."""
    return _load(blimp.FILE, blimp.HUB, blimp.parse, metadata)


def cbt_common_nouns(**metadata: Any) -> dict[str, Dataset]:
    """Questions about common nouns."""
    return _load("cbt_cn", cbt.HUB["cbt_cn"], cbt.parse, metadata)


def cbt_named_entities(**metadata: Any) -> dict[str, Dataset]:
    """Questions about named entities."""
    return _load("cbt_ne", cbt.HUB["cbt_ne"], cbt.parse, metadata)


def blimp_results(document: dict[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, tuple[str, bool]]:
    """Whether the grammatical sentence is the likelier one, and of which paradigm it is."""
    (good, _), (bad, _) = results
    return {"acc": (document["paradigm"], good > bad)}


def macro_average(items: Sequence[tuple[str, bool]]) -> float:
    """The mean over paradigms of the share of correct pairs."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for paradigm, correct in items:
        groups[paradigm].append(correct)
    return sum(sum(group) / len(group) for group in groups.values()) / len(groups)


def _load(stem: str, hub: HubData, parse: Callable[[Record], Any], metadata: dict[str, Any]) -> dict[str, Dataset]:
    """The examples as the split "test", from the directory that `--metadata '{"task_data": ...}'` names or the hub."""
    directory = metadata.get("task_data")
    _, examples = load_examples(stem, hub, parse, task_data=None if directory is None else Path(directory))
    return {"test": Dataset.from_list([asdict(example) for example in examples])}
