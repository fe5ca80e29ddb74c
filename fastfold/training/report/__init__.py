"""Report of a run: a page with its curves and the calibration of its confidence."""
