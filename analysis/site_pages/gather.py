"""Gather the pages: from those of the navigation, every page, picture and source file that links lead to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from os.path import relpath
from pathlib import Path, PurePosixPath

import nbformat  # pyright: ignore[reportMissingImports]  of the extra `site`
from latex2mathml.converter import convert  # pyright: ignore[reportMissingImports]

# A link or picture of Markdown: what is between the parentheses, split at an anchor. Other forms are refused.
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s<]+)(#[^)]*)?(?=\))")
_OTHER_LINK = re.compile(r"\]\((?:<|[^)\s]+ [\"'])|<(?:a href|img src)=|^\[[^\]]+\]: ", flags=re.M)
# Fenced code, then code within a paragraph, which may go over a line.
_CODE = re.compile(
    r"^ *(?P<fence>`{3,}|~{3,})[^\n]*\n.*?^ *(?P=fence)[`~]*[ \t]*$"
    r"|(?P<tick>`+)(?!`)(?:(?!\n\s*\n).)+?(?<!`)(?P=tick)(?!`)",
    flags=re.S | re.M,
)
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\w$\\])\$(?=\S)([^$\n]+?)(?<![\s\\])\$(?!\w)", flags=re.S)
_COPIED = (".png", ".svg", ".html", ".csv", ".parquet", ".gz", ".cff")
# Pages of source code would come before those that explain it.
_NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
_LANGUAGES_OF_CELLS = {"%%bash": "bash", "%%capture": "python"}
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json", ".sh": "bash"}


@dataclass
class Gathered:
    """Page in the site -> its Markdown, and file in the site -> the file it is a copy of."""

    pages: dict[str, str] = field(default_factory=dict)
    copies: dict[str, Path] = field(default_factory=dict)


def gather(root: Path, starts: list[str], generated: dict[str, str]) -> Gathered:
    """Everything below `root` that the pages `starts` lead to, by links of any length.

    Raises ValueError for a page that does not exist, or a link that leads nowhere.
    """
    found, open_paths = Gathered(), list(starts)
    while open_paths:
        path = open_paths.pop()
        name = page_name(path)
        if name in found.pages or path in found.copies:
            continue
        if path in generated:
            found.pages[name] = generated[path]
        elif PurePosixPath(path).suffix in _COPIED:
            found.copies[path] = _existing(root, path, path)
        else:
            text = _text(root, path)
            found.pages[name] = _for_the_site(root, path, text)
            open_paths += _targets(root, path, text)
    return found


def page_name(path: str) -> str:
    """Where the site has the page of a file: a source file becomes a page that shows it."""
    return path if path.endswith(".md") else f"{path}.md"


def _existing(root: Path, path: str, page: str) -> Path:
    if not (root / path).exists():
        raise ValueError(f"{page}: there is no {path}; correct the link, or the entry in nav")
    return root / path


def _text(root: Path, path: str) -> str:
    file = _existing(root, path, path)
    if file.is_dir():
        entries = sorted(one.name + "/" * one.is_dir() for one in file.iterdir() if one.name[0] not in "._")
        return "\n".join([f"# {path}", "", *(f"- `{name}`" for name in entries)])
    if file.suffix == ".md":
        return file.read_text()
    if file.suffix == ".ipynb":
        return "\n\n".join(_cells(file)) + "\n"
    language = _LANGUAGES.get(file.suffix, "makefile" if file.name == "Makefile" else "text")
    return f"{_NOT_SEARCHED}# {path}\n\n{_fenced(file.read_text().rstrip(), language)}\n"


def _cells(file: Path) -> Iterator[str]:
    """A notebook as Markdown: its text, its code and its outputs; a picture stands in the page itself."""
    for cell in nbformat.read(file, as_version=4).cells:
        if cell.cell_type == "markdown":
            yield cell.source
            continue
        yield _fenced(cell.source, _LANGUAGES_OF_CELLS.get(cell.source.split("\n", 1)[0].split(" ")[0], "python"))
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                yield f"![](data:image/png;base64,{data['image/png'].replace(chr(10), '')})"
            elif "text/html" in data:
                yield f'<div class="output" markdown="0">\n{_without_blank_lines(data["text/html"])}\n</div>'
            elif text := data.get("text/plain", output.get("text", "")):
                yield _fenced(text.rstrip(), "text")


def _fenced(text: str, language: str) -> str:
    return f"````{language}\n{text}\n````"


def _without_blank_lines(html: str) -> str:
    html = re.sub(r"<style.*?</style>", "", html, flags=re.S)
    return "\n".join(line for line in html.splitlines() if line.strip())


def _targets(root: Path, path: str, text: str) -> list[str]:
    """The files that the links of a page lead to."""
    if not path.endswith((".md", ".ipynb")):
        return []
    prose = [part for part, is_code in _parts(text) if not is_code]
    for part in prose:
        if other := _OTHER_LINK.search(part):
            raise ValueError(f"{path}: write `{other[0]}...` as [text](target), the form that is checked")
    return [_resolved(root, path, found[1]) for part in prose for found in _LINK.finditer(part)]


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """The text in pieces, each with whether it is code."""
    end = 0
    for found in _CODE.finditer(text):
        yield text[end : found.start()], False
        yield found[0], True
        end = found.end()
    yield text[end:], False


def _resolved(root: Path, page: str, target: str) -> str:
    """The path from the root that a link means; a folder with a page of its own is that page."""
    place = PurePosixPath(relpath((root / page).parent / target, root)).as_posix()
    if place.startswith(".."):
        raise ValueError(f"{page}: {target} is outside of the repository")
    _existing(root, place, page)
    return f"{place}/README.md" if (root / place / "README.md").is_file() else place


def _for_the_site(root: Path, path: str, text: str) -> str:
    """The text with links to pages of the site, and formulas as MathML; code stays as it is."""
    if not path.endswith((".md", ".ipynb")):
        return text
    folder = PurePosixPath(path).parent

    def link(found: re.Match[str]) -> str:
        target = _resolved(root, path, found[1])
        if PurePosixPath(target).suffix not in _COPIED:
            target = page_name(target)
        return relpath(target, folder) + (found[2] or "")

    return "".join(part if code else _FORMULA.sub(_math, _LINK.sub(link, part)) for part, code in _parts(text))


def _math(found: re.Match[str]) -> str:
    """A formula as MathML. One in a line stands in a span, without which a line that begins with it is a block."""
    if found[1]:
        return convert(found[1], display="block")
    return f"<span>{convert(found[2])}</span>"
