"""Composition: every option and every pair composes or is refused with reason and remedy."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from grpo_lab.cli import compose_config
from grpo_lab.compat import ERRORS, WARNINGS, IncompatibleRun, broken_warnings, check_compatible
from grpo_lab.config import AXES, RunConfig, conf_folder, options, slot_types, snake_case, to_run
from grpo_lab.identity import run_name


def option_names(group: str) -> list[str]:
    return sorted(path.stem for path in (conf_folder() / group).glob("*.yaml"))


SINGLES = [(axis, option) for axis in AXES for option in option_names(axis)]


@pytest.mark.parametrize("axis,option", SINGLES)
def test_every_option_composes_into_its_class(axis: str, option: str) -> None:
    run = to_run(compose_config([f"{axis}={option}"]))
    assert isinstance(getattr(run, axis), slot_types()[axis])
    check_compatible(run)


@pytest.mark.parametrize("recipe", option_names("recipe"))
@pytest.mark.parametrize("world", option_names("world"))
def test_every_recipe_composes_in_every_world(recipe: str, world: str) -> None:
    check_compatible(to_run(compose_config([f"recipe={recipe}", f"world={world}"])))


def test_recipes_are_the_published_rows() -> None:
    rows = {
        "plain": {"updates": 4, "kl": "NoKl", "scale": "GroupStd", "aggregation": "SequenceMean"},
        "grpo": {"updates": 1, "kl": "K3Loss", "scale": "GroupStd", "aggregation": "SequenceMean"},
        "dr_grpo": {"updates": 1, "kl": "NoKl", "scale": "NoScale", "aggregation": "Constant"},
    }
    for recipe, row in rows.items():
        run = to_run(compose_config([f"recipe={recipe}"]))
        assert run.updates.minibatches == row["updates"]
        for axis in ("kl", "scale", "aggregation"):
            assert type(getattr(run, axis)).__name__ == row[axis], (recipe, axis)
    assert to_run(compose_config(["recipe=grpo"])).kl.kl_coef == 0.04


def test_recipes_select_options_and_hold_no_numbers() -> None:
    for path in (conf_folder() / "recipe").glob("*.yaml"):
        assert set(OmegaConf.load(path)) <= {"defaults"}, path


def test_the_command_line_wins_over_the_recipe_and_the_recipe_over_the_default() -> None:
    assert type(to_run(compose_config(["recipe=dr_grpo"])).scale).__name__ == "NoScale"
    assert type(to_run(compose_config(["recipe=dr_grpo", "scale=group_std"])).scale).__name__ == "GroupStd"


def test_a_world_may_set_run_level_numbers_and_the_command_line_still_wins() -> None:
    assert to_run(compose_config(["world=tiny"])).engine.max_tokens == 24
    assert to_run(compose_config(["world=tiny", "engine.max_tokens=30"])).engine.max_tokens == 30


def test_numbers_of_other_groups_arrive_by_interpolation() -> None:
    run = to_run(compose_config(["aggregation=constant", "engine.max_tokens=33", "convention.std_ddof=1"]))
    assert run.aggregation.max_tokens == 33
    assert run.scale.ddof == 1


@cache
def sample_of_each_class() -> dict[str, list[object]]:
    """One live object per option of each axis, composed once."""
    return {
        axis: [getattr(to_run(compose_config([f"{axis}={option}"])), axis) for option in option_names(axis)]
        for axis in AXES
    }


def test_every_pair_of_options_of_different_axes_runs_or_is_refused_with_both_axes_and_a_remedy() -> None:
    """Composing is per option (above); a pair is judged on live objects, where the rules read their facts."""
    base = to_run(compose_config([]))
    samples = sample_of_each_class()
    judged = 0
    for (axis_a, olds), (axis_b, news) in itertools.combinations(samples.items(), 2):
        for a, b in itertools.product(olds, news):
            run = replace(base, **{axis_a: a, axis_b: b})
            try:
                for line in check_compatible(run):
                    assert "Remedy:" in line
            except IncompatibleRun as refusal:
                assert "Remedy:" in str(refusal)
            judged += 1
    sizes = [len(values) for values in samples.values()]
    assert judged == sum(a * b for a, b in itertools.combinations(sizes, 2)) > 500


def test_the_error_rules_hold_over_the_full_product_of_the_facts_they_read() -> None:
    """Against the rules written out once more as plain conditions on the facts."""
    samples, base = sample_of_each_class(), to_run(compose_config([]))
    axes = ("baseline", "scale", "group_filter", "updates")
    for values in itertools.product(*(samples[axis] for axis in axes), (1, 2, 8), (6, 16)):
        baseline, scale, group_filter, updates, group_size, problems = values
        run = replace(base, **dict(zip(axes, values)), group_size=group_size, problems_per_step=problems)
        lonely = group_size == 1
        expected = {
            "baseline_needs_a_group": lonely and baseline.group_relative,
            "scale_needs_a_group": lonely and scale.group_relative,
            "filter_needs_a_group": lonely and type(group_filter).__name__ == "Drop",
            "updates_divide_the_problems": problems % updates.minibatches > 0,
        }
        assert {r.name for r in ERRORS if r.broken_when(run)} == {n for n, broken in expected.items() if broken}


def rows_that_cover_every_pair() -> list[dict[str, str]]:
    """Choices of one option per axis, few of them, in which every pair of options of two axes occurs.

    Greedy: each row starts from a pair still missing and gives every other axis the option that meets
    most of what is missing.
    """
    choices = {axis: option_names(axis) for axis in AXES}
    missing = {
        frozenset([(axis_a, a), (axis_b, b)])
        for axis_a, axis_b in itertools.combinations(AXES, 2)
        for a, b in itertools.product(choices[axis_a], choices[axis_b])
    }
    rows = []
    while missing:
        row = dict(sorted(min(missing, key=sorted)))
        for axis in AXES:
            if axis not in row:
                row[axis] = max(
                    choices[axis],
                    key=lambda option: sum(frozenset([(axis, option), held]) in missing for held in row.items()),
                )
        missing -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        rows.append(row)
    return rows


def test_every_pair_of_options_of_different_axes_composes() -> None:
    rows = rows_that_cover_every_pair()
    assert len(rows) >= 15, "aggregation and baseline alone have 5 x 3 pairs"
    for row in rows:
        run = to_run(compose_config([f"{axis}={option}" for axis, option in row.items()]))
        for axis, option in row.items():
            named = snake_case(type(getattr(run, axis)).__name__)
            assert option.startswith(named) or named.startswith("no_") or axis == "updates", (axis, option)


@pytest.mark.parametrize(
    "rule,overrides",
    [
        ("baseline_needs_a_group", ["group_size=1", "scale=none"]),
        ("scale_needs_a_group", ["group_size=1", "baseline=none"]),
        ("filter_needs_a_group", ["group_size=1", "baseline=none", "scale=none", "group_filter=drop"]),
        ("updates_divide_the_problems", ["problems_per_step=6"]),
    ],
)
def test_each_error_rule_refuses_its_case_alone(rule: str, overrides: list[str]) -> None:
    run = to_run(compose_config(overrides))
    assert [r.name for r in ERRORS if r.broken_when(run)] == [rule]
    with pytest.raises(IncompatibleRun) as refusal:
        check_compatible(run)
    broken = next(r for r in ERRORS if r.name == rule)
    assert all(axis in str(refusal.value) for axis in broken.axes) and broken.remedy in str(refusal.value)


@pytest.mark.parametrize(
    "rule,overrides",
    [
        ("clip_cannot_act", ["updates=one"]),
        ("survivors_are_everyone", ["denominator=survivors"]),
        ("ratio_is_ignored", ["surrogate=reinforce"]),
        ("nothing_to_correct", ["correction=tis_token"]),
        ("filter_cannot_act", ["group_filter=drop"]),
        ("top_p_biases_the_ratio", ["engine.top_p=0.9"]),
    ],
)
def test_each_warning_rule_warns_of_its_case_alone(rule: str, overrides: list[str]) -> None:
    assert [r.name for r in broken_warnings(to_run(compose_config(overrides)))] == [rule]
    assert broken_warnings(to_run(compose_config([]))) == []


def test_every_rule_has_a_case_above() -> None:
    """A rule added without a test of its own fails here."""
    tested = {"baseline_needs_a_group", "scale_needs_a_group", "filter_needs_a_group", "updates_divide_the_problems"}
    warned = {
        "clip_cannot_act", "survivors_are_everyone", "ratio_is_ignored", "nothing_to_correct", "filter_cannot_act",
        "top_p_biases_the_ratio",
    }  # fmt: skip
    assert {rule.name for rule in ERRORS} == tested and {rule.name for rule in WARNINGS} == warned
    assert all(set(rule.axes) <= {field.name for field in fields(RunConfig)} for rule in ERRORS + WARNINGS)


def test_all_broken_rules_are_reported_at_once() -> None:
    run = to_run(compose_config(["group_size=1", "group_filter=drop", "problems_per_step=6"]))
    with pytest.raises(IncompatibleRun) as refusal:
        check_compatible(run)
    assert str(refusal.value).count("Remedy:") == 4


@pytest.mark.parametrize(
    "override,said",
    [
        ("surrogate.clip_low=-0.1", "Ppo.clip_low must be greater than 0, got -0.1"),
        ("surrogate.clip_high=nan", "Ppo.clip_high must be greater than 0"),
        ("group_size=0", "RunConfig.group_size must be at least 1, got 0"),
        ("engine.top_p=1.5", "top_p must be in (0, 1]"),
        ("optimizer.learning_rate=0", "learning_rate must be greater than 0"),
        ("convention.std_ddof=2", "ddof must be 0 or 1, got 2"),
        ("evaluation.pass_at=[9]", "pass_at must be between 1 and samples"),
        ("model=local", "model.path"),
    ],
)
def test_values_out_of_range_fail_with_field_value_and_rule(override: str, said: str) -> None:
    with pytest.raises(ValueError) as error:
        to_run(compose_config([override]))
    assert said in str(error.value)


@pytest.mark.parametrize(
    "override,said",
    [
        ("surrogate=ppoo", "ppo_higher"),  # the alternatives are listed
        ("sede=1", "sede"),
        ("surrogate.clip_lo=0.1", "clip_lo"),
        ("group_size=eight", "group_size"),
        ("group_filter.signal=outcome", "signal"),  # keep has no such field
    ],
)
def test_unknown_options_keys_and_types_fail_in_composition(override: str, said: str) -> None:
    with pytest.raises(Exception) as error:
        compose_config([override])
    assert said in str(error.value)


def test_names_come_from_the_choices_whatever_their_order() -> None:
    one = run_name("dr_grpo", ["recipe=dr_grpo", "seed=3", "truncation=mask_after", "budget.amount=5"])
    two = run_name("dr_grpo", ["budget.amount=5", "truncation=mask_after", "runs_dir=/x", "recipe=dr_grpo"])
    assert one == two == "dr_grpo,truncation=mask_after,budget.amount=5"
    assert run_name("plain", []) == "plain"
    long = run_name("plain", [f"task.key{i}={i}" for i in range(40)])
    assert len(long) <= 120 and long != run_name("plain", [f"task.key{i}={i + 1}" for i in range(40)])


def test_snake_case() -> None:
    assert [snake_case(n) for n in ("LeaveOneOut", "K3Loss", "NoKl", "Ppo", "TisToken")] == [
        "leave_one_out", "k3_loss", "no_kl", "ppo", "tis_token",
    ]  # fmt: skip


def test_options_of_an_axis_are_its_concrete_classes() -> None:
    assert set(options(slot_types()["baseline"])) == {"group_mean", "leave_one_out", "no_baseline"}


def test_a_users_own_trick_is_found_before_composition(tmp_path: Path) -> None:
    """A module on PYTHONPATH and a YAML in a folder of the user's own, nothing in the repository edited."""
    (tmp_path / "my_tricks.py").write_text(
        "from dataclasses import dataclass\n"
        "from grpo_lab.tricks.baseline import Baseline\n\n"
        "@dataclass(frozen=True)\n"
        "class HalfMark(Baseline):\n"
        "    mark: float\n"
        "    group_relative = False\n"
        "    def __call__(self, graded):\n"
        "        return graded.reward - self.mark\n"
    )
    (tmp_path / "conf" / "baseline").mkdir(parents=True)
    (tmp_path / "conf" / "baseline" / "half_mark.yaml").write_text(
        "# mine\ndefaults:\n  - /schema/baseline/half_mark@_here_\n  - _self_\nmark: 0.5\n"
    )
    shown = subprocess.run(
        [sys.executable, "-m", "grpo_lab.train", "plugins=[my_tricks]", "baseline=half_mark", "--cfg", "job"],
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "GRPO_LAB_CONFIG_PATH": str(tmp_path / "conf"),
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "mark: 0.5" in shown.stdout
