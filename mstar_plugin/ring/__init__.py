"""The ring cache: a fixed horizon of frame slots per layer, overwritten in place."""
