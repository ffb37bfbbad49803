"""Several configurations trained alike and compared: the paper's search for heads and experts, and its ablation."""

from switchhead.search.ablation import ablate, ablation_recipes
from switchhead.search.procedure import search, search_recipes
from switchhead.search.report import Report
from switchhead.search.trials import Trial

__all__ = ["Report", "Trial", "ablate", "ablation_recipes", "search", "search_recipes"]
