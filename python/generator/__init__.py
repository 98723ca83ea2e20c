"""Makes src/folio/_generated out of include/folio/folio.h: `python -m generator`, in the folder python/."""
