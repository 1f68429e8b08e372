"""The API's description at ``/docs``: one file without a script, made from the OpenAPI document; no outside requests."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

PATHS = {"/docs", "/openapi.json"}

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
body { color: #1c1c1c; background: #fff; }
code { font: 0.93em ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; margin: 0.5rem 0 1rem; }
td, th { border-top: 1px solid #8886; padding: 0.2rem 0.6rem 0.2rem 0; text-align: left; vertical-align: top; }
h3 { margin: 1.6rem 0 0.2rem; }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #161616; } a { color: #8ab4f8; } }
"""
_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

router = APIRouter()


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    """Return the OpenAPI document; making it for the first time takes half a second."""
    return JSONResponse(await asyncio.to_thread(request.app.openapi))


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    """Show routes and fields."""
    html = await asyncio.to_thread(lambda: describe(request.app.openapi()))
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
    return Response(html, media_type="text/html; charset=utf-8", headers=headers)


def describe(document: dict[str, Any]) -> str:
    """Return an OpenAPI document as HTML."""
    schemas: dict[str, Any] = document.get("components", {}).get("schemas", {})
    routes: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            tag = operation.get("tags", ["Other"])[0]
            routes.setdefault(tag, []).append(_route(method, path, operation))
    parts = [f"<h2>{escape(tag)}</h2>{''.join(listed)}" for tag, listed in routes.items()]
    parts.append("<h2>Objects</h2>")
    parts += [
        f'<h3 id="{escape(name)}">{escape(_short(name))}</h3>{_fields(schema)}'
        for name, schema in schemas.items()
        if "properties" in schema
    ]
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}: API</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1><p>{escape(info.get('description', ''))} "
        'The same for programs: <a href="openapi.json">openapi.json</a>.</p>'
        f"{''.join(parts)}</body></html>"
    )


def _route(method: str, path: str, operation: dict[str, Any]) -> str:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    takes = "" if body is None else f" Body: {_kind(body)}."
    return (
        f"<h3><code>{escape(method.upper())} {escape(path)}</code></h3>"
        f"<p>{escape(operation.get('description', ''))}{takes}</p>"
    )


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{_kind(field)}{', required' if name in required else ''}</td>"
        f"<td>{escape(field.get('description', ''))}</td></tr>"
        for name, field in schema["properties"].items()
    )
    about = f"<p>{escape(schema['description'])}</p>" if "description" in schema else ""
    return f"{about}<table><tr><th>Field</th><th>Value</th><th></th></tr>{rows}</table>"


def _kind(schema: dict[str, Any]) -> str:
    """What a value is, in words and links."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#{escape(name)}">{escape(_short(name))}</a>'
    if members := schema.get("anyOf", schema.get("oneOf")):
        return " or ".join(_kind(member) for member in members if member.get("type") != "null") or "null"
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in values)
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return escape(schema.get("type", "anything"))


def _short(name: str) -> str:
    """Two objects of one name stand under the names of their modules."""
    return name.removeprefix("astrai_infer__server__").replace("_schema__", " ")
