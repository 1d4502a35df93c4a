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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("`a\nb` [l](x.yaml) `c`", "`a\nb` [l](x.yaml.md) `c`"),
        ("``a`b`` [l](x.yaml)", "``a`b`` [l](x.yaml.md)"),
        ("~~~\n[l](nowhere.md)\n~~~", "~~~\n[l](nowhere.md)\n~~~"),
        ("costs $5 or \\$7 and 8 $", "costs $5 or \\$7 and 8 $"),
    ],
)
def test_code_and_prices_stay_as_they_are(tmp_path: Path, text: str, shown: str) -> None:
    from site_pages.gather import gather

    (tmp_path / "x.yaml").write_text("b: 1\n")
    (tmp_path / "start.md").write_text(text)
    assert gather(tmp_path, ["start.md"], {}).pages["start.md"] == shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[l](x.yaml "title")', r"start\.md: write `\]\(x\.yaml \"\.\.\.` as"),
        ("<a href='x.yaml'>", r"start\.md: write `<a href=\.\.\.` as"),
        ("[l](../../etc)", r"\.\./\.\./etc is outside of the repository"),
    ],
)
def test_a_link_that_would_not_be_checked_is_refused(tmp_path: Path, text: str, message: str) -> None:
    from site_pages.gather import gather

    (tmp_path / "start.md").write_text(text)
    with pytest.raises(ValueError, match=message):
        gather(tmp_path, ["start.md"], {})


def test_a_notebook_shows_its_code_and_its_outputs(tmp_path: Path) -> None:
    import nbformat
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
    from site_pages.gather import gather

    table = new_output("execute_result", {"text/html": "<style>x</style><table>\n\n<tr></tr></table>"})
    cells = [
        new_markdown_cell("# N"),
        new_code_cell("%%bash\nls", outputs=[new_output("stream", text="a\n")]),
        new_code_cell("1", outputs=[table, new_output("display_data", {"image/png": "abc\n"})]),
    ]
    nbformat.write(new_notebook(cells=cells), tmp_path / "n.ipynb")
    page = gather(tmp_path, ["n.ipynb"], {}).pages["n.ipynb.md"]
    assert page.startswith("# N\n\n````bash\n%%bash\nls\n````\n\n````text\na\n````")
    assert "<table>\n<tr></tr></table>" in page and "![](data:image/png;base64,abc)" in page and "<style>" not in page


def test_a_page_that_no_page_leads_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from site_pages import build

    monkeypatch.setattr(build, "written_pages", lambda: ["README.md", "lost.md"])
    with pytest.raises(
        ValueError, match=r"no page leads to lost\.md: add an entry to analysis/site_pages/zensical.toml"
    ):
        build.build_site(tmp_path)


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
