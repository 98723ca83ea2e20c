"""Folio in FastDeploy, as a plugin.

    FD_ATTENTION_BACKEND=FOLIO_MLA_ATTN   Folio's backend for MLA models, or an error
    FD_ATTENTION_BACKEND=FOLIO_ATTN       Folio's backend for other models, or an error
    FD_FOLIO_PREFER=1 with MLA_ATTN or DECODE_UNIFIED_ATTN
                                          FastDeploy's backend, whose ops run on Folio; a warning where they cannot
    FD_FOLIO_PREFER=1 with TRITON_MLA_ATTN
                                          Folio's backend for MLA models; a warning where it cannot run
    any other value                       FastDeploy as it is

FastDeploy calls `register` once per process, when its models are imported.
"""

import logging

from . import selection

logger = logging.getLogger(__name__)


def register():
    """Takes Folio's place in the FastDeploy of this process, as the environment asks."""
    name = selection.requested()
    if name is not None:
        from . import ops

        ops.rebind()
        selection.answer(name)
        logger.info("Folio answers FD_ATTENTION_BACKEND=%s", name)
        return

    preferred = selection.preferred()
    if preferred is not None:
        try:
            from . import ops

            ops.rebind()
            if selection.PREFERABLE[preferred]:
                selection.install(selection.PREFERABLE[preferred])
        except Exception as error:  # a preference: the host's own ops are there
            logger.warning("FD_FOLIO_PREFER is 1, but FastDeploy keeps its own ops: %s", error)
