"""Model adapters, one file per architecture family."""
