"""What studies measure: subsets by gradient norm, losses and their surfaces; `theory` needs no network."""
