"""The chat page at ``/``: one file, under a policy that lets it run its own script and talk to this server alone."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

PATH = "/"

router = APIRouter()


@router.get(PATH, include_in_schema=False)
async def chat_page() -> Response:
    """Show the page."""
    html, policy = _page()
    headers = {
        "Content-Security-Policy": policy,
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    return Response(html, media_type="text/html; charset=utf-8", headers=headers)


@functools.cache
def _page() -> tuple[str, str]:
    """Return the page and its policy (Content Security Policy Level 3): script and style by their hashes, and no
    assignment of text as markup (``require-trusted-types-for``)."""
    html = files("astrai_infer.server").joinpath("chat.html").read_text(encoding="utf-8")
    rules = [
        "default-src 'none'",
        f"script-src {_hashes(html, 'script')}",
        f"style-src {_hashes(html, 'style')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    return html, "; ".join(rules)


def _hashes(html: str, tag: str) -> str:
    """Return the sources ``'sha256-...'`` of what stands between the tags."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found]
    return " ".join(f"'sha256-{digest}'" for digest in digests)
