"""Why retention cannot be right for some models, in words that complete "retention is refused:
...".
"""

ALIBI = "ALiBi biases grow with the distance between stored keys, which releasing pages shortens"
LEARNED_POSITIONS = "its learned position table ends, so a generation cannot go on past it"
LATENT = "latent attention (MLA) layers take no page list with gaps"
CROSS_ATTENTION = "cross-attention layers read the keys of an encoder, which must all stay"
DUAL_CHUNK = "dual chunk attention renumbers positions inside every chunk"
UNKNOWN_POSITIONS = "its config does not say how positions enter attention"
RECURRENT = "its recurrent layers keep a state that cannot forget released tokens"
