"""A model is loaded whole or not at all: no weight is ever random, and learner and reference begin with the same."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from helpers import PACKAGE
from processes import python_path
from safetensors.torch import load_file, save_file
from short_runs import SMALL, run_in_process

from grpo_lab.policy import models
from grpo_lab.policy.critic import open_critic
from grpo_lab.policy.model_folder import check_weights
from grpo_lab.policy.models import load_model, read_model
from grpo_lab.tasks.merged_adapter import merged
from grpo_lab.tricks.precision import LmHead
from grpo_lab.types import Tensor

DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def copied(tiny_base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_base, tmp_path / "model"))


def change(folder: Path, changed: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    changed(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def configure(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def lose(folder: Path) -> str:
    change(folder, lambda weights: [weights.pop(DOWN), weights.pop("model.norm.weight")])
    return rf"2 missing \({DOWN}, model\.norm\.weight\)"


def lose_the_tied_head_and_its_embedding(folder: Path) -> str:
    change(folder, lambda weights: weights.pop("model.embed_tokens.weight"))
    return r"missing \(.*model\.embed_tokens\.weight"


def gain(folder: Path) -> str:
    change(folder, lambda weights: weights.update({"model.other": torch.zeros(1)}))
    return r"1 unknown \(model\.other\)"


def reshape(folder: Path) -> str:
    change(folder, lambda weights: weights.update({DOWN: weights[DOWN].T.contiguous()}))
    return rf"1 of another shape \({DOWN} \[.*\] instead of \[.*\]\)"


def more_layers(folder: Path) -> str:
    configure(folder, num_hidden_layers=7)
    return r"missing \(model\.layers\.\d.*, \.\.\.\)"


def fewer_layers(folder: Path) -> str:
    configure(folder, num_hidden_layers=1)
    return r"unknown \(model\.layers\.1"


def wider(folder: Path) -> str:
    configure(folder, hidden_size=96)
    return "of another shape"


def more_tokens(folder: Path) -> str:
    configure(folder, vocab_size=999)
    return r"1 of another shape \(model\.embed_tokens\.weight \[\d+, \d+\] instead of \[999, \d+\]\)"


LACKS = [
    lose, lose_the_tied_head_and_its_embedding, gain, reshape, more_layers, fewer_layers, wider, more_tokens,
]  # fmt: skip


@pytest.mark.parametrize("damage", LACKS)
def test_an_incomplete_model_is_refused_with_the_names_of_its_weights(copied: Path, damage) -> None:
    """By the headers before loading, and by whatever loads it."""
    said = damage(copied)
    for load in (check_weights, lambda folder: load_model(folder, LmHead.same)):
        with pytest.raises(ValueError, match=rf"the weights in {copied} are not those of its config\.json: .*{said}"):
            load(copied)


def test_a_tied_head_and_buffers_may_be_absent_or_there(copied: Path) -> None:
    """As published models have them: a head beside the embedding that it is, and rotary frequencies of old versions."""

    def add(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    assert "lm_head.weight" not in load_file(copied / "model.safetensors")
    plain = load_model(copied, LmHead.same).state_dict()
    change(copied, add)
    check_weights(copied)
    assert all(
        torch.equal(tensor, plain[name]) for name, tensor in load_model(copied, LmHead.same).state_dict().items()
    )


def test_critic_and_merged_adapter_come_through_the_same_door(
    copied: Path, tmp_path: Path, make_run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_LAB_CACHE", str(tmp_path / "cache"))
    learner, run = load_model(copied, LmHead.same), make_run("recipe=ppo")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (adapter / "adapter_model.safetensors").touch()
    lose(copied)
    with pytest.raises(ValueError, match="2 missing"):
        open_critic(
            run.critic, copied, learner, run.optimizer, run.learner_precision, run.microbatching, torch.device("cpu"), 0
        )
    with pytest.raises(ValueError, match="2 missing"):
        merged(adapter, copied, "model.path")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_dir() and path.name != "merged"]


def test_weights_are_read_in_one_place_of_the_package() -> None:
    """Every `from_pretrained` is of a tokenizer or a configuration, but for the one in `read_model` and for headers."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        tree = ast.walk(ast.parse(text)) if "from_pretrained" in text else ()
        for function in [node for node in tree if isinstance(node, ast.FunctionDef)]:
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and node.attr == "from_pretrained":
                    owner = ast.unparse(node.value).removeprefix("transformers.")
                    if owner not in ("AutoTokenizer", "AutoConfig", "LoraConfig"):
                        found.append((path.relative_to(PACKAGE).as_posix(), function.name, owner))
    assert sorted(found) == [
        ("policy/model_folder.py", "check_weights", "type(empty)"),
        ("policy/models.py", "read_model", "AutoModelForCausalLM"),
    ]


def test_no_run_begins_with_an_incomplete_model_and_no_folder_is_left(copied: Path, tmp_path: Path) -> None:
    more_layers(copied)
    with pytest.raises(ValueError, match=r"missing \(model\.layers"):
        run_in_process(tmp_path / "runs", "model=hf", f"model.path={copied}", *SMALL)
    assert not (tmp_path / "runs").exists()


@pytest.mark.extended
def test_a_reference_with_other_weights_than_the_learner_is_an_error(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the same files give other numbers the second time, as random ones would."""
    read = []

    def unlike(folder: Path, dtype: torch.dtype, **chosen: object) -> transformers.PreTrainedModel:
        model = read_model(folder, dtype, **chosen)
        read.append(folder)
        if len(read) == 2:
            with torch.no_grad():
                next(model.parameters())[0, 0] += 1e-3
        return model

    monkeypatch.setattr(models, "read_model", unlike)
    with pytest.raises(
        ValueError, match=r"changed while loading \(fingerprint \w+ for the learner, \w+ for its reference\)"
    ):
        run_in_process(tmp_path / "runs", "kl=k3_loss", *SMALL)
    assert len(read) == 2


@pytest.mark.extended
def test_weights_are_checked_beside_a_plugin_that_has_loaded_a_part_of_transformers(
    tiny_base: Path, tmp_path: Path
) -> None:
    """`transformers.logging` is then missing, since transformers is loaded lazily and replaces itself meanwhile."""
    (tmp_path / "my_plugin.py").write_text("import transformers.utils.chat_template_utils\n")
    code = (
        "import sys; from pathlib import Path; from grpo_lab.config.hydra_setup import bootstrap;"
        "bootstrap(['plugins=my_plugin']);"
        "from grpo_lab.policy.model_folder import check_weights; check_weights(Path(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_base)], capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": python_path(tmp_path, PACKAGE.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
