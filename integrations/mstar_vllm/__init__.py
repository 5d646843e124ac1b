"""The vLLM plugin. Inside this package a page is called a block, as vLLM does."""
