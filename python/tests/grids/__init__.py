"""The acceptance grids of the peers' unit tests, whole: their shapes and tolerances, and Folio's results against a
formula in float64."""
