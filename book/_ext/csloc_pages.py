"""Leave out of every page what jupyter-book adds but this book does not use.

The live-code client (thebe) is loaded from the network and is never started here; and inline
scripts arrive twice, so that the browser reports constants declared again.
"""

from __future__ import annotations

import re
from typing import Any

UNUSED = "thebe"
SETTINGS = re.compile(r'<script type="text/x-thebe-config">.*?</script>', re.DOTALL)


def setup(app: Any) -> dict[str, bool]:
    """Register with Sphinx; late, so that all other extensions have added their files."""
    app.connect("html-page-context", tidy_scripts, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def tidy_scripts(app: Any, page: str, template: str, context: dict, doctree: Any) -> None:
    """Drop what is unused, and inline scripts that are there already."""
    for kind in ("script_files", "css_files"):
        kept, bodies = [], set()
        for file in context.get(kind, ()):
            body = getattr(file, "attributes", {}).get("body", "")
            name = f"{getattr(file, 'filename', file)} {body}".lower()
            if UNUSED in name or (body and body in bodies):
                continue
            bodies.add(body)
            kept.append(file)
        context[kind] = kept
    if "body" in context:
        context["body"] = SETTINGS.sub("", context["body"])
