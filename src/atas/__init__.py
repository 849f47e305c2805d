"""Fast adversarial training with adaptive step sizes."""
