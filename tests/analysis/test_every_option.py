"""Every option of the catalogue has a saved short run: it learns, and it acts or is listed as a no-op with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from every_option.results import (
    COMMAND,
    acting,
    documented_options,
    learns,
    options_table,
    read_results,
    reason,
)
from every_option.runs import axis_of, first_apart, is_default, options, settings, train, words_of

from grpo_lab.config.catalogue import plain_options


def test_every_option_has_a_result_or_a_reason_why_none() -> None:
    missing = [one for one in options() if one not in read_results() and one not in settings().left_out]
    assert not missing, (
        f"no short run of {', '.join(missing)}: {COMMAND} {' '.join(missing)} --runs runs, then make docs"
    )


def test_every_option_learns_but_for_those_with_a_reason() -> None:
    still = {option for option, found in read_results().items() if not learns(found["runs"])}
    assert still == set(settings().no_gain)


def test_exactly_the_options_that_change_nothing_are_listed_as_no_ops() -> None:
    idle = {one for one, found in read_results().items() if not is_default(one) and acting(found["runs"]) is None}
    unexplained = {one for one in idle if reason(settings().no_op, one) is None}
    assert not unexplained, "settings.yaml says why they are no-ops"
    named = {one for one in settings().no_op if "=" in one}
    axes = {one for one in settings().no_op if "=" not in one}
    assert named <= idle and axes <= {axis_of(one) for one in idle}


def test_the_settings_name_options_and_axes_that_exist() -> None:
    known = settings()
    assert set(known.axes) <= plain_options().keys()
    named = {*known.options, *known.elsewhere, *known.left_out, *known.no_gain}
    assert named | {one for one in known.no_op if "=" in one} <= set(options())
    assert read_results().keys() <= set(options())


def test_the_page_has_the_table_of_the_saved_results() -> None:
    assert [path for path, text in documented_options().items() if path.read_text() != text] == [], "run `make docs`"


def test_a_default_option_runs_without_the_numbers_of_another_one() -> None:
    words = words_of("reference=frozen", settings().options["reference=reset"])
    assert "kl=k3_loss" in words and not any(word.startswith("reference") for word in words)
    own = words_of("reference=reset", settings().options["reference=reset"])
    assert own == [*words[:-1], "reference=reset", *settings().options["reference=reset"]]


def test_the_first_step_apart_is_one_beyond_rounding() -> None:
    assert first_apart({1: 1.0, 2: 2.0}, {1: 1.0 + 1e-6, 2: 2.0}) is None
    assert first_apart({1: 1.0, 2: 2.0}, {1: 1.0, 2: 2.1}) == 2
    assert first_apart({1: 1.0, 2: 2.0}, {1: 1.0}) == 2
    assert first_apart({1: 0.0}, {1: 0.0}) is None


def test_a_failed_run_is_no_result(tmp_path: Path) -> None:
    folder, failure = train(["world=tiny", "kl.kl_coef=0.1"], 0, tmp_path)
    assert not folder and "no key 'kl.kl_coef'" in failure


@pytest.mark.parametrize(
    ("after", "apart", "said"), [(0.9, 1, "0.50 -> 0.90 |"), (0.9, None, "no-op here: the questions")]
)
def test_a_row_of_the_table(tmp_path: Path, after: float, apart: int | None, said: str) -> None:
    run = {
        "setting": [], "seed": 0, "before": 0.5, "after": 0.9, "default_after": 0.8, "counted": "train/updates",
        "share": 0.25, "beside": 0.0, "apart": apart, "no_op": False, "seconds": 1.0,
    }  # fmt: skip
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"question_filter=english": {"version": "1", "commit": "a", "runs": [run]}}))
    row = options_table(path).splitlines()[-1]
    assert said in row and row.startswith("| `question_filter=english` |")
    assert ("train/updates 0.25; other updates from step 1" in row) == (apart is not None)
