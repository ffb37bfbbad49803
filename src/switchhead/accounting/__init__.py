"""Arithmetic of a configuration: parameters, multiply-accumulates, numbers kept, and matching by them."""

from switchhead.accounting.attention import AttentionCost, Convention, attention_cost, key_value_numbers
from switchhead.accounting.matching import match_d_ff
from switchhead.accounting.parameters import Count, ParameterCount, count_parameters

__all__ = [
    "AttentionCost",
    "Convention",
    "Count",
    "ParameterCount",
    "attention_cost",
    "count_parameters",
    "key_value_numbers",
    "match_d_ff",
]
