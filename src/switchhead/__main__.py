"""`python -m switchhead`: the same as the `switchhead` command."""

import sys

from switchhead.cli import main

sys.exit(main())
