"""Reading a Hugging Face configuration: nested text models, several names for one thing, clear
errors.

Everything an adapter knows comes through `ConfigReader`, so that a transformers configuration
object and the plain mapping of a `config.json` give the same declaration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mstar_plugin.adapters.interface import HFConfig

NESTED_TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")

ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
        "num_key_value_heads": (
            "num_key_value_heads",
            "num_kv_heads",
            "n_head_kv",
            "n_kv_heads",
            "multi_query_group_num",
            "num_attention_groups",
        ),
        "hidden_size": ("hidden_size", "n_embd", "d_model", "n_embed"),
        "max_position_embeddings": (
            "max_position_embeddings",
            "n_positions",
            "max_seq_len",
            "seq_length",
            "max_sequence_length",
        ),
    }
)


def plain_mapping(hf_config: HFConfig) -> Mapping[str, Any]:
    """The configuration as a mapping. Raises TypeError for anything that is neither kind."""
    if isinstance(hf_config, Mapping):
        return hf_config
    if hasattr(hf_config, "to_dict"):
        return hf_config.to_dict()
    raise TypeError(
        f"hf_config must be a mapping or have to_dict(), got {type(hf_config).__name__}: "
        "pass a transformers configuration or the content of config.json"
    )


def text_mapping(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model, found below one of `NESTED_TEXT_KEYS` at any
    depth.
    """
    for key in NESTED_TEXT_KEYS:
        nested = config.get(key)
        if nested is None:
            continue
        if not isinstance(nested, Mapping):
            raise ValueError(f"{key} must be a mapping, got {nested!r}")
        if nested:
            return text_mapping(nested)
    return config


def architectures_of(hf_config: HFConfig) -> tuple[str, ...]:
    """The entries of `architectures`, none where a config has none."""
    named = plain_mapping(hf_config).get("architectures")
    if named is None:
        return ()
    if not isinstance(named, list | tuple) or not all(isinstance(name, str) for name in named):
        raise ValueError(f"architectures must be a list of names, got {named!r}")
    return tuple(named)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigReader:
    """Typed access to the text part of a configuration.

    `defaults` stands in for keys that published files of the family leave out; a key that is there
    and null is None. Every error is a ValueError whose text starts with the key.
    """

    values: Mapping[str, Any]
    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(cls, hf_config: HFConfig, *, defaults: Mapping[str, Any] | None = None) -> ConfigReader:
        config = plain_mapping(hf_config)
        text = text_mapping(config)
        named = architectures_of(config) or architectures_of(text)
        architecture = named[0] if named else str(text.get("model_type", "unknown"))
        return cls(values=text, architecture=architecture, defaults=defaults or {})

    def for_layer(self, index: int) -> ConfigReader:
        """The configuration with what `per_layer_config` changes for layer `index`."""
        changes = self.mapping("per_layer_config").items()
        own = [values for key, values in changes if _layer_index(key) == index]
        if not own:
            return self
        if not isinstance(own[0], Mapping):
            raise ValueError(f"per_layer_config must map layers to values, got {own[0]!r}")
        return replace(self, values={**self.values, **own[0]})

    def has(self, key: str) -> bool:
        """Whether the config or the family's defaults speak of `key`, be it null."""
        names = ALIASES.get(key, (key,))
        return key in self.defaults or any(name in self.values for name in names)

    def get(self, key: str) -> Any:
        """The value under `key` or another of its names, else the family's default."""
        if key not in ALIASES:
            return self.values.get(key) if key in self.values else self.defaults.get(key)
        found = [self.values[name] for name in ALIASES[key] if name in self.values]
        if not found:
            return self.defaults.get(key)
        return next((value for value in found if value is not None), None)

    def count(self, key: str) -> int:
        """A positive integer. Raises ValueError where it is missing."""
        value = self.optional_count(key)
        if value is None:
            raise ValueError(
                f"{key} must be in the config of {self.architecture}, got none: "
                f"looked for {', '.join(ALIASES.get(key, (key,)))}"
            )
        return value

    def optional_count(self, key: str) -> int | None:
        """A positive integer, or None where the key is absent."""
        value = self.get(key)
        return None if value is None else _checked_count(key, value)

    def whole_number(self, key: str) -> int:
        """An integer of at least 0, and 0 where the key is absent."""
        value = self.get(key)
        if value is None:
            return 0
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{key} must be an integer of at least 0, got {value!r}")
        return value

    def counts(self, key: str, num_layers: int) -> tuple[int, ...]:
        """One positive integer per layer, from a list of that length or from one number for all
        layers.
        """
        value = self.get(key)
        if isinstance(value, Sequence) and not isinstance(value, str):
            if len(value) != num_layers:
                raise ValueError(
                    f"{key} must have one entry per layer ({num_layers}), got {len(value)}"
                )
            return tuple(_checked_count(key, entry) for entry in value)
        return (self.count(key),) * num_layers

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{key} must be true or false, got {value!r}")
        return value

    def number(self, key: str) -> float | None:
        """A number, or None where the key is absent."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{key} must be a number, got {value!r}")
        return float(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """A nested mapping, empty where the key is absent."""
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ValueError(f"{key} must be a mapping, got {value!r}")
        return value

    def sequence(self, key: str, *, length: int) -> tuple[Any, ...] | None:
        """A list of exactly `length` entries (one per layer), or None where the key is absent."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ValueError(f"{key} must be a list, got {value!r}")
        if len(value) != length:
            raise ValueError(f"{key} must have one entry per layer ({length}), got {len(value)}")
        return tuple(value)


def _layer_index(key: object) -> int:
    if not str(key).isdecimal():
        raise ValueError(f"per_layer_config must be keyed by layer index, got {key!r}")
    return int(str(key))


def _checked_count(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{key} must be a positive integer, got {value!r}")
    return value
