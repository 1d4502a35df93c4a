"""Where each trick of five methods acts, by the saved data."""

from __future__ import annotations

from pathlib import Path

import pytest
from declared_experiments import EXPERIMENTS, saved_points
from pages import acting as module
from pages.acting import ALIKE, METHODS, acting_table, documented_acting, measured, tricks_of

from grpo_lab.analysis.stats.intervals import t_interval


@pytest.mark.few(1)
@pytest.mark.parametrize("method", METHODS)
def test_every_trick_of_a_method_acts_somewhere_on_four_bases(method: str) -> None:
    found = measured(EXPERIMENTS)
    assert [trick for trick in tricks_of(method) if trick not in found] == []
    assert {found[trick].apart.n for trick in tricks_of(method)} == {4}
    assert [trick for trick in tricks_of(method) if not found[trick].acts] == []
    assert all(found[trick].scene[0].startswith("world=") for trick in tricks_of(method))


@pytest.mark.extended
def test_a_share_is_what_the_logged_steps_say() -> None:
    """The mean over a run's steps, over four base models of one seed each, beside the control's."""
    points = saved_points("acts_length").query("step > 0")
    steps = points[points["arm"].isin(["plain", "mask_after"])]
    means = steps.groupby(["arm", "seed"])["active_fraction/truncation"].mean().unstack("arm")
    (one,) = (acting for trick, acting in measured(EXPERIMENTS).items() if trick == "truncation=mask_after")
    assert one.share == pytest.approx(means["mask_after"].mean()) and one.beside == means["plain"].mean() == 0
    assert one.apart == t_interval((means["mask_after"] - means["plain"]).tolist())
    assert one.metric == "active_fraction/truncation" and one.scene == ("world=length",)


@pytest.mark.extended
def test_a_trick_acts_where_the_verdict_says_so() -> None:
    found = measured(EXPERIMENTS)
    words = {trick: found[trick].verdict for method in METHODS for trick in tricks_of(method)}
    assert {trick for trick, word in words.items() if word != "supported"} == {"group_filter=resample_three"}
    assert words["group_filter=resample_three"] == ALIKE  # two of three batches, always


@pytest.mark.extended
def test_the_index_shows_the_table() -> None:
    assert [path for path, text in documented_acting().items() if path.read_text() != text] == [], "run `make docs`"


def test_a_trick_that_nothing_measured_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "METHODS", ("gspo",))
    with pytest.raises(ValueError, match=r"acts_\* measured importance=sequence, surrogate=ppo_gspo: add an arm"):
        acting_table(tmp_path)
