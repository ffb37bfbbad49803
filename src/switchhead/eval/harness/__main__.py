"""The harness's command line, with the model `switchhead` and the tasks `switchhead_*`."""

import sys

from lm_eval.__main__ import cli_evaluate

from switchhead.eval.harness import TASKS


def main() -> None:
    """Run `lm_eval` as it is; our tasks are found beside its own, unless other ones are asked for."""
    names = {argument.partition("=")[0] for argument in sys.argv}
    if len(sys.argv) > 1 and not {"-h", "--help", "--include_path"} & names:
        sys.argv += ["--include_path", str(TASKS)]
    cli_evaluate()


if __name__ == "__main__":
    main()
