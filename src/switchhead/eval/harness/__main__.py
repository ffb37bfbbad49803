"""The harness's command line, with the model `switchhead` and the tasks `switchhead_*`."""

import sys

from lm_eval.__main__ import cli_evaluate

from switchhead.eval.harness import TASKS


def main() -> None:
    """Run `lm_eval` as it is; our tasks are found beside its own, unless other ones are asked for."""
    if len(sys.argv) > 1 and "--include_path" not in sys.argv and not {"-h", "--help"} & set(sys.argv):
        sys.argv += ["--include_path", str(TASKS)]
    cli_evaluate()


if __name__ == "__main__":
    main()
