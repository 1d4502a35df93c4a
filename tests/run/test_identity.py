"""A run's identity tells apart what numbers do not: options of two classes with the same fields."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.run.identity import check_folder, run_identity
from grpo_lab.tracking.checksums import with_checksum


def identity(*words: str) -> dict[str, object]:
    return run_identity(compose_config(["world=tiny", *words]), "cpu")


def folder_of(path: Path, held: dict[str, object]) -> Path:
    (path / "run.json").write_text(json.dumps(with_checksum({"identity": held, "run_key": "key"})))
    return path


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "now,named",
    [
        ("reward=lenient", "reward.class: 'Strict' there, 'Lenient' now"),
        ("reward=inverted", "reward.class: 'Strict' there, 'Inverted' now"),
        ("curriculum=prioritized", "curriculum.class: 'Uniform' there, 'Prioritized' now"),
    ],
)
def test_another_option_with_the_same_numbers_is_another_run(tmp_path: Path, now: str, named: str) -> None:
    folder = folder_of(tmp_path, identity())
    assert check_folder(folder, identity())["run_key"] == "key"
    with pytest.raises(ValueError, match=named):
        check_folder(folder, identity(now))


@pytest.mark.extended
def test_parts_of_a_reward_are_options_too(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, identity("reward=strict_and_format"))
    with pytest.raises(ValueError, match=r"reward.parts.strict.class: 'Strict' there, 'Lenient' now"):
        check_folder(folder, identity("reward=strict_and_format", "reward@reward.parts.strict=lenient"))


def test_a_run_of_an_earlier_version_named_no_classes_and_goes_on(tmp_path: Path) -> None:
    held = {key: value for key, value in identity().items() if not key.endswith(".class")}
    assert check_folder(folder_of(tmp_path, held), identity())["run_key"] == "key"
