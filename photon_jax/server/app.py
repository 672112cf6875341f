"""create_app: the web application of one server, its endpoints put together."""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, FastAPI

import photon_jax
from photon_jax.server import chat, completions, health, models, pages, prometheus, shim, stats, tokens
from photon_jax.server.documents import without_422
from photon_jax.server.errors import install_error_handlers
from photon_jax.server.state import ServerState

# Each makes the endpoints of one module; a request's is looked for in this order.
_ROUTERS: tuple[Callable[[ServerState], APIRouter], ...] = (
    chat.router,
    completions.router,
    models.router,
    tokens.router,
    health.router,
    stats.router,
    prometheus.router,
    shim.router,
    pages.router,
)


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Returns the OpenAPI document."""
        return without_422(super().openapi())


def create_app(state: ServerState) -> FastAPI:
    """Returns the application that serves `state`; several may live in one process."""
    app = _App(title="photon_jax", version=photon_jax.__version__, docs_url=None, redoc_url=None)
    install_error_handlers(app)
    for make_router in _ROUTERS:
        app.router.routes += make_router(state).routes  # included, each would be looked for in two steps
    return app
