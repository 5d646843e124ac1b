"""The adapter interface: what an author states about an architecture, once, for every engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from mstar_plugin.adapters.groups import DEFAULT_NODES, kv_specs_of, layouts_of

if TYPE_CHECKING:
    from mstar_plugin.kv.config import KVSpec, RetentionPolicy, StreamLayout
    from mstar_plugin.model_kv import ModelKV


class PretrainedConfigLike(Protocol):
    """What is read of a transformers `PretrainedConfig`: its plain form."""

    def to_dict(self) -> dict[str, Any]: ...


HFConfig = Mapping[str, Any] | PretrainedConfigLike


class Adapter(ABC):
    """Speaks for some architectures: turns their `config.json` into a declaration of their KV.

    `name` is unique among the adapters of one distribution; `architectures` are the entries of
    `architectures` in `config.json` that it answers for. An adapter holds no state, loads no
    weights and imports no engine.
    """

    name: str
    architectures: tuple[str, ...]

    @abstractmethod
    def declare(self, hf_config: HFConfig) -> ModelKV:
        """The KV of every attention layer.

        `hf_config` is a transformers configuration or the mapping read from `config.json`; a text
        model nested below `text_config` is found. Raises ValueError that names the key where one is
        missing or wrong.
        """

    def kv_specs(
        self, hf_config: HFConfig, *, max_seq_len: int | None = None
    ) -> tuple[KVSpec, ...]:
        """One `KVSpec` per KV resource: layers that store and release alike share one.

        `max_seq_len` bounds the positions of a stream where it is given, else the model's own bound
        does.
        """
        return kv_specs_of(self.declare(hf_config), nodes=DEFAULT_NODES, max_seq_len=max_seq_len)

    def layouts(
        self,
        hf_config: HFConfig,
        *,
        prompt_tokens: int,
        tokens_per_iteration: int = 1,
        retention: RetentionPolicy | None = None,
        max_seq_len: int | None = None,
    ) -> dict[str, dict[str, StreamLayout]]:
        """Per resource key and label, how the stream of one request grows, for use of the library
        without a server.

        A prompt of `prompt_tokens`, then `tokens_per_iteration` tokens for each iteration of the
        loop "decode". `retention` overrides the declared policy; layers with a window of their own
        have none.
        """
        return layouts_of(
            self.declare(hf_config),
            prompt_tokens=prompt_tokens,
            tokens_per_iteration=tokens_per_iteration,
            retention=retention,
            max_seq_len=max_seq_len,
        )
