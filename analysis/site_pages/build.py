"""Build the site: gather its pages, write them with the navigation, and let zensical check and render them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from grpo_lab.config.hydra_setup import bootstrap
from site_pages.gather import gather, page_name
from site_pages.look_up import generated_pages

ROOT = Path(__file__).parents[2]
CONFIG = Path(__file__).with_name("zensical.toml")
STYLE = CONFIG.with_name("extra.css")
NOT_ON_THE_SITE = {"figures", "data", ".github"}  # tables beside saved data are pages where a page links to them


def build_site(folder: Path) -> None:
    """Write the sources to `folder`/docs and the site to `folder`/site, and print where it starts.

    Raises ValueError for a broken link or a page that no page leads to, and CalledProcessError where zensical warns, as
    of an anchor that does not exist.
    """
    bootstrap()
    nav = _entries(tomllib.loads(CONFIG.read_text())["project"]["nav"])
    found = gather(ROOT, _paths(nav), generated_pages())
    if orphans := [page for page in written_pages() if page not in found.pages]:
        raise ValueError(f"no page leads to {', '.join(orphans)}: add an entry to {CONFIG.relative_to(ROOT)}")
    shutil.rmtree(folder / "docs", ignore_errors=True)
    for name, text in found.pages.items():
        (folder / "docs" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "docs" / name).write_text(text)
    for name, file in found.copies.items():
        (folder / "docs" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder / "docs" / name)
    shutil.copy(STYLE, folder / "docs")
    config, navs = re.subn(r"(?ms)^nav = \[\n.*?^\]\n", lambda _: f"nav = {_toml(nav)}\n", CONFIG.read_text())
    assert navs == 1, "zensical.toml has one nav"
    (folder / "zensical.toml").write_text(config)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    subprocess.run([*command, "-f", str(folder / "zensical.toml")], check=True)
    print(f"{len(found.pages)} pages: {folder / 'site' / 'index.html'}")


def _entries(nav: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The navigation with an entry for each experiment."""
    lists = {"experiments": "experiments/*/README.md", "superseded": "experiments/superseded/*/README.md"}
    entries = []
    for entry in nav:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            entries.append({title: _entries(target)})
        elif target in lists:
            pages = sorted(path.relative_to(ROOT) for path in ROOT.glob(lists[target]))
            entries.append({title: [{page.parts[-2]: page.as_posix()} for page in pages]})
        else:
            entries.append({title: target})
    return entries


def _paths(nav: list[dict[str, Any]]) -> list[str]:
    return [path for entry in nav for target in entry.values() for path in _paths_of(target)]


def _paths_of(target: str | list[dict[str, Any]]) -> list[str]:
    return [target] if isinstance(target, str) else _paths(target)


def _toml(nav: list[dict[str, Any]]) -> str:
    entries = []
    for entry in nav:
        ((title, target),) = entry.items()
        value = json.dumps(page_name(target), ensure_ascii=False) if isinstance(target, str) else _toml(target)
        entries.append(f"{{ {json.dumps(title, ensure_ascii=False)} = {value} }}")
    return f"[{', '.join(entries)}]"


def written_pages() -> list[str]:
    """The pages that people wrote, by path from the root."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.splitlines() if not NOT_ON_THE_SITE & set(Path(name).parts)]
