"""How SGLang comes to Folio: its table of backends, and the one that it makes for drafts."""

NAME = "folio"
_DRAFTS = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"


def register() -> None:
    """Makes the backend known under the name folio. Further calls do nothing."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME in ATTENTION_BACKENDS:
        return
    ATTENTION_BACKENDS[NAME] = create
    ATTENTION_BACKEND_CHOICES.append(NAME)
    HookRegistry.register(_DRAFTS, _know_folio, HookType.AROUND)


def create(model_runner):
    """The backend of a model."""
    if getattr(model_runner, "use_mla_backend", False):
        from folio_sglang.mla import FolioMLAAttnBackend

        return FolioMLAAttnBackend(model_runner)
    from folio_sglang.backend import FolioAttnBackend

    return FolioAttnBackend(model_runner)


def _know_folio(create_backend, factory, backend_name, backend_map, error_template, stamps_children=False):
    """Adds Folio to the table of which a factory takes the backend of a draft's decodes, or of its extends.

    Only that of decodes has a backend for each step, whose names the factory sets (`stamps_children`).
    """
    made = _create_decodes if stamps_children else _create_extends
    known = backend_map | {NAME: lambda: (NAME, made(factory))}
    return create_backend(factory, backend_name, known, error_template, stamps_children=stamps_children)


def _create_decodes(factory):
    from folio_sglang.drafts import FolioMultiStepDraftBackend

    return FolioMultiStepDraftBackend(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)


def _create_extends(factory):
    return create(factory.draft_model_runner)
