"""Links from a page to files outside of docs/: relative, as GitHub shows them.

On the site they lead to `extra.repository`; while it is empty their text names the file. A link to a file that isn't
there is a warning, which ends a strict build.
"""

import logging
import os
import posixpath
import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.links")
# Code isn't looked at: a block between fences, or a span that is no link's text.
CODE_OR_LINK = re.compile(
    r"(?P<code>^```.*?^```)"
    r"|(?<!!)\[(?P<text>[^]\[]+)\]\((?P<target>\.\./[^)#\s]+)(?P<anchor>#[^)\s]*)?\)"
    r"|(?P<span>`[^`\n]+`)",
    re.MULTILINE | re.DOTALL,
)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    root = os.path.dirname(config.config_file_path)
    here = posixpath.dirname(page.file.src_uri)
    repository = config.extra["repository"]

    def of_the_repository(link: re.Match[str]) -> str:
        if not link["target"]:
            return link[0]
        path = posixpath.normpath(posixpath.join("docs", here, link["target"]))
        if path == "docs" or path.startswith("docs/"):
            return link[0]  # mkdocs checks these
        if not os.path.exists(os.path.join(root, path)):
            log.warning("%s: no file %s", page.file.src_uri, path)
        if not repository:
            return link["text"] if path in link["text"] else f"{link['text']} (`{path}`)"
        kind = "tree" if os.path.isdir(os.path.join(root, path)) else "blob"
        return f"[{link['text']}]({repository}/{kind}/main/{path}{link['anchor'] or ''})"

    return CODE_OR_LINK.sub(of_the_repository, markdown)
