"""Endpoints: whether the server is ready, whether it lives, and which version it is."""

import time

from fastapi import APIRouter, Response
from typing_extensions import TypedDict

import photon_jax
from photon_jax.server.errors import RETRY_AFTER_S
from photon_jax.server.state import Phase, ServerState


class Health(TypedDict):
    """How the server is.

    Attributes:
      phase: "loading", "ready", "draining" (it ends when its running requests have) or "dead" (the engine failed).
      message: what it does right now, for people.
      uptime_s: seconds since it started.
    """

    phase: Phase
    message: str
    model: str
    uptime_s: float


class Version(TypedDict):
    """Which photon_jax this is."""

    version: str


def router(state: ServerState) -> APIRouter:
    """Returns the endpoints."""
    routes = APIRouter(tags=["health"])

    @routes.get("/health", responses={503: {"model": Health}})
    async def health(response: Response) -> Health:
        """Status 200 when requests are served, else 503."""
        return _describe_as(response, state, is_well=state.phase == "ready")

    @routes.get("/live", responses={503: {"model": Health}})
    async def live(response: Response) -> Health:
        """Status 200 while there is no reason to start the process again, also while the model loads."""
        return _describe_as(response, state, is_well=state.phase != "dead")

    @routes.get("/api/health")
    async def phase() -> Health:
        """Status 200 in every phase."""
        return describe(state)

    @routes.get("/version")
    async def version() -> Version:
        """The version of photon_jax."""
        return {"version": photon_jax.__version__}

    return routes


def describe(state: ServerState) -> Health:
    """Returns how the server is."""
    messages = {
        "loading": state.loading_message,
        "ready": "ready",
        "draining": "ending: running requests are finished, new ones are refused",
        "dead": "the engine failed and serves no more; the server's log has the reason",
    }
    return {
        "phase": state.phase,
        "message": messages[state.phase],
        "model": state.model_name,
        "uptime_s": round(time.time() - state.created_at, 3),
    }


def _describe_as(response: Response, state: ServerState, *, is_well: bool) -> Health:
    if not is_well:
        response.status_code = 503
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return describe(state)
