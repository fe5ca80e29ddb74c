"""The page that sums a run up, with its curves and the calibration of its confidence."""
