"""Studies of the method that need no network: `theory` puts the paper's analysis to the test."""
