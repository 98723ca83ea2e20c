"""What follows from folio.h. Generated from folio.h by `python -m generator`; do not edit."""
