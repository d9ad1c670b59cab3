"""msrl: post-train language models by DAPO and DPO with Ray, Megatron-core and vLLM."""

__version__ = "0.1.0"
