"""The documentation site: every page reachable, links and anchors right, code untouched, formulas rendered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.extended, pytest.mark.needs("zensical", "latex2mathml", "nbformat")]


def test_it_builds_without_a_warning_and_every_page_is_reached(tmp_path: Path) -> None:
    from site_pages.build import ROOT, build_site, written_pages

    build_site(tmp_path)
    made = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.html")}
    for page in written_pages():
        assert re.sub(r"(^|/)README\.md$", r"\1index.md", page).replace(".md", ".html") in made, page
    start = (tmp_path / "site" / "index.html").read_text()
    assert "experiments/same_reward/figures/same_reward_picture.png" in start
    assert (tmp_path / "site/experiments/same_reward/figures/same_reward_picture.png").exists()
    assert (tmp_path / "site" / "search.json").stat().st_size > 100_000
    assert "<math" in (tmp_path / "site" / "conf" / "loss.html").read_text()
    for notebook in (ROOT / "analysis" / "tutorials").glob("*.ipynb"):
        assert "data:image/png" in (tmp_path / f"site/analysis/tutorials/{notebook.name}.html").read_text()


def test_a_link_is_followed_and_rewritten_and_code_is_not(tmp_path: Path) -> None:
    from site_pages.gather import gather

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.yaml").write_text("b: 1\n")
    (tmp_path / "a" / "README.md").write_text("# A\n\n[up](../start.md#top) `$HOME/$USER`\n")
    text = "[a](a) [x](a/x.yaml) [web](https://b.c) `[y](nowhere.md)`\n\n$x_1$ costs $5\n"
    (tmp_path / "start.md").write_text(f"# S\n\n{text}")
    found = gather(tmp_path, ["start.md"], {})
    assert set(found.pages) == {"start.md", "a/README.md", "a/x.yaml.md"}
    assert "[a](a/README.md) [x](a/x.yaml.md) [web](https://b.c) `[y](nowhere.md)`" in found.pages["start.md"]
    assert "<msub><mi>x</mi><mn>1</mn></msub></mrow></math></span> costs $5" in found.pages["start.md"]
    assert "[up](../start.md#top) `$HOME/$USER`" in found.pages["a/README.md"]
    assert "```yaml\nb: 1\n" in found.pages["a/x.yaml.md"]


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    from site_pages.gather import gather

    (tmp_path / "start.md").write_text("# S\n\n[a](a.md)\n")
    with pytest.raises(ValueError, match=r"start\.md: there is no a\.md; correct the link"):
        gather(tmp_path, ["start.md"], {})


def test_look_up_pages_name_every_option_metric_and_command() -> None:
    from site_pages.look_up import generated_pages

    from grpo_lab.cli import command_line
    from grpo_lab.config.catalogue import axes
    from grpo_lab.config.hydra_setup import bootstrap
    from grpo_lab.tracking.metrics import REGISTRY

    bootstrap()
    pages = generated_pages()
    for axis in axes():
        assert all(f"| `{option.name}` |" in pages["generated/options.md"] for option in axis.options)
    assert all(f"| `{metric.name}` |" in pages["generated/metrics.md"] for metric in REGISTRY)
    assert all(f"## grpo-lab {name}\n" in pages["generated/commands.md"] for name in command_line()[1])
