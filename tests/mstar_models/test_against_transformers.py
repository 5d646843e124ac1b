"""A plain config.json and the transformers configuration made from it give the same declaration."""

import copy
import json
from pathlib import Path

import pytest

from mstar_plugin.adapters import find_adapter

transformers = pytest.importorskip("transformers")

FILES = sorted((Path(__file__).parent / "published").glob("*.json"))
REMOTE_CODE_ONLY = {"deepseek"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_declaration_is_that_of_the_configuration_object(file: Path) -> None:
    config = json.loads(file.read_text())
    if config["model_type"] in REMOTE_CODE_ONLY:
        pytest.skip(f"{config['model_type']} has no configuration class in transformers")
    values = copy.deepcopy(config)
    hf_config = transformers.CONFIG_MAPPING[values.pop("model_type")](**values)
    adapter = find_adapter(config["architectures"])
    assert adapter.declare(hf_config) == adapter.declare(config)
