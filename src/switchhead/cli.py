"""The `switchhead` command: reads arguments, calls the library, prints text or JSON.

Results go to standard output, progress and errors to standard error. Exit codes: 0 success, 1 failure, 2 usage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

try:
    import tyro
except ImportError:
    raise SystemExit("switchhead: error: the command needs more packages: pip install 'switchhead[train]'") from None

if TYPE_CHECKING:
    from switchhead.recipes import Recipe
    from switchhead.train import TrainingConfig

# Commands import what they need when they run, so that `--help` and `doctor` answer without loading everything.

DESCRIPTION = """SwitchHead: mixture-of-experts attention for language models.

Start with `switchhead demo`. An error is one line; add --debug (or set SWITCHHEAD_DEBUG=1) for its traceback."""

Json = Annotated[bool, tyro.conf.arg(name="json", help="print JSON instead of text")]
Setting = TypeVar("Setting")
OfRecipe = Annotated[Setting, tyro.conf.arg(help_behavior_hint="(default: the recipe's)")]
Device = Annotated[str, tyro.conf.arg(help="auto (a GPU if there is one), cpu, cuda, cuda:1, ...")]
RunPath = Annotated[Path, tyro.conf.arg(metavar="RUN", help="a run directory, or checkpoints/step-N inside one")]


class UsageError(Exception):
    """The arguments cannot be meant; exit code 2."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; argument errors and `--help` exit by themselves."""
    args = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in args or os.environ.get("SWITCHHEAD_DEBUG", "0") not in ("", "0")
    args = [arg for arg in args if arg != "--debug"]
    try:
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="switchhead",
            description=DESCRIPTION,
            args=args,
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
        )
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("switchhead: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has gone (`| head`). What is still buffered would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            raise
        print(f"switchhead: error: {_message(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """What the command line can change of a recipe's `TrainingConfig`; None: as the recipe has it."""

    steps: OfRecipe[int | None] = None
    """Optimizer steps."""
    batch_size: OfRecipe[int | None] = None
    """Sequences in a step."""
    learning_rate: OfRecipe[float | None] = None
    """The highest, after the warm-up."""
    warmup_steps: OfRecipe[int | None] = None
    """Steps until it is reached."""
    seed: OfRecipe[int | None] = None
    """Of initial weights, dropout and the order of the text."""
    dtype: OfRecipe[Literal["float32", "bfloat16"] | None] = None
    """Of the computation; bfloat16 is autocast over float32 weights."""
    compile: OfRecipe[Literal["on", "off"] | None] = None
    """Run the model through torch.compile."""
    eval_every: OfRecipe[int | None] = None
    """Steps between validations."""
    save_every: OfRecipe[int | None] = None
    """Steps between checkpoints."""

    def apply(self, training: TrainingConfig) -> TrainingConfig:
        """The configuration with these settings.

        Raises:
            UsageError: a value that does not fit.
        """
        changes = {name: value for name, value in vars(self).items() if value is not None}
        if "compile" in changes:
            changes["compile"] = changes["compile"] == "on"
        with _arguments_of_the_user():
            return dataclasses.replace(training, **changes)


def demo(
    *,
    out: Path = Path("demo-run"),
    seeds: int = 1,
    steps: int | None = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Train a small SwitchHead and its dense twins on English, and compare them.

    Takes a few minutes without a GPU. Prints a table and a sample of each model's text, saves a plot of the losses.

    Args:
        out: directory for everything it makes; an earlier demo there is replaced.
        seeds: runs of each model, to tell differences from chance.
        steps: steps of each run; otherwise the recipes'.
    """
    from switchhead.demo import demo, render

    with _arguments_of_the_user():
        report = demo(out=out, seeds=seeds, steps=steps, device=device)
    if as_json:
        _print_json(dataclasses.asdict(report))
    else:
        print(render(report))


def train(
    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE", help="see `switchhead recipes`")],
    /,
    *,
    data: str,
    valid: str | None = None,
    out: Path | None = None,
    resume: bool = False,
    device: Device = "auto",
    settings: Annotated[TrainingSettings, tyro.conf.arg(name="")] = TrainingSettings(),
    as_json: Json = False,
) -> None:
    """Train a recipe's model on text, into a run directory.

    Args:
        data: training text, text:FILE or jsonl:GLOB#field.
        valid: validation text; otherwise the tail of the training text.
        out: the run directory; otherwise runs/RECIPE.
        resume: go on from the newest checkpoint of the run directory.
    """
    from switchhead.train import train

    chosen = _recipe(recipe)
    training = settings.apply(chosen.training)
    result = train(
        model=chosen.model,
        training=training,
        data=data,
        valid=valid,
        out=out or Path("runs") / recipe,
        recipe=recipe,
        resume=resume,
        device=device,
    )
    validation = result.validation
    if as_json:
        _print_json(
            {
                "run": str(result.run),
                "step": result.step,
                "finished": result.finished,
                "validation": validation and _scores(validation),
                "tokens_per_second": result.tokens_per_second,
            }
        )
        return
    print(f"{result.run}: step {result.step} of {training.steps}")
    if validation is not None:
        print(_score_lines(validation))
    if not result.finished:
        print("stopped early; the same command with --resume goes on from here")


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
    with _arguments_of_the_user():
        result = evaluate(loaded.model, loaded.vocabulary, data, chunk_length=chunk_length, batch_size=batch_size)
    if as_json:
        _print_json({"run": str(loaded.directory), "step": loaded.step, "data": data, **_scores(result)})
    else:
        print(f"{loaded.directory} at step {loaded.step}: {data}")
        print(_score_lines(result))


def generate(
    run: tyro.conf.Positional[RunPath],
    /,
    *,
    prompt: str = "",
    max_new_tokens: int = 200,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Let a trained model continue a text.

    Args:
        prompt: the text to continue.
        max_new_tokens: length of the continuation, at most.
        temperature: below 1 is safer, above 1 bolder, 0 always takes the likeliest token.
        top_k: sample from the likeliest k tokens only.
        seed: of the sampling.
    """
    from switchhead.eval import generate
    from switchhead.train import load_run

    loaded = load_run(run, device=device)
    with _arguments_of_the_user():
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
        _print_json({"run": str(loaded.directory), "step": loaded.step, "prompt": prompt, "continuation": continuation})
    else:
        print(prompt + continuation)


def recipes(
    name: Annotated[tyro.conf.Positional[str] | None, tyro.conf.arg(metavar="[RECIPE]", help="show this one")] = None,
    /,
    *,
    as_json: Json = False,
) -> None:
    """List the recipes, or show one with everything it sets."""
    from switchhead.recipes import get_recipe, recipe_names

    if name is not None:
        _show_recipe(_recipe(name), as_json=as_json)
        return
    summaries = [_summary(get_recipe(name)) for name in recipe_names()]
    if as_json:
        _print_json(summaries)
        return
    rows = [
        (s["name"], f"{s['parameters']:,}", f"{s['active_parameters']:,}", s["table"] or "", s["dataset"])
        for s in summaries
    ]
    print(_table(("name", "parameters", "active", "table", "dataset"), rows, right_aligned=(1, 2)))


def doctor(*, as_json: Json = False) -> None:
    """Say what this machine has, and which implementation runs on it and why."""
    from switchhead.doctor import examine, render

    report = examine()
    if as_json:
        _print_json(dataclasses.asdict(report))
    else:
        print(render(report))


def bench(
    what: tyro.conf.Positional[Literal["layer"]],
    /,
    *,
    layers: tuple[str, ...] = (),
    lengths: tuple[int, ...] = (),
    routings: tuple[str, ...] = (),
    positions: Literal["rotary", "none", "relative"] = "rotary",
    as_json: Json = False,
) -> None:
    """Time a layer, forward and backward, against dense and grouped-query attention; needs a CUDA device.

    Args:
        layers: of switchhead.bench.LAYERS; all by default.
        lengths: of sequences; otherwise the layer's own.
        routings: uniform, skewed, trained; all by default.
        positions: of all layers.
    """
    from switchhead.bench import LAYERS, NAMES, as_table, bench_layer

    for given, known in ((layers, LAYERS), (routings, NAMES)):
        if unknown := set(given) - set(known):
            raise UsageError(f"{', '.join(sorted(unknown))} unknown; use {', '.join(known)}")
    rows = []
    measured = bench_layer(layers or LAYERS, lengths=lengths or None, routings=routings or NAMES, positions=positions)
    for row in measured:
        rows.append(row)
        print(as_table([row]).splitlines()[-1], file=sys.stderr, flush=True)
    if as_json:
        _print_json([dataclasses.asdict(row) for row in rows])
    else:
        print(as_table(rows))


COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "train": train,
    "eval": evaluate,
    "generate": generate,
    "recipes": recipes,
    "doctor": doctor,
    "bench": bench,
}


@contextlib.contextmanager
def _arguments_of_the_user() -> Iterator[None]:
    """Blame a `ValueError` on the arguments: what is called here takes them as they are."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def _message(error: Exception) -> str:
    """One line for an error: the message where it is meant for users, with its type where it may not be."""
    from switchhead.errors import SwitchHeadError

    if isinstance(error, ModuleNotFoundError):
        return f"this needs the package {error.name!r}: pip install 'switchhead[train]'"
    text = " ".join(str(error).split())
    if isinstance(error, UsageError | SwitchHeadError | ValueError):
        return text
    return f"{type(error).__name__}: {text} (--debug shows where)"


def _recipe(name: str) -> Recipe:
    from switchhead.recipes import UnknownRecipeError, get_recipe

    try:
        return get_recipe(name)
    except UnknownRecipeError as error:
        raise UsageError(str(error)) from error


def _summary(recipe: Recipe) -> dict[str, Any]:
    from switchhead.accounting import count_parameters

    count = count_parameters(recipe.model)
    return {
        "name": recipe.name,
        "parameters": count.total,
        "active_parameters": count.active,
        "table": recipe.table,
        "dataset": recipe.dataset,
        "note": recipe.note,
    }


def _show_recipe(recipe: Recipe, *, as_json: bool) -> None:
    summary = _summary(recipe)
    model = {name: getattr(recipe.model, name) for name in type(recipe.model).__annotations__}
    training = dataclasses.asdict(recipe.training)
    if as_json:
        _print_json({**summary, "model": model, "training": training})
        return
    for title, values in (("", summary), ("model", model), ("training", training)):
        if title:
            print(f"\n{title}")
        width = max(map(len, values))
        for key, value in values.items():
            print(f"  {key:<{width}}  {f'{value:,}' if key.endswith('parameters') else value}")


def _scores(result: Any) -> dict[str, float | int]:
    return {
        "loss": result.loss,
        "perplexity": result.perplexity,
        "bits_per_byte": result.bits_per_byte,
        "tokens": result.tokens,
        "bytes": result.bytes,
    }


def _score_lines(result: Any) -> str:
    return (
        f"perplexity {result.perplexity:.4f}, {result.bits_per_byte:.4f} bits per byte "
        f"({result.tokens:,} tokens, {result.bytes:,} bytes)"
    )


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right_aligned: Sequence[int]) -> str:
    """Columns separated by two spaces, as readable in a terminal as in a pipe."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right_aligned else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
