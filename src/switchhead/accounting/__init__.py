"""Arithmetic of a configuration: parameters, multiply-accumulates, numbers kept, memory, and matching by them."""

from switchhead.accounting.attention import attention_cost, key_value_numbers
from switchhead.accounting.cost import CONVENTIONS, Convention, Cost
from switchhead.accounting.feed_forward import feed_forward_cost
from switchhead.accounting.growth import LengthCost, cost_by_length, plot_growth
from switchhead.accounting.matching import match_d_ff, match_macs, match_parameters
from switchhead.accounting.model import Dtype, ModelResources, model_resources
from switchhead.accounting.parameters import Count, ParameterCount, count_parameters

__all__ = [
    "CONVENTIONS",
    "Convention",
    "Cost",
    "Count",
    "Dtype",
    "LengthCost",
    "ModelResources",
    "ParameterCount",
    "attention_cost",
    "cost_by_length",
    "count_parameters",
    "feed_forward_cost",
    "key_value_numbers",
    "match_d_ff",
    "match_macs",
    "match_parameters",
    "model_resources",
    "plot_growth",
]
