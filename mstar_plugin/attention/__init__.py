"""Attention over a KV plan: the fp32 reference and the fast paths compared with it."""
