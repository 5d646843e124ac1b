"""`python -m mstar_plugin.adapters`: lists adapters, or says what a model's KV looks like and
costs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mstar_plugin.adapters.generic import adapter_for
from mstar_plugin.adapters.hf_config import architectures_of, text_mapping
from mstar_plugin.adapters.registry import load_adapters
from mstar_plugin.adapters.report import DTYPE_BYTES, Sizing, model_cost
from mstar_plugin.adapters.tables import adapters_json, adapters_text, model_json, model_text
from mstar_plugin.kv.config import RetentionPolicy

DEFAULT_STREAM_TOKENS = 32_768


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 on success, 2 where the input cannot be used, with one sentence on stderr."""
    options = _parser().parse_args(arguments)
    try:
        _require_adapters()
        print(_model_output(options) if options.path else _list_output(options), flush=True)
    except BrokenPipeError:
        # Whoever reads has had enough, as `head` does; the interpreter's own flush must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, ImportError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mstar_plugin.adapters",
        description="List the installed model adapters, or report on one model's KV.",
    )
    parser.add_argument("path", nargs="?", type=Path, help="a model folder or its config.json")
    parser.add_argument("--json", action="store_true", help="print JSON and no table")
    parser.add_argument(
        "--dtype", choices=sorted(DTYPE_BYTES), help="of the KV (default: that of the model)"
    )
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a page (default: 16)")
    parser.add_argument(
        "--stream-tokens", type=int, help="length to size for (default: the model's positions)"
    )
    parser.add_argument(
        "--step-tokens", type=int, default=2048, help="most tokens of a step (default: 2048)"
    )
    parser.add_argument("--context-budget", type=int, help="retention: tokens behind the prefix")
    parser.add_argument(
        "--protected-prefix", type=int, help="retention: tokens never released (default: 0)"
    )
    return parser


def _require_adapters() -> None:
    """Its own come by entry points too, so that a checkout that is not installed has none."""
    if not load_adapters().entries:
        raise ValueError(
            "mstar-plugin must be installed where its adapters are asked for, got "
            f"{sys.executable or 'a Python'} without any: use the Python of its environment"
        )


def _list_output(options: argparse.Namespace) -> str:
    registry = load_adapters()
    if options.json:
        return json.dumps(adapters_json(registry), indent=2)
    return adapters_text(registry)


def _model_output(options: argparse.Namespace) -> str:
    config = read_config(options.path)
    adapter = adapter_for(architectures_of(config))
    model = adapter.declare(config)
    sizing = Sizing(
        stream_tokens=options.stream_tokens or model.max_positions or DEFAULT_STREAM_TOKENS,
        page_size=options.page_size,
        step_tokens=options.step_tokens,
        dtype=options.dtype or model_dtype(config),
        retention=_policy(options) or model.retention,
    )
    cost = model_cost(model, adapter=adapter.name, sizing=sizing)
    if options.json:
        return json.dumps(model_json(model, cost), indent=2)
    return model_text(model, cost)


def _policy(options: argparse.Namespace) -> RetentionPolicy | None:
    if options.context_budget is None:
        if options.protected_prefix is not None:
            raise ValueError(
                "--context-budget must be given with --protected-prefix, "
                f"got --protected-prefix {options.protected_prefix} alone"
            )
        return None
    return RetentionPolicy(
        context_budget=options.context_budget, protected_prefix=options.protected_prefix or 0
    )


def read_config(path: Path) -> dict[str, Any]:
    """The content of `config.json`, or of the one in a model folder."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"path must be a config.json or a folder with one, got {path}: {error.strerror}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{file} must be JSON, got {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a mapping, got {type(config).__name__}")
    return config


def model_dtype(config: dict[str, Any]) -> str:
    """The dtype the checkpoint names, bfloat16 where it names none or another one."""
    text = text_mapping(config)
    for source in (config, text):
        for key in ("dtype", "torch_dtype"):
            if source.get(key) in DTYPE_BYTES:
                return str(source[key])
    return "bfloat16"


if __name__ == "__main__":
    sys.exit(main())
