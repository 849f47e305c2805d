"""Building blocks that the other packages share."""
