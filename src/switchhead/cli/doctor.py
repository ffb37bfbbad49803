"""`switchhead doctor`."""

from __future__ import annotations

import dataclasses

from switchhead.cli.common import Json, print_json


def doctor(*, as_json: Json = False) -> None:
    """Say what this machine has, and which implementation runs on it and why."""
    from switchhead.doctor import examine, render

    report = examine()
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        print(render(report))
