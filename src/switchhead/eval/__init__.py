"""What a trained model is worth: scores of text and of tasks, and text."""

from switchhead.eval.blimp import evaluate_blimp
from switchhead.eval.cbt import evaluate_cbt
from switchhead.eval.comparison import Comparison, compare
from switchhead.eval.generation import generate
from switchhead.eval.lambada import evaluate_lambada
from switchhead.eval.language_model import LanguageModel, load_language_model
from switchhead.eval.likelihood import Likelihood, Request, encode_request, score_continuations
from switchhead.eval.perplexity import Evaluation, evaluate, score_tokens
from switchhead.eval.results import Score, TaskResult
from switchhead.eval.tasks import TASKS, Settings, evaluate_tasks

__all__ = [
    "TASKS",
    "Comparison",
    "Evaluation",
    "LanguageModel",
    "Likelihood",
    "Request",
    "Score",
    "Settings",
    "TaskResult",
    "compare",
    "encode_request",
    "evaluate",
    "evaluate_blimp",
    "evaluate_cbt",
    "evaluate_lambada",
    "evaluate_tasks",
    "generate",
    "load_language_model",
    "score_continuations",
    "score_tokens",
]
