"""GET /v1/models and /v1/models/{id}."""

from fastapi import APIRouter

from photon_jax.server.documents import errors
from photon_jax.server.protocol import Model, ModelList
from photon_jax.server.sampling import check_model
from photon_jax.server.state import ServerState


def router(state: ServerState) -> APIRouter:
    """Returns the endpoints that tell of the model; they answer also while it loads."""
    api = APIRouter()

    @api.get("/v1/models", responses=errors(401, 500))
    async def list_models() -> ModelList:
        """The models that the server has: one."""
        return {"object": "list", "data": [_model(state)]}

    @api.get("/v1/models/{model:path}", responses=errors(401, 404, 500))
    async def one_model(model: str) -> Model:
        """One model; its name may hold slashes."""
        check_model(state, model)
        return _model(state)

    return api


def _model(state: ServerState) -> Model:
    model: Model = {
        "id": state.model_name,
        "object": "model",
        "created": int(state.created_at),
        "owned_by": "photon_jax",
        "root": state.model_name,
    }
    if state.engine is not None:
        model["max_model_len"] = state.engine.max_model_len
    return model
