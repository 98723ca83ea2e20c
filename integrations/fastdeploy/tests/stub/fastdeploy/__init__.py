"""A stand-in for FastDeploy with the interface that Folio's plugin uses: names, signatures and who imports what."""

__version__ = "2.5.0"
