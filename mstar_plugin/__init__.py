"""Engine-neutral core: what a model declares about its KV, and how pages and rings behave."""
