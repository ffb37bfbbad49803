"""What a trained model is worth: scores of text, and text. Knows models and tokens, no run directories."""

from switchhead.eval.generation import generate
from switchhead.eval.perplexity import Evaluation, evaluate, score_tokens

__all__ = ["Evaluation", "evaluate", "generate", "score_tokens"]
