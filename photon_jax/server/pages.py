"""The chat page: its files, of the installed package or of a folder, under a policy that lets nothing else in."""

import dataclasses
import hashlib
import importlib.resources
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath

from fastapi import APIRouter, HTTPException, Request, Response

from photon_jax.errors import ConfigError
from photon_jax.server.state import ServerState

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".txt": "text/plain; charset=utf-8",
}
# Scripts, styles and requests of this origin alone, no inline ones, and HTML made from text by DOMPurify alone.
_POLICY = (
    "default-src 'self'",
    "img-src 'self' data:",
    "object-src 'none'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types dompurify",
)
HEADERS = {
    "Content-Security-Policy": "; ".join(_POLICY),
    "Cache-Control": "no-cache",  # kept by the browser, asked about at each visit: a new version shows at once
}


@dataclasses.dataclass(frozen=True, slots=True)
class StaticFile:
    """One file of the page, in memory."""

    content: bytes
    content_type: str
    etag: str


def read_files(static_dir: str | None = None) -> dict[str, StaticFile]:
    """Returns a page's files by their path under static/; others than CONTENT_TYPES names are left out.

    Args:
      static_dir: where they are; None: in the package.

    Raises:
      ConfigError: there is no page, or a file can't be read.
    """
    if static_dir is None:
        return _read_folder(importlib.resources.files("photon_jax.server") / "static")
    if not Path(static_dir, "index.html").is_file():
        raise ConfigError(f"static_dir {static_dir!r} holds no index.html; give the folder of a page, or leave it out")
    try:
        return _read_folder(Path(static_dir))
    except OSError as error:
        raise ConfigError(f"static_dir {static_dir!r} can't be read: {error}") from error


def _read_folder(folder: Traversable) -> dict[str, StaticFile]:
    found = {}
    pending = [(PurePosixPath(), folder)]
    while pending:
        path, entry = pending.pop()
        if entry.is_dir():
            pending += [(path / child.name, child) for child in entry.iterdir()]
        elif path.suffix in CONTENT_TYPES:
            content = entry.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            found[str(path)] = StaticFile(content, CONTENT_TYPES[path.suffix], etag)
    return found


def router(state: ServerState) -> APIRouter:
    """Returns the page at `/` and its files under `/static/`; they need no model, so they answer while it loads."""
    files = read_files(state.settings.static_dir)
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    async def page(request: Request) -> Response:
        return _answer(request, files["index.html"])

    @routes.get("/static/{path:path}")
    async def static(request: Request, path: str) -> Response:
        if path not in files:
            raise HTTPException(404, f"there is no file {path!r:.100} in the page")
        return _answer(request, files[path])

    return routes


def _answer(request: Request, file: StaticFile) -> Response:
    """Returns the file, or 304 to a browser that has it."""
    headers = {**HEADERS, "ETag": file.etag}
    if file.etag in request.headers.get("If-None-Match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.content_type, headers=headers)
