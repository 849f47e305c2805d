"""The parts of the page, one a file: each makes its HTML of a run, or of several."""
