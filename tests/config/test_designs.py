"""Designs of a kind: which arms follow from the tricks, what each contains, and what is refused before a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from declared_experiments import SAVED, saved_description

from grpo_lab.config.design import (
    Collapsed,
    CountPrediction,
    Kind,
    named_design,
    read_design,
    require_known_metrics,
)
from grpo_lab.sweeps.planned_runs import plan_runs
from grpo_lab.tracking.sweep_record import read_sweep, record_sweep, sweep_folder


def node(kind: str = "two_sided", **changes: Any) -> dict[str, Any]:
    declared = {
        "name": "parts",
        "question": "Which part helps?",
        "prediction": "The mask.",
        "kind": kind,
        "tricks": {
            "clip": ["surrogate=ppo_higher"],
            "token": ["aggregation=token_mean"],
            "mask": ["truncation=mask_after", "denominator=survivors"],
        },
        "primary": "eval/downstream/accuracy",
        "axis": "sampled_tokens",
        "seeds": [0, 1],
    }
    return {**declared, **changes}


@pytest.mark.parametrize(
    ("kind", "arms"),
    [
        ("add_one", ["base", "+clip", "+token", "+mask"]),
        ("leave_one_out", ["full", "-clip", "-token", "-mask"]),
        ("two_sided", ["base", "+clip", "+token", "+mask", "full", "-clip", "-token", "-mask"]),
        ("ladder", ["base", "+clip", "+clip+token", "+clip+token+mask"]),
        (
            "factorial",
            ["base", "+clip", "+token", "+mask", "+clip+token", "+clip+mask", "+token+mask", "+clip+token+mask"],
        ),
    ],
)
def test_the_arms_of_a_kind(kind: str, arms: list[str]) -> None:
    design = read_design(node(kind))
    assert list(design.arms) == arms and design.control == arms[0] and design.kind is Kind(kind)
    whole = {"clip", "token", "mask"}
    for arm in arms:
        named = set(filter(None, arm.removeprefix("base").replace("-", "+").split("+"))) - {"full"}
        on = whole - named if arm.startswith(("-", "full")) else named
        assert design.contents(arm) == on
        overrides = [word for trick in ("clip", "token", "mask") if trick in on for word in design.tricks[trick]]
        assert list(design.arms[arm]) == overrides


def test_a_two_sided_design_names_no_combination_twice() -> None:
    two = read_design(node(tricks={"clip": ["surrogate=ppo_higher"], "token": ["aggregation=token_mean"]}))
    assert list(two.arms) == ["base", "+clip", "+token", "full"]
    one = read_design(node(tricks={"clip": ["surrogate=ppo_higher"]}))
    assert list(one.arms) == ["base", "+clip"]


def test_the_runs_of_a_kind_run_seed_after_seed() -> None:
    plans = plan_runs(read_design(node("add_one", base=["recipe=dr_grpo"])), ["+experiments=parts"])
    assert [(plan.seed, plan.arm) for plan in plans] == [
        (seed, arm) for seed in (0, 1) for arm in ("base", "+clip", "+token", "+mask")
    ]
    assert plans[3].overrides == ("recipe=dr_grpo", "truncation=mask_after", "denominator=survivors", "seed=0")


TWINNED = {"plain": [], "clip": ["surrogate=ppo_higher"], "token": ["aggregation=token_mean"]}


def twinned(twin: Any, arms: dict[str, list[str]] = TWINNED, **changes: Any) -> Any:
    asked = {"arm": "clip", "metric": "eval/downstream/accuracy", "direction": "above"}
    changes = {"arms": arms, "control": "plain", "tricks": None, "predictions": [asked], **changes}
    return read_design(node("arms", twin=twin, **changes))


def test_a_twin_is_an_arm_and_each_prediction_is_judged_against_it_too() -> None:
    design = twinned(True, parts={"one": {"arms": ["plain", "clip"]}})
    assert list(design.arms) == ["plain", "clip", "token", "clip_twin"], "no axis of the arm token selects"
    assert design.arms["clip_twin"] == ("surrogate=ppo_higher", "twin=random", "twin.of=[surrogate]")
    assert design.twins == {"clip": "clip_twin"}
    assert design == twinned(["clip"], parts={"one": {"arms": ["plain", "clip"]}})
    assert [one.reference for one in design.predictions] == ["", "clip_twin"]
    assert design.parts["one"].arms == ("plain", "clip", "clip_twin")
    assert design.fingerprint() != twinned(None).fingerprint()
    assert twinned(None).fingerprint() == twinned(False).fingerprint()


def test_the_twin_of_a_kind() -> None:
    design = read_design(node("add_one", twin=True))
    assert list(design.arms)[-2:] == ["+clip_twin", "+mask_twin"]
    assert design.arms["+mask_twin"][-2:] == ("twin=random", "twin.of=[truncation]")
    assert design.contents("+mask") < design.contents("+mask_twin")


@pytest.mark.parametrize(
    ("twin", "arms", "message"),
    [
        (True, {"plain": [], "token": ["aggregation=token_mean"]}, "no arm sets an axis that selects"),
        (["plain"], TWINNED, "'plain' is no arm beside the control"),
        (["clap"], TWINNED, "choose from clip, token"),
        (["token"], TWINNED, "token sets no axis that selects"),
        ("clip", TWINNED, "true or a list of arms"),
        (["clip"], {**TWINNED, "clip_twin": []}, "rename it"),
    ],
)
def test_a_twin_that_cannot_be_is_refused(twin: Any, arms: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        twinned(twin, arms, predictions=[])


def by_hand(arms: dict[str, list[str]], control: str) -> Any:
    return read_design(node("arms", arms=arms, control=control, tricks=None))


def test_the_contents_of_arms_by_hand() -> None:
    masks = by_hand(
        {"score": [], "mask": ["truncation=mask_after"], "both": ["kl=k3_loss", "truncation=mask_after"]}, "score"
    )
    assert masks.contents("score") == frozenset()
    assert masks.contents("both") == {"kl=k3_loss", "truncation=mask_after"}
    # the whole as control: leaving one out is seen from what is left
    whole = by_hand({"all": ["kl=k3_loss", "scale=none"], "no kl": ["scale=none"]}, "all")
    assert whole.contents("all") - whole.contents("no kl") == {"kl=k3_loss"}
    # a key that every arm sets is a choice: the control's is none of the tricks
    choice = by_hand({"ppo": ["surrogate=ppo"], "cispo": ["surrogate=cispo", "updates=four"]}, "ppo")
    assert (choice.contents("ppo"), choice.contents("cispo")) == (frozenset(), {"surrogate=cispo", "updates=four"})


def test_one_run_on_each_base_model_is_the_default() -> None:
    by_default, said = (read_design(node(bases=8, seeds=seeds)) for seeds in (None, 1))
    assert by_default.seeds == tuple(range(8)) and by_default.fingerprint() == said.fingerprint()
    assert [by_default.base_of(seed) for seed in by_default.seeds] == list(range(8))
    with pytest.raises(ValueError, match=r"design\.seeds is missing"):
        read_design(node(seeds=None))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "two-sided"}, "design.kind: there is no 'two-sided'; choose from arms, add_one"),
        ({"tricks": {}}, "design.kind=two_sided needs design.tricks"),
        ({"tricks": {"clip": []}}, "design.tricks.clip changes nothing"),
        ({"tricks": {"a+b": ["kl=k3_loss"]}}, "rename it: base, full and the signs"),
        ({"tricks": {"full": ["kl=k3_loss"]}}, "rename it: base, full and the signs"),
        ({"tricks": {"a": ["kl=k3_loss"], "b": ["kl=k2_loss"]}}, "a and b both set kl, so they cannot be combined"),
        ({"arms": {"x": []}}, "design.arms follows from design.kind=two_sided and design.tricks: remove it"),
        ({"control": "base"}, "design.control follows from design.kind=two_sided"),
        ({"kind": "arms", "arms": {"x": []}, "control": "x"}, "design.tricks belong to a design of a kind"),
        ({"prediction": False}, "design.prediction: YAML reads no, off, yes and on as false: quote it"),
        (
            {"tricks": {False: ["kl=k3_loss"], "a": []}},
            "design.tricks, a name: YAML reads no, off, yes and on as false",
        ),
        ({"margin": 0}, "design.margin must be a number above 0 in the metric's unit"),
        (
            {"predictions": [{"arm": "+clip", "metric": "rollout/truncated", "direction": "within"}]},
            "predicted within a margin on rollout/truncated, but no margin is set",
        ),
        ({"collapsed": "drop"}, "design.collapsed: there is no 'drop'; choose from zero, last"),
        ({"changes": [{"arms": ["+clip"], "since": "today", "what": "x"}]}, "must give arms, a list; since, such as"),
        (
            {"changes": [{"arms": ["+clop"], "since": "2026-11-22T22:30:00Z", "what": "x"}]},
            "design.changes: there is no '.clop'; choose from",
        ),
        ({"counts": [{"arm": "+clip", "metric": "gap", "above": 0.1}]}, "one of at_least and at_most"),
        ({"counts": [{"arm": "+clip", "metric": "gap", "above": 0.1, "at_least": 1, "at_most": 2}]}, "design.counts"),
        ({"counts": [{"arm": "+clip", "metric": "gap", "above": "much", "at_least": 1}]}, "design.counts"),
        ({"counts": [{"arm": "+clip", "metric": "gap", "above": 0.1, "at_least": 1.5}]}, "design.counts"),
        ({"counts": [{"arm": "+clop", "metric": "gap", "above": 0.1, "at_least": 1}]}, "there is no '.clop'"),
        ({"quantities": [{"quantity": "rank/gap", "above": 0}]}, "quantities are sharpening_share, rank/train/entropy"),
        ({"quantities": [{"quantity": "sharpening_share", "above": 0, "below": 1}]}, "one of above and below"),
        ({"quantities": [{"quantity": "sharpening_share"}]}, "one of above and below"),
        ({"quantities": [{"quantity": "sharpening_share", "above": "much"}]}, "one of above and below"),
        ({"quantities": ["sharpening_share"]}, "one of above and below"),
        ({"quantities": [{"quantity": "sharpening_share/+clop", "above": 0}]}, "there is no '.clop'"),
        ({"quantities": [{"quantity": "sharpening_share", "above": 0, "level": "x"}]}, "there is no 'x'"),
        (
            {"predictions": [{"arm": "-clip", "metric": "gap", "direction": "above", "reference": "ful"}]},
            "there is no 'ful'; choose from",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        read_design(node(**changes))


def test_new_entries_change_a_fingerprint_only_where_they_are_used() -> None:
    plain = by_hand({"score": [], "mask": ["truncation=mask_after"]}, "score")
    prediction = {"arm": "mask", "metric": "gap", "direction": "above"}

    def declared(**changes: Any) -> str:
        arms = {"score": [], "mask": ["truncation=mask_after"], "hide": ["truncation=mask_before"]}
        return read_design(node("arms", arms=arms, control="score", tricks=None, **changes)).fingerprint()

    # As computed before designs had kinds, tricks, a rule for collapsed runs and references.
    assert plain.collapsed is Collapsed.zero
    assert declared() == declared(collapsed="zero") == declared(columns=["gap"])
    assert declared() != declared(collapsed="last")
    assert declared(predictions=[prediction]) == declared(predictions=[{**prediction, "reference": ""}])
    assert declared(predictions=[prediction]) != declared(predictions=[{**prediction, "reference": "hide"}])
    assert read_design(node()).fingerprint() != read_design(node("factorial")).fingerprint()
    count = {"arm": "mask", "metric": "gap", "above": 0.1, "at_least": 2}
    assert declared(counts=[]) == declared() != declared(counts=[count])
    assert declared(counts=[count]) != declared(counts=[{**count, "at_least": 3}])


def test_a_predicted_count_holds_from_its_limit_on() -> None:
    least, most = CountPrediction("a", "gap", 0.1, at_least=2), CountPrediction("a", "gap", 0.1, at_most=2)
    assert [least.holds(number) for number in (1, 2, 3)] == [False, True, True]
    assert [most.holds(number) for number in (1, 2, 3)] == [True, True, False]
    assert [(least.sure(1, 0), least.sure(1, 1), least.sure(2, 5))] == [(True, False, True)]
    assert [(most.sure(2, 0), most.sure(2, 1), most.sure(3, 5))] == [(True, False, True)]


def test_a_count_of_a_metric_that_no_run_has_is_refused_before_the_first_run() -> None:
    count = {"arm": "+clip", "metric": "below_best/rollout/length", "above": 0.1, "at_least": 1}
    with pytest.raises(ValueError, match="no run has the metric 'below_best/rollout/length'"):
        require_known_metrics(read_design(node(counts=[count])))
    with pytest.raises(ValueError, match="'eval/downstream/acc': did you mean 'eval/downstream/accuracy'"):
        require_known_metrics(read_design(node(primary="eval/downstream/acc")))
    with pytest.raises(ValueError, match="'eval/held_out/accuracy': did you mean 'eval/heldout/accuracy'"):
        require_known_metrics(read_design(node(primary="eval/held_out/accuracy")))
    with pytest.raises(ValueError, match=r"design\.axis: there is no 'tokens'; choose from .*sampled_tokens"):
        require_known_metrics(read_design(node(axis="tokens")))
    known = {**count, "metric": "below_best/eval/heldout/accuracy"}
    require_known_metrics(read_design(node(counts=[known], primary="eval/downstream/accuracy", axis="steps")))


# In these, six arms now say what their recipe itself brought when they ran: a reward of its own, not the world's.
REWORDED = {"recipe_rates", "recipes_trust_region"}


def test_recorded_fingerprints_still_hold() -> None:
    """Running a finished experiment again must not look like a new declaration."""
    assert len(SAVED) > 18
    for name in SAVED:
        declared, design = saved_description(name)["sweep"]["declared"][-1], named_design(name)
        if name in REWORDED:
            said = "reward=strict_plus_minus"
            assert sum(said in words for words in design.arms.values()) == 6
            arms = {arm: tuple(word for word in words if word != said) for arm, words in design.arms.items()}
            design = replace(design, arms=arms)
        assert design.fingerprint() == declared["fingerprint"], name


def test_a_record_keeps_the_order_of_the_tricks(tmp_path: Path) -> None:
    """A ladder's arms are named after it."""
    declared = node("ladder", predictions=[{"arm": "+clip+token", "metric": "gap", "direction": "above"}])
    design = read_design(declared)
    record_sweep(tmp_path, "parts", [], None, declared, design.fingerprint(), ["test"], None, None)
    assert list(design.tricks) == ["clip", "token", "mask"]
    again = read_design(read_sweep(sweep_folder(tmp_path, "parts")).design)
    assert again == design and list(again.tricks) == list(design.tricks)
