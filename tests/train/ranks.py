"""What tests of several ranks share."""

import json

EXACT = {"dropout": 0.0, "expert_dropout": 0.0}
SHORT = {"steps": 3, "eval_every": 3, "save_every": 3, "usage_every": 3}
SIGTERM = {"call": "torch.optim:AdamW.step", "number": 2, "when": "before", "what": "SIGTERM"}


def measured(run, name):
    """The values of a metric of a run directory, in their order."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]
