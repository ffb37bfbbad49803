"""The `switchhead` command: reads arguments, calls the library, prints text or JSON.

Results go to standard output, progress and errors to standard error. Exit codes: 0 success, 1 failure, 2 usage.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

try:
    import tyro
except ImportError:
    raise SystemExit("switchhead: error: the command needs more packages: pip install 'switchhead[train]'") from None

from switchhead.cli.bench import bench
from switchhead.cli.common import UsageError
from switchhead.cli.demo import demo
from switchhead.cli.doctor import doctor
from switchhead.cli.evaluation import evaluate
from switchhead.cli.generation import generate
from switchhead.cli.matching import match
from switchhead.cli.prepare import prepare
from switchhead.cli.recipes import recipes
from switchhead.cli.resources import resources
from switchhead.cli.search import ablate, search
from switchhead.cli.training import train

# Commands import what they need when they run, so that `--help` and `doctor` answer without loading everything.

DESCRIPTION = """SwitchHead: mixture-of-experts attention for language models.

Start with `switchhead demo`. An error is one line; add --debug (or set SWITCHHEAD_DEBUG=1) for its traceback.
`switchhead --version` prints the version."""

COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "prepare": prepare,
    "train": train,
    "eval": evaluate,
    "generate": generate,
    "recipes": recipes,
    "resources": resources,
    "match": match,
    "search": search,
    "ablate": ablate,
    "doctor": doctor,
    "bench": bench,
}


def main(args: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; argument errors and `--help` exit by themselves."""
    args = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in args or os.environ.get("SWITCHHEAD_DEBUG", "0") not in ("", "0")
    args = [arg for arg in args if arg != "--debug"]
    if args == ["--version"]:
        from switchhead import __version__

        print(f"switchhead {__version__}")
        return 0
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
        _say("switchhead: interrupted")
        return 130
    except BrokenPipeError:
        # The reader has gone (`| head`). What is still buffered would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            raise
        _say(f"switchhead: error: {_message(error)}")
        return 2 if isinstance(error, UsageError) else 1
    return 0


def _say(line: str) -> None:
    """A line on standard error in one piece; `print` under `python -u`, as torchrun runs it, writes its end apart."""
    sys.stderr.write(f"{line}\n")


def _message(error: Exception) -> str:
    """One line for an error: the message where it is meant for users, with its type where it may not be."""
    from switchhead.errors import SwitchHeadError

    if isinstance(error, ModuleNotFoundError):
        return f"this needs the package {error.name!r}: pip install 'switchhead[train]'"
    text = " ".join(str(error).split())
    if isinstance(error, UsageError | SwitchHeadError | ValueError):
        return text
    return f"{type(error).__name__}: {text} (--debug shows where)"
