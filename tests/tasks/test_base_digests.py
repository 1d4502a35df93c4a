"""Base models that were changed on disk after they were made: none trains on in silence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from grpo_lab.tasks import shipped as bases
from grpo_lab.tasks.hub import find_model
from grpo_lab.tasks.shipped import find_shipped, shipped
from grpo_lab.tasks.warm_start import ArithmeticBase
from grpo_lab.tracking.checksums import MANIFEST, with_checksum

RECIPES = {base.file: ArithmeticBase.from_written(base.recipe) for base in shipped()}
KINDS = sorted({file.rpartition("-")[0] for file in RECIPES})
RESTORE = "install grpo_lab again, or restore the files with git"


def flip(path: Path) -> None:
    """One bit in the middle, as a bad disk leaves it; no length changes, and JSON mostly stays JSON."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRPO_LAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder of shipped bases, in its place."""
    folder = Path(shutil.copytree(bases.FOLDER, tmp_path / "bases"))
    monkeypatch.setattr(bases, "FOLDER", folder)
    monkeypatch.setattr(bases, "INDEX", folder / "index.json")
    return folder


def recipe_of(kind: str, base: int = 0) -> ArithmeticBase:
    return RECIPES[f"{kind}-{base}.safetensors"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_flip_in_a_shipped_base_is_refused_by_its_name(came: Path, own_cache: Path, kind: str) -> None:
    recipe_of(kind, 1).resolve()
    flip(came / f"{kind}-1.safetensors")
    shutil.rmtree(own_cache)
    with pytest.raises(ValueError, match=rf"{kind}-1\.safetensors is damaged: .*{RESTORE}"):
        recipe_of(kind, 1).resolve()
    assert not list(own_cache.glob("bases/*/config.json")), "nothing that could pass for a model"


def test_two_swapped_bases_are_both_refused(came: Path) -> None:
    swap(came / "sums_base-0.safetensors", came / "length_base-0.safetensors")
    for kind in ("sums_base", "length_base"):
        with pytest.raises(ValueError, match=rf"{kind}-0\.safetensors is damaged"):
            recipe_of(kind).resolve()
    recipe_of("sums_base", 1).resolve()


def edited(change: Callable[[list], object]) -> Callable[[Path], object]:
    def edit(index: Path) -> None:
        content = json.loads(index.read_text())
        change(content["bases"])
        index.write_text(json.dumps(content))

    return edit


EDITS: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda index: index.write_text(""), "is empty"),
    "no bases": (lambda index: index.write_text("[]"), "holds no JSON object"),
    "no bases, in today's form": (edited(lambda entries: entries.clear()), "is damaged"),
    "no seal": (lambda index: index.write_text('{"bases": []}'), "has no digest"),
    "missing": (lambda index: index.unlink(), "is missing"),
    "a lost entry": (edited(lambda entries: entries.pop()), "is damaged"),
    "another recipe": (edited(lambda entries: entries[0]["recipe"].update(guess_share=0.5)), "is damaged"),
    "another report": (edited(lambda entries: entries[0]["report"].update(accuracy=1.0)), "is damaged"),
    "another file": (edited(lambda entries: entries[0].update(file=entries[1]["file"])), "is damaged"),
    "another key": (edited(lambda entries: entries[0].update(key="0" * 16)), "is damaged"),
    "another digest": (edited(lambda entries: entries[0].update(sha256="0" * 64)), "is damaged"),
    "a flip": (flip, "is damaged|holds no JSON object|has no digest"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_index_that_was_changed_is_refused(came: Path, edit: str) -> None:
    """And no base is built anew in its place."""
    change, said = EDITS[edit]
    change(came / "index.json")
    with pytest.raises(ValueError, match=rf"index\.json.*({said}).*{RESTORE}"):
        find_shipped(recipe_of("tiny_base").key())


def test_every_entry_has_the_key_of_its_recipe_and_the_digest_of_its_file() -> None:
    for base in shipped():
        assert ArithmeticBase.from_written(base.recipe).key() == base.key and base.weights.is_file()


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "report.json",
    ],
)
def test_a_file_of_the_cache_that_changed_or_is_gone_is_named(name: str) -> None:
    recipe = recipe_of("tiny_base")
    folder = recipe.resolve()
    flip(folder / name)
    with pytest.raises(ValueError, match=f"{folder / name} is damaged: .*; remove {folder}, and the next start makes"):
        recipe.resolve()
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"{folder / name} is missing; remove {folder}"):
        recipe.resolve()
    shutil.rmtree(folder)
    assert recipe.resolve() == folder


def test_files_and_folders_of_the_cache_that_changed_places_are_refused() -> None:
    recipes = [recipe_of("tiny_base", base) for base in (0, 1)]
    one, other = (recipe.resolve() for recipe in recipes)
    swap(one / "model.safetensors", other / "model.safetensors")
    for recipe in recipes:
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
            recipe.resolve()
    swap(one / "model.safetensors", other / "model.safetensors")
    one.rename(one.with_name("aside"))
    other.rename(one)
    one.with_name("aside").rename(other)
    for recipe in recipes:
        with pytest.raises(ValueError, match="holds the files of"):
            recipe.resolve()


def test_digests_that_were_edited_or_emptied_are_refused() -> None:
    recipe = recipe_of("tiny_base")
    manifest = recipe.resolve() / MANIFEST
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"files": {}}))
    with pytest.raises(ValueError, match=f"{manifest} is damaged"):
        recipe.resolve()
    manifest.write_text("{}")
    with pytest.raises(ValueError, match=f"{manifest} has no digest"):
        recipe.resolve()
    assert with_checksum(content) == content, "and it held one"


def test_a_merged_adapter_that_changed_in_the_cache_is_refused(
    tiny_base: Path, tmp_path: Path, own_cache: Path
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {
        "peft_type": "LORA", "base_model_name_or_path": str(tiny_base), "r": 2, "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    weights = load_file(tiny_base / "model.safetensors")
    learnt = {}
    for name, matrix in weights.items():
        if "q_proj" in name:
            place = f"base_model.model.{name.removesuffix('.weight')}"
            learnt[f"{place}.lora_A.weight"] = matrix[:2].contiguous()
            learnt[f"{place}.lora_B.weight"] = matrix[:, :2].contiguous()
    save_file(learnt, adapter / "adapter_model.safetensors", {"format": "pt"})
    folder = find_model(str(adapter), "", "model.path")
    assert folder.is_relative_to(own_cache) and find_model(str(adapter), "", "model.path") == folder
    flip(folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"{folder}/model.safetensors is damaged: .*remove {folder}"):
        find_model(str(adapter), "", "model.path")
