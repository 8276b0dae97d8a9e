"""Hooks of mkdocs: pages that lie outside docs/ join the site, and links to files that do not are checked."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
JOINED = {
    "README.md": "index.md",
    "benchmarks/README.md": "speed.md",
    "examples/README.md": "examples.md",
    "docker/README.md": "images.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Pages of the repository, and what they are called on the site."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
NUMBER = re.compile(r"\b\d[\d.]*e-\d+")
CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
FENCE = re.compile(r"^(?:```|~~~).*?^(?:```|~~~)$", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Puts the version on every page."""
    version = re.search(r'^__version__ = "(.+)"', (ROOT / "collage_neuron" / "_version.py").read_text(), re.MULTILINE)
    config.copyright = f"collage_neuron {version[1] if version else ''}"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that lie outside docs/."""
    for source, uri in JOINED.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrites links for the site, but not inside code blocks."""
    uri = page.file.src_uri
    source = {site: path for path, site in JOINED.items()}.get(uri, f"docs/{uri}")
    kept = [m.group() for m in FENCE.finditer(markdown)]
    texts = FENCE.split(markdown)
    done = [LINK.sub(lambda m: _link(m, source, uri), text) for text in texts]
    return "".join(text + (kept[i] if i < len(kept) else "") for i, text in enumerate(done))


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Keeps numbers like 4.1e-5 whole, and in tables lets names of files break behind a slash."""
    parts = re.split(r"(<pre.*?</pre>|<code.*?</code>|<[^>]*>)", html, flags=re.DOTALL)
    text = "".join(p if p.startswith("<") else NUMBER.sub(r'<span class="number">\g<0></span>', p) for p in parts)
    return re.sub(r"<td.*?</td>", lambda cell: CODE.sub(_breakable, cell.group()), text, flags=re.DOTALL)


def _breakable(code: re.Match[str]) -> str:
    return re.sub(r"(?<=\w)(/|::)(?=\w)", r"\1<wbr>", code.group())


def _link(found: re.Match[str], source: str, uri: str) -> str:
    """The link as it is on the site; its text alone where the file is not part of the site, but is there."""
    image, text, to = found.groups()
    path, _, anchor = to.partition("#")
    if not path or ":" in path:
        return found.group()
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    there = JOINED.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
    if there is None:
        if not (ROOT / target).exists():
            raise PluginError(f"{source} links to {to}, and there is no {target}")
        return text
    relative = posixpath.relpath(there, posixpath.dirname(uri) or ".")
    return f"{image}[{text}]({relative}{'#' * bool(anchor)}{anchor})"
