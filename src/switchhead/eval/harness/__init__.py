"""Our models and tasks in the lm-evaluation-harness; importing this registers the model `switchhead` there.

The harness finds models in its own package only, so that its command line is started through ours:

    python -m switchhead.eval.harness run --model switchhead --model_args pretrained=RUN --tasks hellaswag
"""

from switchhead.eval.harness.model import TASKS, SwitchHeadLM

__all__ = ["TASKS", "SwitchHeadLM"]
