"""The errors that photon_jax raises on purpose: one base class and five kinds."""


class PhotonError(Exception):
    """Base of every error that photon_jax raises on purpose."""


class ConfigError(PhotonError, ValueError):
    """A setting is wrong, or two settings contradict each other; raised at start-up."""


class RequestError(PhotonError, ValueError):
    """The caller's request is wrong or can never be served; HTTP 400."""


class CapacityError(PhotonError, RuntimeError):
    """The waiting queue is full; the same request may succeed later; HTTP 503 with Retry-After."""


class CheckpointError(PhotonError, ValueError):
    """A checkpoint file, tensor, configuration or tokenizer can't be used."""


class EngineDeadError(PhotonError, RuntimeError):
    """The engine failed and serves no more; the cause is chained."""
