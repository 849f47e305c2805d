"""Several processes that work on one training or evaluation."""
