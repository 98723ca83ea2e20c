"""How vLLM comes to Folio: the backend's name, and the platform's choice of a class.

vLLM reserves the registry's member CUSTOM for backends of others. FOLIO is another name of it. A member of its own
would not do: configurations are pickled to processes that have not loaded their plugins yet, and members made at run
time cannot be unpickled there.

A platform chooses the class. CUDA's takes one class for a name, and Folio has one for MLA and one for the rest. The
CPU's takes its own backend whatever the name says. So both ask `backend_for` where the name is FOLIO.
"""

from functools import wraps

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

logger = init_logger(__name__)

NAME = "FOLIO"
ATTENTION = "folio_vllm.attention.FolioBackend"
MLA = "folio_vllm.mla.FolioMLABackend"


def register() -> None:
    """Makes FOLIO known to this process's vLLM. Further calls do nothing."""
    if NAME in AttentionBackendEnum.__members__:
        return
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden():
        logger.error(
            "The backend FOLIO is not registered: %s has the registry's member CUSTOM. VLLM_PLUGINS chooses plugins.",
            custom.get_path(),
        )
        return
    register_backend(custom, ATTENTION)
    AttentionBackendEnum._member_map_[NAME] = custom
    _ask_backend_for(type(current_platform))


def _ask_backend_for(platform: type) -> None:
    """Lets a platform's `get_attn_backend_cls` answer FOLIO by `backend_for`."""
    chosen_by_platform = platform.get_attn_backend_cls.__func__

    @wraps(chosen_by_platform)
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        if selected_backend is AttentionBackendEnum.CUSTOM:
            return backend_for(cls, attn_selector_config)
        return chosen_by_platform(cls, selected_backend, attn_selector_config, num_heads)

    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def backend_for(platform: type, config) -> str:
    """The path of the class for a layer's configuration.

    Raises:
        ValueError: Folio cannot do what the layer needs; the message lists why.
    """
    if platform._enum.name not in ("CPU", "CUDA"):
        raise ValueError(
            f"attention_backend is FOLIO on the platform {platform.device_name}; CPU and CUDA are accepted"
        )
    from vllm.utils.import_utils import resolve_obj_by_qualname

    path = MLA if config.use_mla else ATTENTION
    reasons = resolve_obj_by_qualname(path).validate_configuration(
        device_capability=platform.get_device_capability(), **config._asdict()
    )
    if reasons:
        raise ValueError(f"attention_backend is FOLIO, which cannot serve {config}: {'; '.join(reasons)}")
    logger.info_once("Using Folio for attention (%s).", path.rsplit(".", 1)[-1])
    return path
