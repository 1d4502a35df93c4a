"""Models of the hub and in folders: what is refused, in words about what to do, and that no code of a model runs."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from grpo_lab.tasks.hub import find_model


@pytest.fixture
def copied(tiny_base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_base, tmp_path / "copied"))


def write_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("place", ["tokenizer_config.json", "config.json"])
def test_code_that_comes_with_a_model_is_never_run(copied: Path, monkeypatch, place: str) -> None:
    """Not even where a person would answer yes to the question that transformers asks."""
    ran = copied / "ran"
    (copied / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own: ...\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 5))
    if place == "config.json":
        own = {"AutoModelForCausalLM": "own.Own", "AutoConfig": "own.Own"}
        write_json(copied / place, auto_map=own, model_type="own", architectures=["Own"])
        message = "brings code of its own, which is never run"
    else:
        write_json(copied / place, auto_map={"AutoTokenizer": ["own.Own", None]}, tokenizer_class="Own")
        message = "its tokenizer is code of its own, which is never run"
    with pytest.raises(ValueError, match=message):
        find_model(str(copied), "", "model.path")
    assert not ran.exists()


def test_weights_that_could_run_code_are_refused(copied: Path) -> None:
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"must hold safetensors, got pytorch_model.bin .*convert it"):
        find_model(str(copied), "", "model.path")


def test_a_model_that_the_hub_does_not_give_comes_with_the_way_without_a_network(monkeypatch) -> None:
    def offline(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    wanted = (
        r"the model 'no/such' is no local folder, and the hub did not give it \(HF_HUB_OFFLINE is set\): Cannot find"
        r".* `hf download no/such --local-dir FOLDER`, and give FOLDER as model.path"
    )
    with pytest.raises(ValueError, match=wanted):
        find_model("no/such", "", "model.path")
    for place in ("/no/such", "~/no", "./no", "such", "no/such/model"):
        with pytest.raises(ValueError, match=rf"model\.path must be an existing folder, got {place}: "):
            find_model(place, "", "model.path")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"model\.path must be a folder with a config\.json, got {tmp_path}: "):
        find_model(str(tmp_path), "", "model.path")
