"""How SGLang comes to Folio: its table of backends."""

NAME = "folio"


def register() -> None:
    """Makes the backend known under the name folio. Further calls do nothing."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    if NAME in ATTENTION_BACKENDS:
        return
    ATTENTION_BACKENDS[NAME] = create
    ATTENTION_BACKEND_CHOICES.append(NAME)


def create(model_runner):
    """The backend of a model."""
    from folio_sglang.backend import FolioAttnBackend

    return FolioAttnBackend(model_runner)
