"""SGLang's attention by Folio: `--attention-backend folio`.

SGLang calls `register` as a plugin, in each of its processes.
"""


def register() -> None:
    """Makes the backend known under the name folio. Further calls do nothing."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    if "folio" in ATTENTION_BACKENDS:
        return
    ATTENTION_BACKENDS["folio"] = _create
    ATTENTION_BACKEND_CHOICES.append("folio")


def _create(model_runner):
    from folio_sglang.backend import FolioAttnBackend

    return FolioAttnBackend(model_runner)
