"""Llama models that bound their KV cache unless the operator says otherwise.

`pip install .` is all it takes: the entry point in pyproject.toml announces the adapter, and it
wins over the one that mstar-plugin brings for the same architecture. A server then keeps the first
64 tokens of a stream and the last 1024, and its start-up report names `bounded_llama`.
"""

from mstar_plugin.adapters import DecoderAdapter
from mstar_plugin.kv.config import RetentionPolicy

ADAPTER = DecoderAdapter(
    name="bounded_llama",
    architectures=("LlamaForCausalLM",),
    retention=RetentionPolicy(context_budget=1024, protected_prefix=64),
)
