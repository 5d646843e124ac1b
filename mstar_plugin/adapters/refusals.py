"""What rules out retention in some models, as a noun phrase: "mstar cannot bound requests with
...".
"""

ALIBI = "ALiBi biases, which follow the place of a stored key and not its position"
LEARNED_POSITIONS = "learned positions, whose table ends"
LATENT = "latent attention (MLA) layers, which take no page list with gaps"
CROSS_ATTENTION = "cross-attention layers, which read every key of an encoder"
DUAL_CHUNK = "dual chunk attention, which renumbers positions inside every chunk"
UNKNOWN_POSITIONS = "positions that its config does not explain"
RINGS = "ring caches, which frames leave by a rule of their own"
RECURRENT = "recurrent layers, whose state cannot forget released tokens"
