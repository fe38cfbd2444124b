"""Links from a page to files outside of docs/: relative, as GitHub shows them, and on the site to the repository.

A link to a file that isn't there is a warning, which ends a strict build.
"""

import logging
import os
import posixpath
import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.links")
# Code isn't looked at: a block between fences, or a span.
CODE_OR_LINK = re.compile(
    r"(?P<code>^```.*?^```|`[^`\n]+`)|\]\((?P<target>\.\./[^)#\s]+)(?P<anchor>#[^)\s]*)?\)", re.M | re.S
)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    root = os.path.dirname(config.config_file_path)
    here = posixpath.dirname(page.file.src_uri)

    def of_the_repository(link: re.Match[str]) -> str:
        if link["code"]:
            return link[0]
        path = posixpath.normpath(posixpath.join("docs", here, link["target"]))
        if path == "docs" or path.startswith("docs/"):
            return link[0]  # mkdocs checks these
        if not os.path.exists(os.path.join(root, path)):
            log.warning("%s: no file %s", page.file.src_uri, path)
        kind = "tree" if os.path.isdir(os.path.join(root, path)) else "blob"
        return f"]({config.extra['repository']}/{kind}/main/{path}{link['anchor'] or ''})"

    return CODE_OR_LINK.sub(of_the_repository, markdown)
