"""The language model in Hugging Face's interface, registered with its Auto classes.

Importing this also registers our expert kernels for other models, see `switchhead.hf.experts`.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from switchhead.hf import experts
from switchhead.hf.configuration import SwitchHeadConfig
from switchhead.hf.modeling import SwitchHeadForCausalLM, SwitchHeadModel
from switchhead.hf.outputs import SwitchHeadCausalLMOutput, SwitchHeadModelOutput

AutoConfig.register(SwitchHeadConfig.model_type, SwitchHeadConfig)
AutoModel.register(SwitchHeadConfig, SwitchHeadModel)
AutoModelForCausalLM.register(SwitchHeadConfig, SwitchHeadForCausalLM)

__all__ = [
    "SwitchHeadCausalLMOutput",
    "SwitchHeadConfig",
    "SwitchHeadForCausalLM",
    "SwitchHeadModel",
    "SwitchHeadModelOutput",
    "experts",
]
